"""Who renders a chat template: the protocol, and the renderer of this process.

What needs rendered text is a generator that yields a `RenderJob` and is sent the texts, so that
the same code runs with a renderer that answers at once and with one that is awaited.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeVar

from session_server.core.errors import TokenizeFailed
from session_server.text.chat_template import ChatTemplate, RenderJob, TemplateSource

_T = TypeVar("_T")

Rendering = Generator[RenderJob, list[str], _T]
"""Steps between renders; their result is the generator's return value."""


class TemplateRenderer(Protocol):
    """Renders one chat template."""

    def render_now(self, job: RenderJob) -> list[str] | None:
        """Return the text of each conversation, or None if only `render` can.

        Raises:
            TokenizeFailed: the template refused the messages, failed, or took too much.
        """
        ...

    async def render(self, job: RenderJob) -> list[str]:
        """Return the text of each conversation. Raises TokenizeFailed like `render_now`."""
        ...

    async def close(self) -> None:
        """Let go of whatever renders."""
        ...


class LocalRenderer:
    """Renders in this process, at once. A template that hangs hangs the process: this is for
    templates of our own, for tests and for the simulator."""

    def __init__(self, template: TemplateSource) -> None:
        """Compile. Raises ModelFilesError."""
        self._template = ChatTemplate(template)

    def render_now(self, job: RenderJob) -> list[str]:
        """Return the text of each conversation. Raises TokenizeFailed."""
        return self._template.render(job)

    async def render(self, job: RenderJob) -> list[str]:
        """Return the text of each conversation. Raises TokenizeFailed."""
        return self._template.render(job)

    async def close(self) -> None:
        """Do nothing."""


def advance(
    steps: Rendering[_T],
    renderer: TemplateRenderer | None,
    answer: list[str] | TokenizeFailed | None = None,
) -> RenderJob | _T:
    """Run steps to their result, or to a job whose render must be awaited.

    Args:
        steps: as made, or suspended at a job.
        renderer: asked first for an answer at once; None where nothing is rendered.
        answer: to the job that the steps are suspended at, None at their beginning.
    """
    try:
        job = _resume(steps, answer)
        while True:
            assert renderer is not None, "only a chat template asks for renders"
            try:
                texts: list[str] | TokenizeFailed | None = renderer.render_now(job)
            except TokenizeFailed as error:
                texts = error
            if texts is None:
                return job
            job = _resume(steps, texts)
    except StopIteration as end:
        result: _T = end.value
        return result


def run_to_end(steps: Rendering[_T], renderer: TemplateRenderer) -> _T:
    """Run steps to their result with a renderer that answers at once."""
    result = advance(steps, renderer)
    assert not isinstance(result, RenderJob), "this renderer must be awaited"
    return result


async def run_to_end_async(steps: Rendering[_T], renderer: TemplateRenderer) -> _T:
    """Run steps to their result with any renderer."""
    result = advance(steps, renderer)
    while isinstance(result, RenderJob):
        result = advance(steps, renderer, await render_or_error(renderer, result))
    return result


async def render_or_error(renderer: TemplateRenderer, job: RenderJob) -> list[str] | TokenizeFailed:
    """Return what `advance` is to be given for a job."""
    try:
        return await renderer.render(job)
    except TokenizeFailed as error:
        return error


def _resume(steps: Rendering[_T], answer: list[str] | TokenizeFailed | None) -> RenderJob:
    if answer is None:
        return next(steps)
    return steps.throw(answer) if isinstance(answer, TokenizeFailed) else steps.send(answer)
