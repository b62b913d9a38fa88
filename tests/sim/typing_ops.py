"""What somebody types next, key by key, and what is said of it in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from tests.sim.clients import Client
from tests.sim.draws import Draws
from tests.sim.trace import Op

KeyT = TypeVar("KeyT")

_KEYS: Final = ("on", "on", "on", "on", "on", "on", "back", "other")
_SAID: Final = ("equal", "equal", "longer", "shorter", "corrected", "other")
_LENGTHS: Final = (1, 2, 5, 8, 13, 21)


@dataclass(frozen=True, slots=True)
class Typist(Generic[KeyT]):
    """Draws what is typed. `fresh` gives some keys."""

    draws: Draws
    fresh: Callable[[int], Sequence[KeyT]]

    def type_on(self, typed: Sequence[KeyT]) -> list[KeyT]:
        """What stands there after the next keys: more, something corrected, or another text."""
        draws = self.draws
        match draws.pick("keys", _KEYS):
            case "back":
                return [*typed[: draws.below("back to", len(typed) + 1)], *self.fresh(1)]
            case "on":
                return [*typed, *self.fresh(1 + draws.below("keys at once", 4))]
            case _:
                return list(self.fresh(draws.pick("typed at once", _LENGTHS)))

    def say(self, typed: Sequence[KeyT]) -> list[KeyT]:
        """What is sent after this was typed; at least one key."""
        draws = self.draws
        match draws.pick("said", _SAID):
            case "equal":
                return list(typed)
            case "longer":
                return [*typed, *self.fresh(1 + draws.below("keys more", 4))]
            case "shorter":
                return list(typed[: 1 + draws.below("shorter", len(typed))])
            case "corrected":
                return [*typed[: draws.below("corrected", len(typed))], *self.fresh(2)]
            case _:
                return list(self.fresh(draws.pick("said instead", _LENGTHS)))


@dataclass(frozen=True, slots=True)
class TypingOps:
    """Draws the drafts of clients on sockets. `letters` gives a text, `ids` token ids."""

    draws: Draws
    clients: list[Client]
    letters: Callable[[int], str]
    ids: Callable[[int], list[int]]
    name: Callable[[str], str]

    def next(self, max_len: Callable[[Client], int]) -> Op | None:
        """The next keys of somebody who has a connection, beside a turn now and then, or the end of
        them, or the KV is given up. `max_len`: keys for which there is room."""
        draws = self.draws
        beside_turns = draws.happens("draft beside a turn", 400)
        typing = [
            (index, client)
            for index, client in enumerate(self.clients)
            if client.shadow is not None and not client.is_free and client.socket is not None
            if beside_turns or not client.shadow.live
        ]
        if not typing:
            return None
        index, client = draws.pick("typing client", typing)
        if draws.happens("cools", 30):
            return {"op": "send", "c": index, "frame": {"type": "session.cool"}}
        typed = client.drafts.typed
        frame: dict[str, Any] = {"type": "turn.draft", "draft_id": None}
        if typed is None or not draws.happens("abandons", 80):
            field, keys = typed or (draws.pick("typed as", ("input", "text", "input_ids")), "")
            keys = self._typist(field).type_on(keys)
            if not draws.happens("types too much", 30):
                keys = keys[: max(1, max_len(client))]
            frame |= {"draft_id": self.name("d"), field: _joined(field, keys)}
        return {"op": "send", "c": index, "frame": frame}

    def said(self, client: Client) -> dict[str, Any] | None:
        """The input of a turn after what its client has typed, if it has typed something."""
        if client.drafts.typed is None or not self.draws.happens("says what was typed", 750):
            return None
        field, keys = client.drafts.typed
        return {field: _joined(field, self._typist(field).say(keys))}

    def _typist(self, field: str) -> Typist[Any]:
        return Typist(self.draws, self.ids if field == "input_ids" else self.letters)


def _joined(field: str, keys: Sequence[Any]) -> Any:
    return list(keys) if field == "input_ids" else "".join(keys)
