"""Render a chat template in a process of its own, with a deadline.

A template is a program by the checkpoint's author. Its faults only cost the turn it is rendered
for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from session_server.core.errors import ServerBusy, TokenizeFailed
from session_server.text.chat_template import RenderJob, TemplateSource
from session_server.text.model_files import ModelFilesError
from session_server.text.template_child import SUBJECT
from session_server.text.worker_process import (
    WorkerCrashed,
    WorkerFailed,
    WorkerLimits,
    WorkerLost,
    WorkerNotStarted,
    WorkerProcess,
)

_UTF8_BYTES: Final = 4
"""Of one character, at most."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limit what one job may use, as `WorkerLimits`."""

    deadline_s: float = 5.0
    cpu_s: float = 1.0
    memory_bytes: int = 512 << 20


class TemplateWorker:
    """Render a template in a child process; implements `TemplateRenderer`."""

    def __init__(self, template: TemplateSource, limits: RenderLimits) -> None:
        self._process = WorkerProcess(
            "_template",
            msgspec.msgpack.encode(template),
            WorkerLimits(
                limits.deadline_s,
                limits.cpu_s,
                limits.memory_bytes,
                max_answer_bytes=template.max_chars * _UTF8_BYTES + (1 << 16),
            ),
            subject=SUBJECT,
        )

    @classmethod
    async def start(
        cls, template: TemplateSource, limits: RenderLimits | None = None
    ) -> TemplateWorker:
        """Start the process and compile the template.

        Raises:
            ModelFilesError: the template does not compile.
        """
        worker = cls(template, limits or RenderLimits())
        try:
            await worker._process.start()
        except WorkerNotStarted as error:
            raise ModelFilesError(str(error)) from error
        return worker

    @property
    def pid(self) -> int | None:
        """Return the process id of the child, None while there is none."""
        return self._process.pid

    def render_now(self, job: RenderJob) -> None:
        """Return None: rendering needs another process."""

    async def render(self, job: RenderJob) -> list[str]:
        """Return the text of each conversation.

        Raises:
            TokenizeFailed: the template refused the messages, failed, or took too much.
            ServerBusy: the process was stopped or killed, or has ended.
        """
        try:
            frame = msgspec.msgpack.encode(job)
        except UnicodeEncodeError as error:
            raise TokenizeFailed("the text is not valid Unicode", param="input") from error
        try:
            return await self._process.run(frame)
        except (WorkerLost, WorkerCrashed) as error:
            raise ServerBusy(str(error)) from error
        except WorkerFailed as error:
            raise TokenizeFailed(str(error), param="input") from error

    async def close(self) -> None:
        """Kill the process."""
        await self._process.close()
