"""A model's text with its chat template rendered in this process, where no process is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from session_server.text.chat_template import ChatTemplate, RenderJob, TemplateSource
from session_server.text.model_text import ModelText, load_model_text
from session_server.text.rendering import Rendering, TemplateRenderer, advance

_T = TypeVar("_T")


class LocalRenderer:
    """Render in this process, at once. A template that hangs blocks the process."""

    def __init__(self, template: TemplateSource) -> None:
        """Compile the template. Raises ModelFilesError."""
        self._template = ChatTemplate(template)

    def render_now(self, job: RenderJob) -> list[str]:
        """Return the text of each conversation. Raises TokenizeFailed."""
        return self._template.render(job)

    async def render(self, job: RenderJob) -> list[str]:
        """Return the text of each conversation. Raises TokenizeFailed."""
        return self._template.render(job)

    async def close(self) -> None:
        """Do nothing."""


def run_to_end(steps: Rendering[_T], renderer: TemplateRenderer) -> _T:
    """Run steps to their result with a renderer that returns at once."""
    result = advance(steps, renderer)
    assert not isinstance(result, RenderJob), "this renderer must be awaited"
    return result


def load_local_text(model_dir: Path) -> ModelText:
    """Load a model's text; nothing is awaited, because the renderer returns at once."""

    async def start(source: TemplateSource) -> TemplateRenderer:
        return LocalRenderer(source)

    try:
        load_model_text(model_dir, start_renderer=start).send(None)
    except StopIteration as end:
        text: ModelText = end.value
        return text
    raise AssertionError("a local renderer is never awaited")
