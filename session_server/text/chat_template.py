"""Compile and render the checkpoint's Jinja chat template in a sandbox, set up as in
`transformers`.

A template is a program from the model directory. It gets the messages and the names that its author
expects, and the size of its output is bounded; clients can send neither a template nor arguments to
one.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from session_server.core.errors import TokenizeFailed
from session_server.text.model_files import ModelFilesError

MAX_RENDER_CHARS: Final = 16 << 20
_MAX_MESSAGE_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class RenderFrame:
    """Hold what a render gets besides the messages. `now` is frozen per session: a template that
    writes the date must write the same one in every turn."""

    now: datetime
    add_generation_prompt: bool = True


class Conversation(msgspec.Struct, frozen=True, array_like=True):
    """Hold the messages and tools of a conversation, as JSON values; `tools` None without any."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


class RenderJob(msgspec.Struct, frozen=True, array_like=True):
    """Hold conversations to render with one frame.

    `now` is local time; its zone is `utc_offset_s` ahead of UTC and called `zone`, None where the
    frame names none.
    """

    conversations: tuple[Conversation, ...]
    now: datetime
    utc_offset_s: float | None
    zone: str | None
    add_generation_prompt: bool

    @classmethod
    def of(cls, conversations: Sequence[Conversation], frame: RenderFrame) -> RenderJob:
        """Build a job with a frame."""
        offset = frame.now.utcoffset()
        return cls(
            tuple(conversations),
            frame.now.replace(tzinfo=None),
            None if offset is None else offset.total_seconds(),
            frame.now.tzname(),
            frame.add_generation_prompt,
        )

    @property
    def local_time(self) -> datetime:
        """Return the frame's `now` with its time zone."""
        if self.utc_offset_s is None:
            return self.now
        offset = timedelta(seconds=self.utc_offset_s)
        return self.now.replace(tzinfo=timezone(offset, self.zone or ""))


class TemplateSource(msgspec.Struct, frozen=True, array_like=True):
    """Hold a chat template as the checkpoint stores it.

    `named_tokens`: bos_token, eos_token, ... as variables of the template. `max_chars`: bound of
    what one job may write, over all its conversations.
    """

    source: str
    named_tokens: dict[str, str]
    max_chars: int = MAX_RENDER_CHARS


class ChatTemplate:
    """Render a compiled template; rendering changes no state and may run on any thread."""

    def __init__(self, template: TemplateSource) -> None:
        """Compile the template.

        Raises:
            ModelFilesError: the template does not compile.
        """
        self._named_tokens = dict(template.named_tokens)
        self._max_chars = template.max_chars
        try:
            self._template = _Sandbox(template.max_chars).from_string(template.source)
        except jinja2.TemplateError as error:
            line = (
                f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            )
            raise ModelFilesError(f"the chat template does not compile: {error}{line}") from error
        except RecursionError as error:
            raise ModelFilesError("the chat template is nested too deeply") from error

    def render(self, job: RenderJob) -> list[str]:
        """Return the text of each conversation.

        Raises:
            TokenizeFailed: the template refused the messages, failed, or wrote too much.
        """
        num_left = self._max_chars
        texts = []
        for conversation in job.conversations:
            variables: dict[str, Any] = {
                **self._named_tokens,
                "messages": conversation.messages,
                "tools": conversation.tools,
                "documents": None,
                "add_generation_prompt": job.add_generation_prompt,
                "strftime_now": job.local_time.strftime,
            }
            texts.append(self._render(variables, num_left))
            num_left -= len(texts[-1])
        return texts

    def _render(self, variables: dict[str, Any], max_chars: int) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(**variables):
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise TokenizeFailed(
                        f"the chat template wrote over {self._max_chars} characters"
                    )
                pieces.append(piece)
        except TokenizeFailed:
            raise
        except _TemplateRefused as error:
            text = str(error)[:_MAX_MESSAGE_CHARS]
            raise TokenizeFailed(f"the chat template refused: {text}", param="input") from error
        except Exception as error:  # the template may raise anything
            raise TokenizeFailed(
                f"the chat template failed{_line_of(error)}: {_reason_of(error)}",
                param="input",
            ) from error
        return "".join(pieces)


def _line_of(error: BaseException) -> str:
    """Return the template line in which the innermost error of the template was raised, as text."""
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "<template>"
    ]
    return f" in line {lines[-1]}" if lines else ""


def _reason_of(error: BaseException) -> str:
    """Return what went wrong, without any text from a message."""
    return str(error) if isinstance(error, SecurityError) else type(error).__name__


class _TemplateRefused(jinja2.TemplateError):
    """Report that the template called `raise_exception`; the message is the template author's."""


class _Generation(jinja2.ext.Extension):
    """Ignore `{% generation %}`, which marks the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Limit repetition and powers: Jinja's sandbox blocks attributes and long ranges, but not `"x"
    * 10**8`."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, max_chars: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self._max_chars = max_chars
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not available to a chat template")
        for sequence, count in ((left, right), (right, left)):
            repeats = isinstance(sequence, str | list | tuple) and isinstance(count, int)
            if repeats and len(sequence) * count > self._max_chars:
                raise SecurityError("a chat template repeated a text too often")
        return super().call_binop(context, operator, left, right)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Serialize as `transformers` does: no escaping for HTML, no ASCII escapes."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefused(message)
