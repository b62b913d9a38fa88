"""Run what a stranger wrote in a process of its own, with a deadline.

Its faults only cost the job it is run for: what takes too long, uses too much memory or writes too
much fails that job, and the process is killed and started again. The process does one job at a
time; others wait in order.
"""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import dataclass
from signal import SIGKILL, SIGPROF
from typing import Final

import msgspec

from session_server.core.child_process import PROGRAM, start_child
from session_server.text.worker_child import HEADER, Answer, ChildSettings, JobRefused

START_TIMEOUT_S: Final = 30.0
"""Time for the process to start and to prepare itself, on a machine under load."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limit what one job may use.

    `deadline_s`: seconds until its answer, for a process that waits instead of computing. `cpu_s`:
    seconds of processor time, which a loaded machine does not stretch. `memory_bytes`: address
    space of the process. `max_answer_bytes`: what it may write.
    """

    deadline_s: float
    cpu_s: float
    memory_bytes: int
    max_answer_bytes: int


class WorkerFailed(Exception):
    """Report a job that was not done, in words for the client."""


class WorkerCrashed(WorkerFailed):
    """Report a process that ended in the middle of a job, by itself."""


class WorkerLost(WorkerFailed):
    """Report a process that did not do a job, for which no job is to blame."""


class WorkerNotStarted(WorkerLost):
    """Report a process that did not start, or refused what it was to prepare."""


class _Killed(WorkerLost):
    """Report that another process killed the child: an operator, or the system for memory."""


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class WorkerProcess:
    """Do jobs in a child process, which starts with `start` or with the first job."""

    def __init__(self, command: str, source: bytes, limits: WorkerLimits, *, subject: str) -> None:
        """Describe the process.

        Args:
            command: the command of `session_server` that serves jobs.
            source: what it prepares.
            limits: of every job.
            subject: what fails, in messages.
        """
        self._argv = (*PROGRAM, command)
        self._limits = limits
        self._subject = subject
        settings = ChildSettings(source, limits.cpu_s, limits.memory_bytes)
        self._settings = msgspec.msgpack.encode(settings)
        self._child: _Child | None = None
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Return the process id of the child, None while there is none."""
        return self._child.process.pid if self._child is not None else None

    async def start(self) -> None:
        """Start the process. Raises WorkerNotStarted."""
        async with self._lock:
            await self._spawn()

    async def run(self, job: bytes) -> list[str]:
        """Return what a job gave. Raises WorkerFailed, as `_request` says."""
        async with self._lock:
            if self._child is None or self._child.process.poll() is not None:
                await self._spawn()
            try:
                answer = await self._request(job, self._limits.deadline_s)
            except _Killed:
                # Not the job's fault. It may have happened between two jobs.
                await self._spawn()
                answer = await self._request(job, self._limits.deadline_s)
        if isinstance(answer, JobRefused):
            raise WorkerFailed(answer.message)
        return answer.texts

    async def close(self) -> None:
        """Kill the process."""
        async with self._lock:
            self._kill()

    async def _spawn(self) -> None:
        self._kill()
        try:
            ours, process = await asyncio.to_thread(start_child, self._argv)
            reader, writer = await asyncio.open_connection(sock=ours)
            self._child = _Child(process, reader, writer)
            answer = await self._request(self._settings, START_TIMEOUT_S)
        except (OSError, WorkerFailed) as error:
            raise WorkerNotStarted(f"{self._subject} was not prepared: {error}") from error
        if isinstance(answer, JobRefused):
            self._kill()
            raise WorkerNotStarted(answer.message)

    async def _request(self, frame: bytes, timeout_s: float) -> Answer:
        """Send one message and return its reply. A process that does not reply is killed.

        Raises:
            WorkerFailed: it took too much processor time, or wrote too much.
            WorkerCrashed: it ended.
            WorkerLost: it was stopped, and did not answer in time; `_Killed` if another process
                killed it.
        """
        child = self._child
        assert child is not None, "a request before the child was spawned"
        answer: Answer | None = None
        try:
            async with asyncio.timeout(timeout_s):
                child.writer.write(HEADER.pack(len(frame)) + frame)
                await child.writer.drain()
                (size,) = HEADER.unpack(await child.reader.readexactly(HEADER.size))
                if size > self._limits.max_answer_bytes:
                    raise WorkerFailed(f"{self._subject} wrote too much")
                payload = await child.reader.readexactly(size)
            answer = msgspec.msgpack.decode(payload, type=Answer)
        except TimeoutError:
            raise WorkerLost(f"{self._subject} took longer than {timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._exit_reason(child) from None
        finally:
            # Otherwise a late reply would be read as the reply to the next job.
            if answer is None:
                self._kill()
        return answer

    async def _exit_reason(self, child: _Child) -> WorkerFailed:
        status: int | None = None
        try:
            status = await asyncio.to_thread(child.process.wait, self._limits.deadline_s)
        except subprocess.TimeoutExpired:
            child.process.kill()  # it closed its socket but still runs
        if status == -SIGPROF:
            limit = f"{self._limits.cpu_s:g} s of processor time"
            return WorkerFailed(f"{self._subject} took more than {limit}")
        kind = _Killed if status == -SIGKILL else WorkerCrashed
        return kind(f"the process of {self._subject} ended (status {status})")

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.process.kill()
        child.writer.close()
        # Reap it on a thread: a process with much memory takes a while to exit.
        asyncio.get_running_loop().run_in_executor(None, child.process.wait)
