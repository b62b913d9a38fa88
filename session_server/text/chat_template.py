"""The checkpoint's own Jinja chat template, set up as `transformers` does, in a sandbox.

A template is a program of the model directory. It gets the messages and the names its author
expects, and what it writes is bounded; clients can neither send a template nor arguments to one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from session_server.core.errors import TokenizeFailed
from session_server.core.session_events import Message
from session_server.text.model_files import ModelFilesError

MAX_RENDER_CHARS: Final = 16 << 20
_MAX_MESSAGE_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class RenderFrame:
    """What a render sees besides the messages. `now` is frozen per session: a template that
    writes the date must write the same one in every turn."""

    now: datetime
    add_generation_prompt: bool = True


class ChatTemplate:
    """One compiled template; rendering changes nothing and may run on any thread."""

    def __init__(
        self,
        source: str,
        *,
        named_tokens: Mapping[str, str],
        max_chars: int = MAX_RENDER_CHARS,
    ) -> None:
        """Compile. `named_tokens`: bos_token, eos_token, ... as variables of the template.

        Raises:
            ModelFilesError: the template does not compile.
        """
        self._named_tokens = dict(named_tokens)
        self._max_chars = max_chars
        try:
            self._template = _Sandbox(max_chars).from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFilesError(f"the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Message], frame: RenderFrame) -> str:
        """Text of a conversation.

        Raises:
            TokenizeFailed: the template refused the messages, failed, or wrote too much.
        """
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(**self._variables(messages, frame)):
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise TokenizeFailed(f"the chat template wrote over {self._max_chars} chars")
                pieces.append(piece)
        except TokenizeFailed:
            raise
        except _TemplateRefused as error:
            text = str(error)[:_MAX_MESSAGE_CHARS]
            raise TokenizeFailed(f"the chat template refused: {text}", param="input") from error
        except Exception as error:  # a program of the checkpoint's author: it may raise anything
            name = type(error).__name__
            raise TokenizeFailed(f"the chat template failed: {name}", param="input") from error
        return "".join(pieces)

    def _variables(self, messages: Sequence[Message], frame: RenderFrame) -> dict[str, Any]:
        return {
            **self._named_tokens,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": frame.add_generation_prompt,
            "strftime_now": frame.now.strftime,
        }


class _TemplateRefused(jinja2.TemplateError):
    """`raise_exception` was called: the author's own words."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox blocks attributes and long ranges, but not `"x" * 10**8`."""

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
    """As `transformers`: no escaping for HTML, no ASCII escapes."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefused(message)
