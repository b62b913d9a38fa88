"""Clients go back in a conversation, change it, branch it, or send all of it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from session_server.core.errors import (
    WIRE_ERRORS,
    SessionBusy,
    SessionClosing,
    SessionNotFound,
    SessionServerError,
    UnsupportedOperation,
)
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import ChatInput, Message, TextOptions, TurnRequest
from tests.sim.clients import REFUSALS, Client
from tests.sim.failure import Broken, Layer
from tests.sim.trace import Op

if TYPE_CHECKING:
    from tests.sim.wire import OpenSession, WireWorld


@dataclass(frozen=True, slots=True)
class Rewrites:
    """Does what `RewriteOps` draws. What refers to an item that is not there does nothing."""

    world: WireWorld
    sending: set[str] = field(default_factory=set)
    """Sessions to which a whole conversation is on its way."""

    @property
    def verbs(self) -> dict[str, Callable[[Op], None]]:
        """Its operations by name."""
        return {
            "rewind": self._rewind,
            "edit": self._edit,
            "fork": self._fork,
            "whole": self._whole,
        }

    def _rewind(self, op: Op) -> None:
        """Over the socket; `at` counts the items that stay."""
        found = self._found(op)
        if found is None:
            return
        client, each, item_ids = found
        if each.shadow.live:
            self.world.reached["rewind beside a turn"] += 1
        client.send({"type": "session.rewind", "to_item": ([None, *item_ids])[op["at"]]})

    def _edit(self, op: Op) -> None:
        found = self._found(op)
        if found is None or op["at"] == 0:
            return
        _, each, item_ids = found
        role = each.shadow.said.items[op["at"] - 1].role
        edits, item_id = self.world.server.sessions.edits, item_ids[op["at"] - 1]
        try:
            edits.edit_item(each.owner, each.session_id, item_id, op["text"])
        except (SessionBusy, SessionClosing, SessionNotFound, UnsupportedOperation) as error:
            self._refused(each, error, is_right=role == "raw")
        else:
            each.shadow.edit(op["text"])
            self.world.reached[f"{role} edited"] += 1

    def _fork(self, op: Op) -> None:
        found, other = self._found(op), self.world.clients[op["by"]]
        if found is None or not other.is_free or other.key != found[0].key:
            return
        _, each, item_ids = found
        edits, at = self.world.server.sessions.edits, op["at"]
        at_item = item_ids[at - 1] if at else None
        try:
            edits.fork(each.owner, each.session_id, at_item=at_item, new_id=op["s"])
        except (SessionBusy, SessionClosing, SessionNotFound) as error:
            self._refused(each, error, is_right=False)
        else:
            said = each.shadow.said
            self.world.begin(other, op["s"], said=said.fork(at or len(said.items)))
            self.world.reached["forked"] += 1

    def _whole(self, op: Op) -> None:
        """All of a conversation, as clients of Chat Completions send it; `op` has what they say."""
        client, frame = self.world.clients[op["c"]], op["frame"]
        each = self.world.session_of(client)
        if each is None or each.session_id in self.sending:
            return
        self.sending.add(each.session_id)
        each.shadow.ask(frame["turn_id"], frame)
        self.world.server.loop.create_task(self._submit(each, frame))

    async def _submit(self, each: OpenSession, frame: dict[str, Any]) -> None:
        sampling = {**frame["sampling"]}
        stops = TextOptions(stop=tuple(sampling.pop("stop", ())))
        sampling["stop_token_ids"] = tuple(sampling.get("stop_token_ids", ()))
        messages = tuple(Message(role, content) for role, content in frame["messages"])
        request = TurnRequest(
            frame["turn_id"],
            ChatInput(messages, is_whole=True),
            SamplingParams(**sampling),
            text=stops,
        )
        try:
            await self.world.server.sessions.submit(each.owner, each.session_id, request)
        except SessionServerError as error:
            code = WIRE_ERRORS[type(error)].code
            self.world.reached[f"whole conversation refused: {code}"] += 1
            if code not in REFUSALS | {"server_busy"}:
                raise Broken(Layer.PROTOCOL, f"a whole conversation was refused: {code}") from error
        finally:
            self.sending.discard(each.session_id)

    def _found(self, op: Op) -> tuple[Client, OpenSession, list[str]] | None:
        """The client, its session as the journal tells it now, and the names of its items."""
        self.world.read_journals()
        client = self.world.clients[op["c"]]
        each = self.world.session_of(client)
        if each is None:
            return None
        snapshot = self.world.server.sessions.snapshot(each.owner, each.session_id)
        each.shadow.learn_items(snapshot.items)
        if op["at"] > len(snapshot.items):
            return None
        return client, each, [item.id for item in snapshot.items]

    def _refused(self, each: OpenSession, error: SessionServerError, *, is_right: bool) -> None:
        self.world.reached[f"change refused: {type(error).__name__}"] += 1
        is_busy = isinstance(error, SessionBusy) and each.shadow.may_run
        if not (is_right or is_busy or isinstance(error, SessionClosing | SessionNotFound)):
            raise Broken(Layer.PROTOCOL, f"{each.session_id}: {error}") from error
