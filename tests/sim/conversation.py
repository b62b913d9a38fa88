"""What a conversation must hold: items, and tokens that follow from them by the rules of the docs.

The embedded template writes `<|role|>content<|end|>`. Answers and raw input keep the tokens they
had; messages that no answer follows yet are rendered again with those that come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Said = tuple[str, str]
"""Role and content of a message."""


@dataclass(frozen=True, slots=True)
class SaidItem:
    """One item. `end`: the tokens up to its end, of an answer and of raw input; `turn_id`: the turn
    whose answer it is."""

    role: str
    content: str
    end: tuple[int, ...] | None = None
    turn_id: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a turn makes of a conversation before it answers. `num_agreed`, `keep_len`: items and
    tokens that a whole conversation leaves as they were."""

    context: list[int]
    items: list[SaidItem]
    num_kept: int
    keep_len: int
    is_raw: bool
    generates: bool


class Conversation:
    """Items and tokens of one session; nothing here has looked at the server's. `place_of`: the
    server's names of items."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        (self._end_id,) = encode("<|end|>")
        self.tokens: list[int] = []
        self.items: list[SaidItem] = []
        self.place_of: dict[str, int] = {}

    @property
    def waits(self) -> bool:
        """Whether messages wait for an answer."""
        return bool(self._waiting(self.items))

    def holds_answer(self, turn_id: str) -> bool:
        """Whether what a turn has said is there as it was said."""
        return any(item.turn_id == turn_id for item in self.items)

    def prepare(self, turn: Mapping[str, Any]) -> Prepared:
        """The context of a turn as its client asked for it."""
        generates, messages = turn.get("generate", True), turn.get("messages")
        if messages is not None:
            return self._prepare_whole([(role, content) for role, content in messages])
        kept = self.items
        if "input" in turn:
            new = [SaidItem("user", turn["input"])] if turn["input"] else []
            base = self._base(kept)
            context = [*base, *self._rendered(base, self._waiting(kept) + new, answers=generates)]
            return Prepared(context, [*kept, *new], len(kept), len(base), False, generates)
        ids = turn.get("input_ids")
        before, base = self.tokens, self._base(kept)
        if len(before) == len(base) and self._waiting(kept):
            before = [*base, *self._rendered(base, self._waiting(kept), answers=False)]
        context = [*before, *(self._encode(turn["text"]) if ids is None else ids)]
        raw = SaidItem("raw", turn.get("text", ""), tuple(context))
        return Prepared(context, [*kept, raw], len(kept), len(before), True, generates)

    def commit(
        self, prepared: Prepared, turn_id: str, *, outputs: Sequence[int], text: str
    ) -> None:
        """A turn has ended, and leaves what it said."""
        self.tokens = [*prepared.context, *outputs]
        self.items = prepared.items
        if prepared.generates:
            answer = SaidItem("assistant", text, tuple(self.tokens), turn_id)
            self.items = [*self.items, answer]

    def cut(self, num_items: int) -> None:
        """Go back to the first items."""
        if num_items < len(self.items):
            self.items = self.items[:num_items]
            self.tokens = self._base(self.items)

    def edit(self, index: int, content: str) -> None:
        """Give an item another content; those behind it go."""
        edited = SaidItem(self.items[index].role, content)
        self.items = [*self.items[:index], edited]
        self.tokens = self._base(self.items)

    def fork(self, num_items: int) -> Conversation:
        """Another conversation with the first items."""
        fork = Conversation(self._encode)
        fork.tokens, fork.items = list(self.tokens), list(self.items)
        fork.cut(num_items)
        return fork

    def _prepare_whole(self, messages: Sequence[Said]) -> Prepared:
        held = [(item.role, item.content) for item in self.items]
        pairs = zip(held, messages, strict=False)
        num_equal = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if num_equal is None:
            num_equal = min(len(held), len(messages))
        last = min(num_equal, len(messages) - 1)
        num_agreed = max((i + 1 for i in range(last) if self.items[i].turn_id), default=0)
        behind = range(num_agreed, num_equal)
        num_kept = next((i for i in behind if self.items[i].turn_id), num_equal)
        kept = [replace(item, end=None) for item in self.items[num_agreed:num_kept]]
        new = [SaidItem(role, content) for role, content in messages[num_kept:]]
        agreed = self.items[:num_agreed]
        base = self._base(agreed)
        context = [*base, *self._rendered(base, [*kept, *new], answers=True)]
        return Prepared(context, [*agreed, *kept, *new], num_kept, len(base), False, True)

    def _base(self, items: Sequence[SaidItem]) -> list[int]:
        ends = (item.end for item in reversed(items) if item.end is not None)
        return list(next(ends, ()))

    def _waiting(self, items: Sequence[SaidItem]) -> list[SaidItem]:
        last = max((i for i, item in enumerate(items) if item.end is not None), default=-1)
        return list(items[last + 1 :])

    def _rendered(
        self, base: Sequence[int], items: Sequence[SaidItem], *, answers: bool
    ) -> list[int]:
        closing = "<|end|>" if base and base[-1] != self._end_id else ""
        said = "".join(f"<|{item.role}|>{item.content}<|end|>" for item in items)
        return self._encode(f"{closing}{said}{'<|assistant|>' if answers else ''}")
