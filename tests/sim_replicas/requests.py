"""What clients ask of a replica: each request is served in its process, and told to the judge."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from session_server.core.errors import (
    InternalInconsistency,
    SessionExists,
    SessionMoved,
    SessionNotFound,
    SessionServerError,
    TurnConflict,
    UnknownModel,
    wire_error,
)
from session_server.core.session_events import (
    ConversationItem,
    TurnCancelled,
    TurnEnd,
    TurnFailedEntry,
    TurnRequest,
)
from session_server.sessions.place_counter import SLOTS
from session_server.sessions.turn import TurnHooks
from session_server.sessions.views import OpenRequest
from tests.sim_replicas.judge import Begun, Broken, Facts, Judge
from tests.sim_replicas.process import OWNER, Process

_LOOK_S = 0.4
"""How long a client waits for the end of a turn before it looks whether somebody else has it."""

_TOLD_WITHIN_S = 60.0
"""Within what time a session is written, or its replica told that it cannot be, or lost."""

_NEVER = (InternalInconsistency, UnknownModel, TurnConflict)
"""What no client is ever told: nobody damages the store, and equal turns have equal ids."""

_FAULTS = ("internal_error", "internal_inconsistency", "numerical_error", "device_failed")


@dataclass(slots=True)
class Requests:
    """Serve requests, and count what comes of them."""

    judge: Judge
    reached: Counter[str]

    async def create(self, process: Process, name: str, ttl_s: float) -> None:
        """Open a session of this name, which somebody else may open too."""
        begun = self.judge.begin(name)
        try:
            request = OpenRequest(session_id=name, ttl_s=ttl_s, is_stored=True)
            view = await process.manager.create(OWNER, request)
        except SessionServerError as error:
            self._refused(error, "create", begun)
            return
        self.judge.not_found(begun)  # or it would have been told that the name is taken
        self.judge.found(begun)
        self.reached[f"create: durable {view.is_durable}"] += 1
        if view.is_durable:
            self.judge.used(begun.facts)

    async def is_known(self, process: Process, begun: Begun) -> bool:
        """Return whether nobody can open another session of this name."""
        request = OpenRequest(session_id=begun.facts.name, is_stored=True)
        try:
            await process.manager.create(OWNER, request)
        except SessionServerError as error:
            return isinstance(error, SessionExists)
        self.judge.not_found(begun)
        return True

    async def turn(self, process: Process, begun: Begun, request: TurnRequest) -> bool:
        """Run a turn, or be told of it again; return whether it need not be sent any more."""
        try:
            end, is_news = await self._end_of(process, begun, request)
        except SessionServerError as error:
            self._refused(error, "turn", begun)
            return isinstance(error, SessionNotFound)
        if isinstance(end, TurnFailedEntry):
            self.reached[f"turn: {end.code}"] += 1
            if end.code in _FAULTS:
                raise Broken("crash", f"turn {request.turn_id} failed: {end.code}")
            return not end.retryable
        is_kept = not isinstance(end, TurnCancelled) or end.kept_partial
        kind = f"cut {end.reason}" if isinstance(end, TurnCancelled) else "completed"
        self.reached[f"turn: {kind}, durable {end.outcome.is_durable}"] += 1
        if is_kept and end.outcome.is_durable:
            self.judge.durable(begun, request.turn_id, end.outcome.item_id, is_news=is_news)
            return True
        return False

    async def _end_of(
        self, process: Process, begun: Begun, request: TurnRequest
    ) -> tuple[TurnEnd, bool]:
        """Return how a turn has ended, and whether that was told for the first time."""
        manager, name = process.manager, begun.facts.name
        ended: asyncio.Future[TurnEnd] = asyncio.get_running_loop().create_future()

        def on_end(end: TurnEnd) -> None:
            if not ended.done():
                ended.set_result(end)

        view = await manager.submit(OWNER, name, request, hooks=TurnHooks(on_end=on_end))
        if view.end is not None:
            self.reached["turn: told again"] += 1
            return view.end, False
        while True:
            done, _ = await asyncio.wait([ended], timeout=_LOOK_S)
            if done:
                return ended.result(), True
            await manager.load(OWNER, name)
            found = manager.turn(OWNER, name, request.turn_id)
            if found.end is not None:
                return found.end, False

    async def read(self, process: Process, begun: Begun) -> tuple[str, ...]:
        """Read a conversation; return the ids of its answers."""
        try:
            snapshot = await process.manager.settled_snapshot(OWNER, begun.facts.name)
        except SessionServerError as error:
            self._refused(error, "read", begun)
            return ()
        self.reached["read"] += 1
        self._read(process, begun, snapshot.items)
        return tuple(item.id for item in snapshot.items if item.role == "assistant")

    async def rewind(self, process: Process, begun: Begun, pick: Callable[[int], int]) -> None:
        """Go back to an answer; `pick` chooses one of so many."""
        manager, facts = process.manager, begun.facts
        try:
            await manager.load(OWNER, facts.name)
            items = manager.snapshot(OWNER, facts.name).items
            self._read(process, begun, items)
            answers = [n for n, item in enumerate(items) if item.role == "assistant"]
            if len(answers) < 2:
                return
            place = answers[pick(len(answers) - 1)]
            behind = {item.turn_id for item in items[place + 1 :]}
            manager.edits.rewind(OWNER, facts.name, items[place].id)
            facts.cut |= behind
            await manager.stored()
            view = manager.get(OWNER, facts.name)
        except SessionServerError as error:
            self._refused(error, "rewind", begun)
            return
        self.reached[f"rewind: durable {view.is_durable}"] += 1
        if view.is_durable:
            facts.dropped |= behind
            self.judge.used(facts)

    async def update(self, process: Process, begun: Begun) -> None:
        """Change settings of a session."""
        manager, name = process.manager, begun.facts.name
        try:
            await manager.load(OWNER, name)
            manager.update(OWNER, name, metadata={"changed": "once more"})
        except SessionServerError as error:
            self._refused(error, "update", begun)
            return
        self.judge.found(begun)
        self.reached["update"] += 1

    async def fork(self, process: Process, begun: Begun, new: Begun) -> None:
        """Open a session with the conversation of another one."""
        manager, source, name = process.manager, begun.facts, new.facts.name
        try:
            await manager.load(OWNER, source.name)
            await manager.edits.fork_as(OWNER, source.name, name)
            said = {t: i for t, i in source.said.items() if t in begun.said}
            said = {t: i for t, i in said.items() if t not in source.cut}
            said = {} if self._may_be_another(process, source) else said
            await manager.stored()
            view = manager.get(OWNER, name)
        except SessionServerError as error:
            self._refused(error, "fork", begun)
            return
        self.judge.found(begun)
        self.reached[f"fork: durable {view.is_durable}"] += 1
        if view.is_durable:
            new.facts.said, new.facts.num_inherited = said | new.facts.said, len(said)
            self.judge.used(new.facts)

    async def delete(self, process: Process, begun: Begun) -> None:
        """Delete a session."""
        begun.facts.num_deleting += 1
        try:
            view = await process.manager.exits.delete(OWNER, begun.facts.name)
        except SessionServerError as error:
            # An attempt whose answer was lost may have deleted it before the next one was refused.
            goes_on = process.site.server.tables.named(OWNER.owner_id, begun.facts.name) is not None
            begun.facts.num_deleting -= goes_on and isinstance(error, SessionMoved)
            self._refused(error, "delete", begun)
            return
        self.judge.found(begun)
        self.reached[f"delete: durable {view.is_durable}"] += 1
        if view.is_durable:
            self.judge.gone(begun)

    async def list(self, process: Process, begun: list[Begun]) -> None:
        """List all sessions."""
        try:
            page = await process.manager.list(OWNER, limit=1000)
        except SessionServerError as error:
            self.reached[f"list: {wire_error(error).code}"] += 1
            return
        self.reached["list"] += 1
        views = {view.session_id: view for view in page.sessions}
        for each in begun:
            facts = each.facts
            view = views.get(facts.name)
            if each.is_gone and view is not None:
                raise Broken("list", f"{facts.name} is listed, and was deleted: {view}")
            if view is None:
                if each.is_there and not facts.may_go and not self.judge.may_expire(facts):
                    raise Broken("list", f"{facts.name} is not listed")
            elif self._may_be_another(process, facts):
                continue
            elif view.num_turns < len(each.said) - facts.num_inherited:
                raise Broken("list", f"{facts.name} has {view.num_turns} of {len(each.said)} turns")

    def _read(self, process: Process, begun: Begun, items: Sequence[ConversationItem]) -> None:
        self.judge.read(begun, items, may_be_another=self._may_be_another(process, begun.facts))

    def _may_be_another(self, process: Process, facts: Facts) -> bool:
        """Return whether a replica may have the second one of a name: also because it has not
        written its own yet, and was not told in that time that the name is taken."""
        number = process.number_of(facts.name)
        if facts.may_be_another or number is None or not facts.is_opened_twice:
            return facts.may_be_another
        is_written = (number, facts.name) in self.judge.logs
        opened_s = number / SLOTS / 1e6
        return not is_written and process.site.server.clock() < opened_s + _TOLD_WITHIN_S

    def _refused(self, error: SessionServerError, what: str, begun: Begun) -> None:
        self.reached[f"{what}: {wire_error(error).code}"] += 1
        if isinstance(error, _NEVER):
            raise Broken("crash", f"{what}: {error!r}")
        if isinstance(error, SessionNotFound):
            self.judge.not_found(begun)
        if isinstance(error, SessionExists) and what == "create":
            self.judge.found(begun)
