"""The drafts of one client, as it sent them, and what it may be told of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.sim.failure import Broken, Layer
from tests.sim.shadow import SessionShadow

_INPUTS = ("input", "text", "input_ids")


@dataclass(frozen=True, slots=True)
class _Sent:
    """`seq`: the newest entry of the journal when it was sent."""

    frame: Mapping[str, Any]
    seq: int


@dataclass(slots=True)
class ClientDrafts:
    """Follows the drafts of one session. `typed`: the field and the value of the newest, until
    it is dropped or a turn is sent."""

    reached: Counter[str]
    typed: tuple[str, Any] | None = None
    _sent: dict[str, _Sent] = field(default_factory=dict)
    _last_answered: str | None = None

    def __contains__(self, draft_id: object) -> bool:
        return draft_id in self._sent

    def forget(self) -> None:
        """Another session begins."""
        self.typed, self._last_answered = None, None
        self._sent.clear()

    def send(self, frame: Mapping[str, Any], shadow: SessionShadow) -> None:
        """The client sends a draft, or drops the newest; it may be lost on its way."""
        draft_id = frame["draft_id"]
        self.typed = next(((name, frame[name]) for name in _INPUTS if name in frame), None)
        beside = "beside a turn" if shadow.live else "at rest"
        if draft_id is None:
            self.reached[f"draft dropped by its client {beside}"] += 1
        else:
            self.reached[f"draft sent {beside}"] += 1
            self._sent[draft_id] = _Sent(frame, shadow.seq)

    def hear(self, frame: Mapping[str, Any], shadow: SessionShadow) -> None:
        """The answer to a draft: each has one, and an older one is never answered later. It has the
        tokens that the turn would have."""
        draft_id, total = frame["draft_id"], frame["total"]
        order = list(self._sent)
        last = -1 if self._last_answered is None else order.index(self._last_answered)
        if draft_id not in self._sent or order.index(draft_id) <= last:
            raise Broken(Layer.PROTOCOL, f"{frame} after the answer to {self._last_answered}")
        if not 0 <= frame["kept"] <= frame["processed"] <= total:
            raise Broken(Layer.PROTOCOL, f"{frame} does not add up")
        self._last_answered = draft_id
        sent = self._sent[draft_id]
        self.reached["draft answered"] += 1
        if sent.seq != shadow.seq:
            self.reached["draft answered after other news"] += 1
        elif total != (length := len(shadow.said.prepare(sent.frame).context)):
            raise Broken(Layer.SHADOW, f"{frame}: the turn would have {length} tokens")
