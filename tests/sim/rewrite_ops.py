"""Which conversation a client goes back in, changes, branches or sends again, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.sim.clients import Client
from tests.sim.conversation import Said
from tests.sim.draws import Draws
from tests.sim.trace import Op

_CHANGES: Final = ("rewind", "rewind", "edit", "edit", "fork", "whole", "whole", "whole", "answer")
_COURSES: Final = ("goes on", "goes on", "again", "answer", "question", "role", "other")
"""What the client of a whole conversation has made of what was said."""

_OTHER_ROLE: Final = {"system": "user", "user": "assistant", "assistant": "user"}
_MAX_LETTERS: Final = 5


@dataclass(frozen=True, slots=True)
class RewriteOps:
    """Draws changes. `turn` gives a turn without its input, `letters` a text of some length."""

    draws: Draws
    clients: list[Client]
    turn: Callable[[], dict[str, Any]]
    letters: Callable[[int], str]
    name: Callable[[str], str]

    def next(self) -> Op | None:
        """The next change of some conversation; None where there is nothing to change."""
        draws = self.draws
        beside_turns = draws.happens("change beside a turn", 150)
        talking = [
            (index, client)
            for index, client in enumerate(self.clients)
            if client.shadow is not None and not client.is_free and client.socket is not None
            if beside_turns or not client.shadow.live
        ]
        if not talking:
            return None
        index, client = draws.pick("rewriting client", talking)
        assert client.shadow is not None
        num_items = len(client.shadow.said.items)
        match draws.pick("change", _CHANGES):
            case "rewind":
                at = draws.below("rewind to", num_items + 1)
                return {"op": "rewind", "c": index, "at": at}
            case "edit":
                at = 1 + draws.below("edit", max(1, num_items))
                return {"op": "edit", "c": index, "at": at, "text": self._text("edited")}
            case "fork":
                return self._fork(index, client, num_items)
            case "whole":
                said = [(i.role, i.content) for i in client.shadow.said.items if i.role != "raw"]
                frame = {**self.turn(), "type": "whole", "messages": self._messages(said)}
                frame["on_disconnect"], frame["queue"] = "detach", True
                return {"op": "whole", "c": index, "frame": frame}
            case _:
                return {"op": "send", "c": index, "frame": {**self.turn(), "input": []}}

    def _fork(self, index: int, client: Client, num_items: int) -> Op | None:
        others = [i for i, c in enumerate(self.clients) if c.is_free and c.key == client.key]
        if not others:
            return None
        return {
            "op": "fork",
            "c": index,
            "at": self.draws.below("fork at", num_items + 1),
            "by": self.draws.pick("fork by", others),
            "s": self.name("s"),
        }

    def _messages(self, said: list[Said]) -> list[Said]:
        """What was said, or another course of it; at its end is something that wants an answer."""
        draws = self.draws
        what = draws.pick("whole", _COURSES)
        wanted = {"answer": "assistant", "question": "user"}.get(what)
        places = [at for at, (role, _) in enumerate(said) if role == wanted]
        if places:
            at = draws.pick("changed", places)
            said = [*said[:at], (said[at][0], self._text("changed text"))]
        if what == "again" and said and said[-1][0] == "assistant":
            said = said[:-1]
        if what == "role" and said:
            at = draws.below("other role", len(said))
            said = [*said[:at], (_OTHER_ROLE[said[at][0]], said[at][1]), *said[at + 1 :]]
        if what == "other":
            said = [("system", self._text("system"))]
        if not said or said[-1][0] != "user":
            said = [*said, ("user", self._text("said"))]
        return said

    def _text(self, site: str) -> str:
        return self.letters(1 + self.draws.below(f"length of {site}", _MAX_LETTERS))
