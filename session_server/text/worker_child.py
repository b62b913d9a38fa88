"""Serve jobs in a process that can be killed, for `worker_process`.

The process reads jobs from an inherited socket, writes the answers to it in order, and exits when
the socket closes. Kernel limits on memory and on the processor time of each job end it whatever it
is doing, even if the server is gone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from io import BufferedReader, BufferedWriter
from typing import Final

import msgspec

from session_server.core.errors import SessionServerError
from session_server.models.errors import ModelError

HEADER: Final = struct.Struct("<I")
"""Length in bytes of the message behind it."""

COMPILE_CPU_S: Final = 5.0
"""Processor time for what is prepared once: a template is compiled, a vocabulary read."""

Job = Callable[[bytes], list[str]]
"""Do one job. Raises SessionServerError to refuse it."""


class ChildSettings(msgspec.Struct, frozen=True, array_like=True):
    """Hold the first message to the child. `source`: what it prepares. `cpu_s`: processor time of
    one job. `memory_bytes`: address space of the process."""

    source: bytes
    cpu_s: float
    memory_bytes: int


class JobDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Hold what a job gave; empty in the reply to `ChildSettings`."""

    texts: list[str]


class JobRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Say why a job was not done, in words for the client."""

    message: str


Answer = JobDone | JobRefused


def serve_jobs(fd: int, prepare: Callable[[bytes], Job], *, subject: str) -> int:
    """Serve the socket `fd` until the other end closes it. Returns the exit status.

    `prepare` makes the job from the settings' source. `subject`: what fails, in messages.
    """
    # A SIGINT sent to every process of a service; only the server decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (
        contextlib.suppress(ConnectionError),  # the server is gone
        socket.socket(fileno=fd) as connection,
        connection.makefile("rb") as messages,
        connection.makefile("wb") as answers,
    ):
        _serve(_messages(messages), answers, prepare, subject)
    return 0


def _serve(
    messages: Iterator[bytes],
    answers: BufferedWriter,
    prepare: Callable[[bytes], Job],
    subject: str,
) -> None:
    if (message := next(messages, None)) is None:
        return
    settings = msgspec.msgpack.decode(message, type=ChildSettings)
    _lower_limit(resource.RLIMIT_AS, settings.memory_bytes, subject)
    _lower_limit(resource.RLIMIT_CORE, 0, subject)
    jobs: list[Job] = []

    def start() -> list[str]:
        jobs.append(prepare(settings.source))
        return []

    _answer(answers, start, subject, cpu_s=COMPILE_CPU_S)
    for message in messages:
        _answer(answers, partial(jobs[0], message), subject, cpu_s=settings.cpu_s)


def _answer(
    stream: BufferedWriter, work: Callable[[], list[str]], subject: str, *, cpu_s: float
) -> None:
    """Run one piece of work within its time; SIGPROF ends a process that takes longer."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        frame = msgspec.msgpack.encode(JobDone(work()))
    except (SessionServerError, ModelError) as error:
        frame = msgspec.msgpack.encode(JobRefused(str(error)))
    except (MemoryError, UnicodeEncodeError) as error:
        frame = msgspec.msgpack.encode(JobRefused(f"{subject} failed: {type(error).__name__}"))
    signal.setitimer(signal.ITIMER_PROF, 0)
    stream.write(HEADER.pack(len(frame)))
    stream.write(frame)
    stream.flush()


def _messages(source: BufferedReader) -> Iterator[bytes]:
    while len(header := source.read(HEADER.size)) == HEADER.size:
        (size,) = HEADER.unpack(header)
        if len(message := source.read(size)) < size:
            return
        yield message


def _lower_limit(kind: int, value: int, subject: str) -> None:
    """Lower a limit of this process; warn on a system that does not support it."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    try:
        resource.setrlimit(kind, (value, value))
    except (OSError, ValueError):
        os.write(2, f"session-server: {subject} runs without a limit of memory\n".encode())
