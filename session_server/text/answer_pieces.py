"""Collect the parts of an answer: its text, its reasoning and its calls of tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from session_server.core.session_events import ToolCall, ToolCallDelta


class AnswerPieces(NamedTuple):
    """Hold what a piece of an answer adds to each of its parts."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Prose:
    """Collect text without the newlines that only part it from markup.

    `holds_back`: whether markup may follow, so that newlines wait for what comes after them.
    """

    def __init__(self, *, holds_back: bool) -> None:
        self._holds_back = holds_back
        self._drops = False
        self._num_held = 0
        self._has_any = False
        self._new: list[str] = []

    def add(self, text: str) -> None:
        """Add text."""
        if self._drops:
            text = text.lstrip("\n")
        if not text:
            return
        self._drops = False
        body = text.rstrip("\n") if self._holds_back else text
        if body:
            self._has_any = True
            self._new.append("\n" * self._num_held + body)
            self._num_held = 0
        self._num_held += len(text) - len(body)

    def drop_newlines(self) -> None:
        """Say that markup stands here: newlines before and after it are not text."""
        self._num_held = 0
        self._drops = True

    def start_part(self) -> None:
        """Say that another message begins: it starts a line of its own."""
        self.drop_newlines()
        self._num_held = int(self._has_any)

    def take(self, *, is_end: bool) -> str:
        """Return what is new; at the end also the newlines that waited."""
        if is_end and not self._drops:
            self._new.append("\n" * self._num_held)
        text = "".join(self._new)
        self._new.clear()
        return text


class CallCollector:
    """Collect calls; the arguments that are added are the last call's."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._heads: list[tuple[str, str]] = []
        self._arguments: list[list[str]] = []
        self._new: dict[int, list[str]] = {}
        self._num_told = 0

    def begin(self, name: str) -> None:
        """Begin a call of the function `name`."""
        self._new[len(self._heads)] = []
        self._heads.append((self._new_call_id(), name))
        self._arguments.append([])

    def add(self, arguments: str) -> None:
        """Add JSON text to the arguments of the last call."""
        self._new.setdefault(len(self._heads) - 1, []).append(arguments)

    def take(self) -> tuple[ToolCallDelta, ...]:
        """Return what is new, at most one piece of each call."""
        deltas = []
        for index, pieces in self._new.items():
            call_id, name = self._heads[index] if index >= self._num_told else ("", "")
            deltas.append(ToolCallDelta(index, "".join(pieces), call_id, name))
            self._arguments[index].append(deltas[-1].arguments)
        self._new.clear()
        self._num_told = len(self._heads)
        return tuple(deltas)

    @property
    def num_begun(self) -> int:
        """Return how many calls have begun."""
        return len(self._heads)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Return the calls so far, with the arguments that were taken."""
        pairs = zip(self._heads, self._arguments, strict=True)
        return tuple(ToolCall(head[0], head[1], "".join(pieces)) for head, pieces in pairs)
