"""Render a checkpoint's chat template in a process that can be killed.

The process reads jobs from an inherited socket, writes the results to it in order, and exits when
the socket closes. Kernel limits on memory and on the processor time of each job end it whatever the
template is doing, even if the server is gone.
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

from session_server.core.errors import TokenizeFailed
from session_server.text.chat_template import ChatTemplate, RenderJob, TemplateSource
from session_server.text.model_files import ModelFilesError

HEADER: Final = struct.Struct("<I")
"""Length in bytes of the message behind it."""

COMPILE_CPU_S: Final = 5.0
"""Processor time for compiling the template, which computes what is constant in it."""


class ChildSettings(msgspec.Struct, frozen=True, array_like=True):
    """Hold the first message to the child. `cpu_s`: processor time of one job. `memory_bytes`:
    address space of the process."""

    template: TemplateSource
    cpu_s: float
    memory_bytes: int


class Rendered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Hold the text of each conversation; empty in the reply to `ChildSettings`."""

    texts: list[str]


class NotRendered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Say why there is no text, in words for the client."""

    message: str


Answer = Rendered | NotRendered


def serve_template(fd: int) -> int:
    """Render for the socket `fd` until the other end closes it. Returns the exit status."""
    # A SIGINT sent to every process of a service; only the server decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (
        contextlib.suppress(ConnectionError),  # the server is gone
        socket.socket(fileno=fd) as connection,
        connection.makefile("rb") as jobs,
        connection.makefile("wb") as answers,
    ):
        _serve(jobs, answers)
    return 0


def _serve(jobs: BufferedReader, answers: BufferedWriter) -> None:
    messages = _messages(jobs)
    if (message := next(messages, None)) is None:
        return
    settings = msgspec.msgpack.decode(message, type=ChildSettings)
    _lower_limit(resource.RLIMIT_AS, settings.memory_bytes)
    _lower_limit(resource.RLIMIT_CORE, 0)
    templates: list[ChatTemplate] = []

    def compile_template() -> list[str]:
        templates.append(ChatTemplate(settings.template))
        return []

    _handle(answers, compile_template, cpu_s=COMPILE_CPU_S)
    for message in messages:
        job = msgspec.msgpack.decode(message, type=RenderJob)
        _handle(answers, partial(templates[0].render, job), cpu_s=settings.cpu_s)


def _handle(stream: BufferedWriter, work: Callable[[], list[str]], *, cpu_s: float) -> None:
    """Run one piece of work within its time; SIGPROF ends a process that takes longer."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        frame = msgspec.msgpack.encode(Rendered(work()))
    except (TokenizeFailed, ModelFilesError) as error:
        frame = msgspec.msgpack.encode(NotRendered(str(error)))
    except (MemoryError, UnicodeEncodeError) as error:
        message = f"the chat template failed: {type(error).__name__}"
        frame = msgspec.msgpack.encode(NotRendered(message))
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


def _lower_limit(kind: int, value: int) -> None:
    """Lower a limit of this process; warn on a system that does not support it."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    try:
        resource.setrlimit(kind, (value, value))
    except (OSError, ValueError):
        os.write(2, b"session-server: the chat template runs without a limit of memory\n")
