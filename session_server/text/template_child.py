"""Render a checkpoint's chat template, in a process of its own."""

from __future__ import annotations

import msgspec

from session_server.text.chat_template import ChatTemplate, RenderJob, TemplateSource
from session_server.text.worker_child import Job, serve_jobs

SUBJECT = "the chat template"


def serve_template(fd: int) -> int:
    """Render for the socket `fd` until the other end closes it. Returns the exit status."""
    return serve_jobs(fd, _prepare, subject=SUBJECT)


def _prepare(source: bytes) -> Job:
    template = ChatTemplate(msgspec.msgpack.decode(source, type=TemplateSource))
    return lambda message: template.render(msgspec.msgpack.decode(message, type=RenderJob))
