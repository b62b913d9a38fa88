"""Define how chat templates are rendered: the renderer's protocol, and the steps between renders.

Code that needs rendered text is a generator that yields a `RenderJob` and receives the texts, so
that the same code runs with a renderer that returns at once and with one that is awaited.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeVar

from session_server.core.errors import TokenizeFailed
from session_server.text.chat_template import RenderJob

_T = TypeVar("_T")

Rendering = Generator[RenderJob, list[str], _T]
"""Steps between renders; their result is the generator's return value."""


class TemplateRenderer(Protocol):
    """Render one chat template."""

    def render_now(self, job: RenderJob) -> list[str] | None:
        """Return the text of each conversation, or None if only `render` can.

        Raises:
            TokenizeFailed: the template refused the messages, failed, or took too much.
        """
        ...

    async def render(self, job: RenderJob) -> list[str]:
        """Return the text of each conversation. Raises TokenizeFailed like `render_now`, and
        ServerBusy if nothing can be rendered now."""
        ...

    async def close(self) -> None:
        """Release whatever renders."""
        ...


def advance(
    steps: Rendering[_T],
    renderer: TemplateRenderer | None,
    answer: list[str] | TokenizeFailed | None = None,
) -> RenderJob | _T:
    """Run steps to their result, or to a job whose render must be awaited.

    Args:
        steps: new, or suspended at a job.
        renderer: tried first with `render_now`; None if nothing is rendered.
        answer: to the job at which the steps are suspended, None at their beginning.
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


async def run_to_end(steps: Rendering[_T], renderer: TemplateRenderer) -> _T:
    """Run steps to their result. Raises ServerBusy as `render` does."""
    result = advance(steps, renderer)
    while isinstance(result, RenderJob):
        result = advance(steps, renderer, await render_or_error(renderer, result))
    return result


async def render_or_error(renderer: TemplateRenderer, job: RenderJob) -> list[str] | TokenizeFailed:
    """Render a job; return the texts, or the error, for `advance`. Raises ServerBusy as `render`
    does: no other render would help the steps."""
    try:
        return await renderer.render(job)
    except TokenizeFailed as error:
        return error


def _resume(steps: Rendering[_T], answer: list[str] | TokenizeFailed | None) -> RenderJob:
    if answer is None:
        return next(steps)
    return steps.throw(answer) if isinstance(answer, TokenizeFailed) else steps.send(answer)
