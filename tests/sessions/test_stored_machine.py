"""Sessions in a store under everything at once, crashes and failing disks among it.

What clients were told is there in the next process, token for token; what was on its way when the
process ended is as if it had never been.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import invariant, precondition, rule

from session_server.core.errors import SessionNotFound
from session_server.core.session_events import (
    TurnCancelled,
    TurnCompleted,
    TurnFailedEntry,
    TurnRequest,
)
from session_server.sessions.journal import Journal
from session_server.sessions.overview import SessionOverview, SortKey
from session_server.sessions.quotas import SessionLimits
from tests.depth import at_depth
from tests.sessions.paper_store import PaperStore
from tests.sessions.test_session_machine import (
    MAX_LEN,
    WANTED,
    SessionMachine,
    Shadow,
    run_machine,
)
from tests.sessions.world import OWNER, World

ALSO_WANTED = (
    "crash",
    "crash under a turn",
    "crash before an end was on disk",
    "crash before a session was on disk",
    "crash before a session was gone",
    "expired on disk",
    "duplicate id after a crash",
    "told that it is on disk",
    "told that it is not",
    "written again",
    "unloaded",
    "nobody to unload",
    "turn after unloading",
    "attached after unloading",
    "listed while unloaded",
    "shown to operators while unloaded",
    "closed while unloaded",
    "expired while unloaded",
    "crash while unloaded",
    "drained",
    "closed while drained",
)


class StoredMachine(SessionMachine):
    """The same sessions, on a disk that may be slow or full, in processes that may end."""

    reached: ClassVar[Counter[str]] = Counter()
    is_stored = True

    def make_world(self) -> World:
        if not hasattr(self, "directory"):
            self.directory = Path(tempfile.mkdtemp())
            self.behind_s = 1_000_000.0
            self.earlier: dict[str, str] = {}
            self.durable: set[tuple[str, str]] = set()
        self.unloaded: dict[str, float] = {}
        """Sessions that are on disk alone, and when they expire."""

        self.store = PaperStore(self.directory, self.wall_s)
        limits = SessionLimits(max_queued_turns=2)
        return World(max_turn_len=MAX_LEN, limits=limits, store=self.store, kv_tiers="disk")

    def wall_s(self) -> float:
        return self.behind_s + (self.world.now_s if hasattr(self, "world") else 0.0)

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.store.fails = self.store.is_slow = False
                self.store.tell()
                self.read_all()
                for name in list(self.unloaded):
                    self.world.do(self.world.manager.load(OWNER, name))
                    self.world.manager.get(OWNER, name)
            super().teardown()
        finally:
            self.store.finish()
            shutil.rmtree(self.directory)

    @rule(is_slow=st.sampled_from([True, True, False]))
    def pace(self, is_slow: bool) -> None:
        self.store.is_slow = is_slow
        if not is_slow:
            self.store.tell()

    @rule(limit=st.sampled_from([1, 2, None]))
    def tell(self, limit: int | None) -> None:
        self.store.tell(limit)

    @rule(chance=st.integers(0, 3))
    def fill_up(self, chance: int) -> None:
        self.store.fails = chance == 0

    @rule(chance=st.integers(0, 3))
    def crash(self, chance: int) -> None:
        """The process ends, and another one opens the store."""
        if chance:
            return
        self._write_what_failed()
        self.read_all()
        running = self.world.engine.is_busy
        found = self.world.manager._sessions.find
        live = [
            shadow
            for shadow in self.shadows.values()
            if not shadow.is_over and shadow.name not in self.unloaded
        ]
        self.reached["crash while unloaded"] += bool(self.unloaded)
        closing = [shadow for shadow in live if found(OWNER, shadow.name) is None]
        untold = [shadow for shadow in live if self.is_ahead(shadow) and shadow not in closing]
        self.reached["crash before a session was gone"] += bool(closing)
        self.reached["crash"] += 1
        self.reached["crash under a turn"] += running
        self.reached["crash before an end was on disk"] += bool(untold)
        self.store.finish()
        self.behind_s += self.world.now_s - 100.0
        old, self.world = self.world, self.make_world()
        old.finish()
        for shadow in list(self.shadows.values()):
            if shadow.is_over or shadow in closing:
                # It was to go, so nobody cares what of it is still there.
                del self.shadows[shadow.name]
            else:
                self._come_back(shadow)

    def _write_what_failed(self) -> None:
        """What clients were told is not on disk may be lost; here it is not, so that they need not
        ask."""
        logs = self.world.manager._flow.conclusion.logs
        self.store.fails = False
        while len(logs._behind):
            self.reached["written again"] += 1
            num_slow, self.store.is_slow = self.store.is_slow, False
            self.store.tell()
            self.world.manager.tick()
            self.store.is_slow = num_slow

    def _come_back(self, shadow: Shadow) -> None:
        """Go on with what was told to be on disk; any other turn may be there or not."""
        shadow.order = [each for each in shadow.order if (shadow.name, each) in self.durable]
        shadow.ended = set(shadow.order)
        shadow.may_run_again &= shadow.ended
        self.world.do(self.world.manager.load(OWNER, shadow.name))
        try:
            journal = self.world.manager.journal(OWNER, shadow.name)
        except SessionNotFound:
            is_on_disk = self.store._database.find(OWNER.owner_id, shadow.name) is not None
            assert is_on_disk or not shadow.order, "a session that was told of is gone"
            why = "expired on disk" if is_on_disk else "crash before a session was on disk"
            self.reached[why] += 1
            del self.shadows[shadow.name]
            return
        self._read_from_the_beginning(shadow, journal)
        if shadow.order:
            self.earlier[shadow.name] = shadow.order[0]

    def _read_from_the_beginning(self, shadow: Shadow, journal: Journal) -> None:
        assert journal.first_seq > shadow.seq + 1, "a number was used before"
        shadow.journal, shadow.seq = journal, journal.first_seq - 1

    @precondition(lambda self: len(self.names) < 3)
    @rule(chance=st.integers(0, 5))
    def open_and_crash(self, chance: int) -> None:
        """The process ends before a session is on disk that a socket has opened."""
        if chance:
            return
        self.store.is_slow = True
        self.open(20.0)
        self.crash(0)

    @precondition(lambda self: self.names and self.world.engine.is_alive)
    @rule(index=st.integers(0, 2), chance=st.integers(0, 5))
    def fail_under_a_turn(self, index: int, chance: int) -> None:
        """What ends turns from below: the engine dies, or a forward fails."""
        if chance > 1:
            return
        self.submit(index, "chat", 40, (), True, True)
        self.play(2)
        if chance:
            self.die(0)
        else:
            self.fault()

    @precondition(lambda self: self.names and self.world.engine.is_alive)
    @rule(index=st.integers(0, 2), chance=st.integers(0, 9))
    def end_and_crash(self, index: int, chance: int) -> None:
        """The process ends when a turn has ended that a full disk has not taken, or a slow one."""
        if chance > 1:
            return
        self.store.tell()
        if not self.names:  # what the store had to tell has ended the last of them
            return
        self.store.fails, self.store.is_slow = chance == 0, chance == 1
        self.submit(index, "tokens", 3, (), True, True)
        self.world.engine.run()
        self.crash(0)

    @precondition(lambda self: self.names)
    @rule(index=st.integers(0, 2), chance=st.integers(0, 9))
    def close_and_crash(self, index: int, chance: int) -> None:
        """The process ends before a session is gone from the disk that a client has closed."""
        if chance:
            return
        self.store.is_slow = True
        self.close(index, 0)
        self.crash(0)

    @rule(chance=st.integers(0, 5))
    def rest_and_crash(self, chance: int) -> None:
        """The process ends while sessions rest, and some have expired when the next one comes."""
        if chance:
            return
        if len(self.names) < 3:
            self.open(20.0)
        self.store.tell()
        self.world.now_s += 21.0
        self.crash(0)

    @precondition(lambda self: self.names)
    @rule(index=st.integers(0, 2))
    def ask_again(self, index: int) -> None:
        """A turn that has ended in an earlier process is asked for again, and does not run again
        as one does that failed by no fault of its client (`run_again`)."""
        shadow = self.shadows[self.name(index)]
        turn_id = self.earlier.get(shadow.name)
        if turn_id is None or turn_id in shadow.may_run_again:
            return
        before = shadow.journal.last_seq
        view = self.world.submit(shadow.name, shadow.requests[turn_id])
        assert view.end is not None
        assert shadow.journal.last_seq == before
        self.reached["duplicate id after a crash"] += 1

    @precondition(lambda self: self.names)
    @rule(
        is_quiet=st.sampled_from([True, True, False]),
        num_sessions=st.integers(1, 3),
        then=st.sampled_from(["", "", "list", "show", "close", "crash"]),
    )
    def unload(self, is_quiet: bool, num_sessions: int, then: str = "") -> None:
        """Others need the memory of what rests. What comes `then` would be rare by itself."""
        if is_quiet and self.world.engine.is_alive:
            self.world.engine.run()
            self.store.fails = False
            self.store.tell()
        self.read_all()
        manager = self.world.manager
        for _ in range(num_sessions):
            manager._sessions.by_use.in_hand = None
            before = {session.session_id: session for session in manager._sessions}
            was_one = manager.exits._unload_one(OWNER, of_others=True)
            gone = before.keys() - {session.session_id for session in manager._sessions}
            assert len(gone) == was_one
            self.reached["unloaded" if was_one else "nobody to unload"] += 1
            for name in gone:
                shadow = self.shadows[name]
                assert shadow.ended == set(shadow.order), "a session left with a turn"
                self.unloaded[name] = before[name].expires_s
        match then if self.unloaded else "":
            case "list":
                self.list_all()
            case "show":
                self.show_all("opened")
            case "close":
                self.close_unloaded(0, num_sessions)
            case "crash":
                self.crash(0)

    @precondition(lambda self: self.names)
    @rule(chance=st.integers(0, 5))
    def unload_and_crash(self, chance: int) -> None:
        """The process ends while sessions are on disk alone."""
        if chance:
            return
        self.unload(True, 2)
        self.crash(0)

    @precondition(lambda self: self.names)
    @rule(index=st.integers(0, 5), chance=st.integers(0, 2))
    def drain(self, index: int, chance: int) -> None:
        """The process stops as it is asked to; until it has ended, clients go on closing."""
        if chance or not self.world.engine.is_alive:
            return
        self.pace(False)
        self.world.engine.run()
        self._write_what_failed()
        self.read_all()
        before = {each.session_id: each.expires_s for each in self.world.manager._sessions}
        self.world.do(self.world.manager.drain(0.0))
        self.unloaded |= {name: before[name] for name in self.shadows if name in before}
        self.reached["drained"] += 1
        self.those_on_disk_alone_are_counted()
        if index and self.unloaded:
            self.close_unloaded(0, index)
            self.reached["closed while drained"] += 1
        self.those_on_disk_alone_are_counted()
        self.crash(0)

    @precondition(lambda self: len(self.names) < 3)
    @rule(chance=st.integers(0, 5))
    def unload_and_expire(self, chance: int) -> None:
        """The time of a session comes while it is on disk alone."""
        if chance:
            return
        self.open(20.0)
        self.unload(True, 3)
        self.wait(25.0)

    @precondition(lambda self: self.unloaded)
    @rule(index=st.integers(0, 2))
    def attach(self, index: int) -> None:
        """A client comes back to a session that is on disk alone, and takes a snapshot."""
        name = list(self.unloaded)[index % len(self.unloaded)]
        shadow = self.shadows[name]
        try:
            snapshot = self.world.do(self.world.manager.settled_snapshot(OWNER, name))
        except SessionNotFound:
            return  # it has expired
        said = [(item.role, item.content) for item in shadow.items]
        assert [(item.role, item.content) for item in snapshot.items] == said
        assert snapshot.session.epoch != shadow.journal.epoch
        assert snapshot.session.num_tokens == len(shadow.tokens)
        self.reached["attached after unloading"] += 1

    @precondition(lambda self: self.unloaded)
    @rule(chance=st.integers(0, 2), index=st.integers(0, 2))
    def close_unloaded(self, chance: int, index: int) -> None:
        if chance:
            return
        name = list(self.unloaded)[index % len(self.unloaded)]
        try:
            assert self.world.manager.close(OWNER, name).state == "closing"
        except SessionNotFound:
            return  # it has expired
        self.reached["closed while unloaded"] += 1
        del self.unloaded[name], self.shadows[name]

    @precondition(lambda self: self.names)
    @rule(index=st.integers(0, 2), chance=st.integers(0, 3))
    def close(self, index: int, chance: int) -> None:
        if self.name(index) in self.unloaded:
            self.attach(list(self.unloaded).index(self.name(index)))
            self.read_all()
        super().close(index, chance)

    @rule()
    def list_all(self) -> None:
        """Each is listed, wherever it is; so many are counted."""
        listed = [
            view.session_id for view in self.world.do(self.world.manager.list(OWNER)).sessions
        ]
        assert len(set(listed)) == len(listed)
        is_there = set(self.names) <= set(listed)
        assert is_there, "a session is not listed"
        self.reached["listed while unloaded"] += bool(self.unloaded)

    @precondition(lambda self: self.unloaded)
    @rule(sort=st.sampled_from(["opened", "active", "tokens", "ttft"]))
    def show_all(self, sort: SortKey) -> None:
        """An operator pages through all of them, and reads none."""
        manager, after = self.world.manager, None
        overview = SessionOverview(
            manager.edits.parts, manager.drafts.copies.names, lambda: self.world.now_s
        )
        shown: list[str] = []
        before = len(manager._sessions)
        while True:
            page = self.world.do(overview.page(sort=sort, limit=2, after=after))
            shown += [summary.view.session_id for summary in page.summaries]
            for summary in page.summaries:
                found = self.world.do(overview.show(summary.id))
                assert found.view.session_id == summary.view.session_id
            after = page.next_after
            if after is None:
                break
        assert len(shown) == len(set(shown)) == page.num_matching
        is_there = set(self.names) <= set(shown)
        assert is_there, "a session is not shown"
        assert len(manager._sessions) == before
        self.reached["shown to operators while unloaded"] += 1

    @invariant()
    def those_on_disk_alone_are_counted(self) -> None:
        if not hasattr(self, "world"):
            return
        quotas, sessions = self.world.manager._quotas, self.world.manager._sessions
        rows = list(self.store._database.walk(None))
        unread = [
            row
            for row in rows
            if sessions.find(OWNER, row.session_id) is None
            and row.number not in self.store.deletions.hidden
        ]
        assert quotas.sessions.total == len(sessions)
        assert quotas.owned_sessions.total == len(sessions) + len(unread)
        # What is deleted counts until it is gone.
        num_bytes = sum(holding.num_bytes for holding in self.store.holdings())
        assert quotas.stored_bytes.total == num_bytes

    def _submit(self, name: str, request: TurnRequest) -> None:
        was_unloaded = name in self.unloaded
        super()._submit(name, request)
        self.reached["turn after unloading"] += (
            was_unloaded and self.shadows[name].requests.get(request.turn_id) is request
        )

    def read_all(self) -> None:
        """Read on where those that come back from the disk do: at the beginning of a journal."""
        for name, expires_s in list(self.unloaded.items()):
            shadow, session = self.shadows[name], self.world.manager._sessions.find(OWNER, name)
            if session is not None:
                del self.unloaded[name]
                assert session.journal.epoch != shadow.journal.epoch
                self._read_from_the_beginning(shadow, session.journal)
            elif self.store.find(OWNER.owner_id, name) is None:
                assert self.world.now_s > expires_s - 1.0, "a session has left for ever"
                self.reached["expired while unloaded"] += 1
                del self.unloaded[name], self.shadows[name]
        super().read_all()

    def await_disk(self) -> None:
        self.store.tell()

    def is_ahead(self, shadow: Shadow) -> bool:
        session = self.world.manager._sessions.find(OWNER, shadow.name)
        return session is None or session.is_concluding

    @property
    def names(self) -> list[str]:
        """Sessions that are open, and not on their way from the disk."""
        found, find = self.world.manager._sessions.find, self.store.find
        return [
            name
            for name in super().names
            if found(OWNER, name) is not None
            or (name in self.unloaded and find(OWNER.owner_id, name) is not None)
        ]

    def _read_end(
        self, shadow: Shadow, end: TurnCompleted | TurnCancelled | TurnFailedEntry
    ) -> None:
        super()._read_end(shadow, end)
        self.reached["told that it is on disk"] += end.outcome.is_durable is True
        self.reached["told that it is not"] += end.outcome.is_durable is False
        assert end.outcome.is_durable is not None
        if end.outcome.is_durable:
            self.durable.add((shadow.name, end.turn_id))

    def _forget_end(self, shadow: Shadow, turn_id: str) -> None:
        super()._forget_end(shadow, turn_id)
        # How it failed may be on disk; how it ends now is not until a client is told so.
        self.durable.discard((shadow.name, turn_id))


def test_sessions_in_a_store_keep_their_promises_across_crashes() -> None:
    run_machine(StoredMachine, ALSO_WANTED, max_examples=at_depth(600, proof=4000))
    # That each single thing is reached is what the machine without a store shows.
    for kind in ("rewind", "edit", "cancel", "stop", "whole conversation"):
        assert any(StoredMachine.reached[name] for name in WANTED if name.startswith(kind)), kind
