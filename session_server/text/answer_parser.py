"""Part an answer to messages into text, reasoning and calls of tools, while it is being written.

The parts do not depend on how the text was cut into pieces. Text that may become markup is held
back only until that is decided, and markup that goes wrong is text from where it began. A call
counts from where its arguments begin: what breaks it off later leaves the arguments as they are,
and what follows is text. Newlines beside markup are dropped. The work is linear in the answer's
length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from session_server.core.session_events import ToolCall
from session_server.text.answer_calls import FUNCTION, CallReader, string_parameters
from session_server.text.answer_literals import SPACE
from session_server.text.answer_pieces import AnswerPieces, CallCollector, Prose
from session_server.text.answer_source import AnswerSource, Markers, Reading

_HEADS: Final = ("<|start|>", "<|channel|>")
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_IN_HARMONY: Final = Markers((*_HEADS, *_ENDS))
_IN_HEAD: Final = Markers((_MESSAGE, "<|start|>", *_ENDS))
_TO: Final = "to="
_CALL: Final = "<tool_call>"
HARMONY_MARKERS: Final = frozenset((*_HEADS, _MESSAGE, *_ENDS, "<|constrain|>"))

_CHANNEL: Final = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=functions\.([\w.:/-]+)")


@dataclass(frozen=True, slots=True)
class Markup:
    """Hold the markers of a format.

    `reasoning`: those around it. `calls`: those before calls, each with the one behind them, which
    may be empty. `has_bare_calls`: an answer that is a JSON object may be a call. `is_harmony`: the
    answer is several messages, each on a channel, and nothing else applies.
    """

    reasoning: tuple[str, str] | None = None
    calls: Mapping[str, str] = field(default_factory=dict)
    has_bare_calls: bool = False
    is_harmony: bool = False
    takes_calls: bool = True

    def without_calls(self) -> Markup:
        """Return the markup of an answer that may not call tools."""
        return replace(self, calls={}, has_bare_calls=False, takes_calls=False)

    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether an answer to `prompt` begins within reasoning."""
        if self.is_harmony:
            return prompt.endswith("<|channel|>analysis<|message|>")
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    def closes_reasoning(self, said: str) -> bool:
        """Return whether an answer that has said this has just ended its reasoning."""
        if self.is_harmony:
            return said.endswith("<|channel|>final<|message|>")
        return self.reasoning is not None and said.rstrip().endswith(self.reasoning[1])


class AnswerParser:
    """Parse one answer, piece by piece. `tool_calls`: those so far."""

    def __init__(
        self,
        markup: Markup,
        new_call_id: Callable[[], str],
        *,
        starts_in_reasoning: bool,
        tools: tuple[str, ...] = (),
    ) -> None:
        self._markup = markup
        self._source = AnswerSource()
        self._text = Prose(holds_back=bool(markup.calls) or markup.is_harmony)
        self._reasoning = Prose(holds_back=True)
        self._calls = CallCollector(new_call_id)
        strings = string_parameters(tools if FUNCTION in markup.calls else ())
        self._reader = CallReader(self._source, self._calls, strings)
        read = self._read_harmony if markup.is_harmony else self._read
        self._reading: Reading[None] | None = read(starts_in_reasoning=starts_in_reasoning)

    def feed(self, text: str) -> AnswerPieces:
        """Add the next piece of the answer; return what it adds to the parts."""
        self._source.add(text)
        return self._advance()

    def finish(self) -> AnswerPieces:
        """Return what was held back, when the answer has ended."""
        self._source.end()
        return self._advance()

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Return the calls so far."""
        return self._calls.calls

    @property
    def num_calls(self) -> int:
        """Return how many calls have begun."""
        return self._calls.num_begun

    def _advance(self) -> AnswerPieces:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None  # it refers to this parser: let go without a collector
        is_end = self._reading is None
        return AnswerPieces(
            self._text.take(is_end=is_end),
            self._reasoning.take(is_end=is_end),
            self._calls.take(),
        )

    def _read(self, *, starts_in_reasoning: bool) -> Reading[None]:
        if self._markup.reasoning is not None:
            yield from self._read_reasoning(
                *self._markup.reasoning, has_started=starts_in_reasoning
            )
        if self._markup.has_bare_calls:
            yield from self._read_calls(self._reader.read_bare())
        markers = Markers(self._markup.calls)
        while (marker := (yield from self._source.until(markers, self._add_text))) is not None:
            if marker == FUNCTION:
                yield from self._read_calls(self._reader.read_function())
            else:
                yield from self._read_calls(self._reader.read_list(self._markup.calls[marker]))

    def _read_reasoning(self, start: str, end: str, *, has_started: bool) -> Reading[None]:
        """Read reasoning at the begin of the answer, if there is some."""
        self._reasoning.drop_newlines()
        yield from self._source.run(SPACE)
        if not (yield from self._source.accept(start)):
            if not has_started:
                self._add_text(self._source.take_back())
                return
            self._add_reasoning(self._source.take_back())
        self._source.forget()
        # Qwen3.5 may call a function without having closed its thoughts.
        calls = self._markup.calls
        markers = Markers([end, _CALL] if {_CALL, FUNCTION} <= calls.keys() else [end])
        while (marker := (yield from self._source.until(markers, self._add_reasoning))) == _CALL:
            yield from self._source.run(SPACE)
            if (yield from self._source.peek(len(FUNCTION))) == FUNCTION:
                break
            self._add_reasoning(self._source.take_back())
        if marker is not None:
            self._reasoning.drop_newlines()
            self._text.drop_newlines()
        if marker == _CALL:
            yield from self._read_calls(self._reader.read_list(calls[_CALL]))
        self._source.forget()

    def _read_calls(self, reading: Reading[bool]) -> Reading[None]:
        """Read calls; what turns out to be none is text."""
        num_before = self._calls.num_begun
        is_whole = yield from reading
        if self._calls.num_begun > num_before:
            self._text.drop_newlines()
        if is_whole:
            self._source.forget()
        self._add_text(self._source.take_back())

    def _read_harmony(self, *, starts_in_reasoning: bool) -> Reading[None]:
        """Read messages of the harmony format: analysis is reasoning, what is addressed to a
        function calls it, all else is text."""
        add: Callable[[str], None] = self._add_text
        if starts_in_reasoning:
            add = self._add_reasoning
        else:  # within the head of a message, which may go on with whom it is for
            yield from self._source.run(SPACE)
            if (yield from self._source.accept(_TO)):
                add = yield from self._read_message(_TO)
                self._source.forget()
            self._add_text(self._source.take_back())
        while (marker := (yield from self._source.until(_IN_HARMONY, add))) is not None:
            add = self._add_text
            if marker in _HEADS:
                add = yield from self._read_message(marker)
            self._source.forget()

    def _read_message(self, marker: str) -> Reading[Callable[[str], None]]:
        """Read the head of a message, and a call with it; return what its content is added to."""
        pieces = [marker]
        if (yield from self._source.until(_IN_HEAD, pieces.append)) != _MESSAGE:
            self._add_text(self._source.take_back())
            return self._add_text
        head = "".join(pieces)
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None:
            if self._markup.takes_calls:
                yield from self._read_calls(self._reader.read_arguments(recipient[1]))
            else:
                self._add_text(self._source.take_back())
            return self._add_text
        if channel is not None and channel[1] == "analysis":
            self._reasoning.start_part()
            return self._add_reasoning
        self._text.start_part()
        return self._add_text

    def _add_text(self, text: str) -> None:
        self._text.add(text)
        self._source.forget()

    def _add_reasoning(self, text: str) -> None:
        self._reasoning.add(text)
        self._source.forget()
