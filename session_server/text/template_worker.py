"""Render a chat template in a process of its own, with a deadline.

A template is a program by the checkpoint's author. Its faults only cost the turn it is rendered
for: a render that takes too long, uses too much memory or writes too much fails that turn, and the
process is killed and restarted. The process runs one job at a time; others wait in order.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from signal import SIGKILL, SIGPROF
from typing import Final

import msgspec

from session_server.core.child_process import start_child
from session_server.core.errors import TokenizeFailed
from session_server.text.chat_template import RenderJob, TemplateSource
from session_server.text.model_files import ModelFilesError
from session_server.text.template_child import HEADER, Answer, ChildSettings, NotRendered

START_TIMEOUT_S: Final = 30.0
"""Time for the process to start and to compile the template, on a machine under load."""

_ARGV: Final = (sys.executable, "-m", "session_server", "_template")
_UTF8_BYTES: Final = 4
"""Of one character, at most."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limit what one job may use.

    `deadline_s`: seconds until its answer, for a process that waits instead of computing. `cpu_s`:
    seconds of processor time, which a loaded machine does not stretch. `memory_bytes`: address
    space of the process.
    """

    deadline_s: float = 5.0
    cpu_s: float = 1.0
    memory_bytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _Killed(TokenizeFailed):
    """Report that another process killed the child: an operator, or the system for memory."""


class TemplateWorker:
    """Render a template in a child process; implements `TemplateRenderer`."""

    def __init__(self, template: TemplateSource, limits: RenderLimits) -> None:
        self._limits = limits
        self._max_answer_bytes = template.max_chars * _UTF8_BYTES + (1 << 16)
        settings = ChildSettings(template, limits.cpu_s, limits.memory_bytes)
        self._settings = msgspec.msgpack.encode(settings)
        self._child: _Child | None = None
        self._lock = asyncio.Lock()

    @classmethod
    async def start(
        cls, template: TemplateSource, limits: RenderLimits | None = None
    ) -> TemplateWorker:
        """Start the process and compile the template.

        Raises:
            ModelFilesError: the template does not compile.
        """
        worker = cls(template, limits or RenderLimits())
        await worker._spawn()
        return worker

    @property
    def pid(self) -> int | None:
        """Return the process id of the child, None while there is none."""
        return self._child.process.pid if self._child is not None else None

    def render_now(self, job: RenderJob) -> None:
        """Return None: rendering needs another process."""

    async def render(self, job: RenderJob) -> list[str]:
        """Return the text of each conversation.

        Raises:
            TokenizeFailed: the template refused the messages, failed, or took too much.
        """
        try:
            frame = msgspec.msgpack.encode(job)
        except UnicodeEncodeError as error:
            raise TokenizeFailed("the text is not valid Unicode", param="input") from error
        async with self._lock:
            try:
                if self._child is None or self._child.process.poll() is not None:
                    await self._spawn()
                try:
                    answer = await self._request(frame, self._limits.deadline_s)
                except _Killed:
                    # Not the template's fault. It may have happened between two jobs.
                    await self._spawn()
                    answer = await self._request(frame, self._limits.deadline_s)
            except (ModelFilesError, _Killed) as error:  # it compiled when the server started
                raise TokenizeFailed(str(error), param="input") from error
        if isinstance(answer, NotRendered):
            raise TokenizeFailed(answer.message, param="input")
        return answer.texts

    async def close(self) -> None:
        """Kill the process."""
        async with self._lock:
            self._kill()

    async def _spawn(self) -> None:
        self._kill()
        try:
            ours, process = await asyncio.to_thread(start_child, _ARGV)
            reader, writer = await asyncio.open_connection(sock=ours)
            self._child = _Child(process, reader, writer)
            answer = await self._request(self._settings, START_TIMEOUT_S)
        except (OSError, TokenizeFailed) as error:
            raise ModelFilesError(f"the chat template was not compiled: {error}") from error
        if isinstance(answer, NotRendered):
            self._kill()
            raise ModelFilesError(answer.message)

    async def _request(self, frame: bytes, timeout_s: float) -> Answer:
        """Send one message and return its reply. A process that does not reply is killed.

        Raises:
            TokenizeFailed: it took too long, or it ended; `_Killed` if another process killed it.
        """
        child = self._child
        assert child is not None, "a request before the child was spawned"
        answer: Answer | None = None
        try:
            async with asyncio.timeout(timeout_s):
                child.writer.write(HEADER.pack(len(frame)) + frame)
                await child.writer.drain()
                (size,) = HEADER.unpack(await child.reader.readexactly(HEADER.size))
                if size > self._max_answer_bytes:
                    raise TokenizeFailed("the chat template wrote too much", param="input")
                payload = await child.reader.readexactly(size)
            answer = msgspec.msgpack.decode(payload, type=Answer)
        except TimeoutError:
            raise TokenizeFailed(
                f"the chat template took longer than {timeout_s:g} s", param="input"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._exit_reason(child) from None
        finally:
            # Otherwise a late reply would be read as the reply to the next job.
            if answer is None:
                self._kill()
        return answer

    async def _exit_reason(self, child: _Child) -> TokenizeFailed:
        status: int | None = None
        try:
            status = await asyncio.to_thread(child.process.wait, self._limits.deadline_s)
        except subprocess.TimeoutExpired:
            child.process.kill()  # it closed its socket but still runs
        if status == -SIGPROF:
            message = f"the chat template took more than {self._limits.cpu_s:g} s of processor time"
            return TokenizeFailed(message, param="input")
        kind = _Killed if status == -SIGKILL else TokenizeFailed
        return kind(f"the process of the chat template ended (status {status})", param="input")

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.process.kill()
        child.writer.close()
        # Reap it on a thread: a process with much memory takes a while to exit.
        asyncio.get_running_loop().run_in_executor(None, child.process.wait)
