"""What the engine believes of KV outside of its pools, held against what is there.

After every step that moved any: the bytes of each tier are those of its segments and within its
bound, what is said to be in host memory or on disk is there, with the cells that its tokens give,
and once nothing is under way nothing else is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from cache.session_cache import SessionAwareCache
from cache.spec import LayerKind
from cache.tiers.segment import NAME_BYTES, Chain, Segment, chains_after, tenant_tag
from cache.tiers.segment_tree import Path
from cache.tiers.tier_account import TierAccount
from cache.types import Namespace, PoolName, SessionId, SlotState
from session_server.core.commands import (
    CancelTurn,
    CloseSession,
    CoolSession,
    EngineCommand,
    FlushCache,
    ForgetKV,
    StopTurn,
)
from session_server.core.tier_orders import (
    CopyIn,
    CopyOut,
    FileKey,
    FindFiles,
    TierOrder,
    WriteFile,
)
from session_server.engine.engine import Engine
from session_server.engine.in_flight import InFlight
from session_server.engine.scheduler import Scheduler
from session_server.engine.tiers.restoring import Restoring
from session_server.engine.tiers.spilling import Spilling
from session_server.engine.tiers.store import TierStore
from session_server.engine.tiers.unread_files import UnreadFiles
from session_server.engine.turn import Turn, TurnState
from tests.sim.carrier import EchoCarrier, Payload
from tests.sim.draws import name_value
from tests.sim.echo import tag_after
from tests.sim.failure import Broken, Layer
from tests.sim.faults import Site
from tests.sim.layers import POOLS, Mixture
from tests.sim.pushed_out import PushedOut

_NEARLY_FULL: Final = 8192
"""Bytes that hold no segment more, or hardly one."""


class TierWatch:
    """Looks at one engine. Every method that checks raises `Broken`."""

    def __init__(
        self, engine: Engine, cache: SessionAwareCache, carrier: EchoCarrier, mixture: Mixture
    ) -> None:
        self._engine, self._cache, self._carrier = engine, cache, carrier
        carrier.disk.begin_engine(self._store.disk.given_bytes)
        self._mixture = mixture
        self._tags: dict[int, list[int]] = {}
        self._looked_at: dict[int, set[int]] = {}
        self._doomed: list[Segment] = []
        self._ends: dict[SessionId, Segment] = {}
        self._num_seen = self._num_launched = 0
        self._begun: dict[int, int] = {}
        """Per copy on its way in, the forwards that were launched before it began."""

    @property
    def reached(self) -> Counter[str]:
        """What happened, counted."""
        return self._carrier.reached

    @property
    def _store(self) -> TierStore:
        return self._engine.inspect().tiers.store

    @property
    def _spilling(self) -> Spilling:
        return self._engine.inspect().tiers._spilling

    @property
    def _restoring(self) -> Restoring:
        return self._engine.inspect().tiers._restoring

    @property
    def _scheduler(self) -> Scheduler:
        return self._engine.inspect().scheduler

    @property
    def _in_flight(self) -> InFlight:
        return self._engine.inspect().in_flight

    @property
    def _page_size(self) -> int:
        return self._cache.spec.page_size

    def doubt(self, fault: Site) -> None:
        """Memory was found wrong in this step, and what was copied of it must not be used."""
        is_copying = len(self._carrier) > 0
        self.reached[f"tier: {fault} during copies"] += is_copying
        self._carrier.doubt()
        self._ends = {}

    def told(self, commands: Sequence[EngineCommand]) -> None:
        """The engine is about to obey these commands."""
        self._doomed, self._ends = [], {}
        self._num_launched = self._in_flight.num_forwards
        if not self._carrier.num_news:
            return
        may_take = self._carrier.has_results or self._is_short_of_room()
        if not (may_take or any(isinstance(each, FlushCache) for each in commands)):
            found = {*self._store.tree.segments()}
            self._ends = {
                session_id: last
                for session_id, last in self._spilling._last.items()
                if last in found
            }
        ends = [
            each for each in commands if isinstance(each, CloseSession | CoolSession | ForgetKV)
        ]
        is_alone = len(ends) == 1 and not self._carrier.has_results
        for command in commands:
            match command:
                case CloseSession(session_id=session_id, is_deleted=is_deleted):
                    is_copied = session_id in self._spilling._copying
                    is_copied |= session_id in self._restoring._waiting
                    self.reached["tier: closed during a copy"] += is_copied
                    self._note_end(self._scheduler.turn_of(session_id))
                    is_shared = is_deleted and self._shares_its_path(session_id)
                    self.reached["tier: deleted beside one that has its path too"] += is_shared
                    if is_deleted and is_alone:
                        self._doomed = self._only_of(session_id)
                case ForgetKV() if is_alone and self._store.is_listed:
                    path = self._path_of(command)
                    self._doomed = self._only_up_to(path.parts[-1].segment if path.parts else None)
                    self.reached["tier: session forgotten that is not open"] += bool(self._doomed)
                case CancelTurn(turn_id=turn_id) | StopTurn(turn_id=turn_id):
                    self._note_end(self._scheduler.find(turn_id))
                case _:
                    pass

    def check(self, orders: Sequence[TierOrder]) -> None:
        """A step is over that gave these orders."""
        self._check_fences(orders)
        if self._store.disk.is_short:  # others have pushed it out
            self._carrier.disk.pushed_out = PushedOut()
        num_seen = self._carrier.num_news
        if num_seen == self._num_seen and not (orders or self._doomed):
            return
        self._num_seen = num_seen
        store = self._store
        segments = store.tree.segments()
        kept = (*segments, *store.tree.lost())
        self._check_account("host memory", store.host, [s for s in kept if s in store.host])
        self._check_account("the disk", store.disk, [s for s in kept if s in store.disk])
        for segment in segments:
            self._check_segment(segment)
        last = next((s for s in self._doomed if store.tree.get(s.number) is s), None)
        # The copy of another session may have begun in this step.
        if last is not None and not (last.num_sessions or last.children):
            raise self._broken(f"segment {last.number} outlives its only session")
        if not any(isinstance(order, CopyOut | WriteFile) for order in orders):
            self._check_ends()
        self._check_sessions(segments)
        self._check_turns()
        if not (len(self._carrier) or self._restoring._held or store.orders or store.has_more):
            self._check_at_rest(segments)
        self._note_reached()

    def _check_fences(self, orders: Sequence[TierOrder]) -> None:
        """A copy in is ordered once no forward can write its pages that was launched before it had
        them, and nobody else has them while it is being made."""
        stores = self._cache.inspect().stores
        coming = {n: each.pages for n, each in stores.transits.items() if each.is_incoming}
        before = self._begun
        self._begun = {n: before.get(n, self._num_launched) for n in coming}
        num_settled = self._in_flight.num_forwards - len(self._in_flight)
        for order in orders:
            if not isinstance(order, CopyIn):
                continue
            for part in order.parts:
                segment = self._store.tree.get(part.segment)
                if segment is not None and not segment.is_readable:
                    raise self._broken(f"segment {part.segment} is read before it is there")
            written = pages_of(order)
            for number, pages in coming.items():
                is_its = any(set(pages[p].pages.tolist()) & ids for p, ids in written.items())
                if is_its and num_settled < self._begun[number]:
                    raise self._broken(f"copy {number} is ordered before {num_settled + 1} settles")
        for order in self._carrier.waiting:
            if isinstance(order, CopyIn):
                for pool, ids in pages_of(order).items():
                    kept = {p for each in stores.fenced.values() for p in each.get(pool, ())}
                    kept |= {p for pages in coming.values() for p in pages[pool].pages.tolist()}
                    if not ids <= kept:
                        raise self._broken(f"a copy writes {ids - kept} of {pool}, not kept for it")

    def _note_end(self, turn: Turn | None) -> None:
        is_restoring = turn is not None and turn.state is TurnState.RESTORING
        self.reached["tier: ended while its KV was copied"] += is_restoring

    def _path_of(self, command: ForgetKV) -> Path:
        namespace = Namespace(command.tenant_salt, "echo", command.tenant)
        return self._store.find(namespace, np.frombuffer(command.tokens, "<i4").astype(np.int32))

    def _only_of(self, session_id: SessionId) -> list[Segment]:
        return self._only_up_to(self._spilling._last.get(session_id), 1)

    def _only_up_to(self, segment: Segment | None, num_own: int = 0) -> list[Segment]:
        """The segments at the end of a path that nobody else has; `num_own` sessions that go end
        there."""
        only = list[Segment]()
        while segment is not None and self._store.tree.get(segment.number) is segment:
            content = segment.content
            num_others = segment.num_sessions - (0 if only else num_own)
            unread = (
                file_id[NAME_BYTES : 2 * NAME_BYTES]
                for file_id, _ in unread_of(self._store).values()
            )
            chains = {*chains_after(content.chain, content.tokens, self._page_size)}
            if num_others or len(segment.children) > bool(only) or not chains.isdisjoint(unread):
                break
            only.append(segment)
            segment = segment.parent
        return only

    def _is_short_of_room(self) -> bool:
        """Whether a copy to host memory may have to make room there, or a file on disk."""
        tree = self._store.tree
        num_pages = self._spilling._max_len // self._page_size
        largest = tree.bytes_of(
            np.zeros(self._spilling._max_len, np.int32),
            dict.fromkeys(tree.page_bytes, (0, num_pages)),
        )
        return self._store.writes.is_draining or self._store.host.free_bytes < largest

    def _check_ends(self) -> None:
        """Nobody takes a segment in which another session ends, but to make room."""
        for session_id, segment in self._ends.items():
            is_gone = self._store.tree.get(segment.number) is not segment
            if is_gone and self._spilling._last.get(session_id) is segment:
                raise self._broken(f"segment {segment.number} was taken from {session_id}")

    def _shares_its_path(self, session_id: SessionId) -> bool:
        """Whether somebody else ends in the path of a session, or goes on from it."""
        end, only = self._spilling._last.get(session_id), self._only_of(session_id)
        is_there = end is not None and self._store.tree.get(end.number) is end
        return is_there and not (only and only[-1].parent is None)

    def _check_account(self, name: str, account: TierAccount, held: list[Segment]) -> None:
        sums: Counter[bytes] = Counter()
        for segment in held:
            sums[tenant_tag(segment.content.namespace.tenant)] += self._bytes_of(segment)
        if account is self._store.disk:
            for file_id, num_bytes in unread_of(self._store).values():
                sums[file_id[2 * NAME_BYTES :]] += num_bytes
        if account.num_segments != len(held):
            raise self._broken(
                f"{name} counts {account.num_segments} segments, there are {len(held)}"
            )
        may_wait = self._store.has_more or self._store.is_writing
        is_within = account.num_bytes <= account.max_bytes or may_wait
        if account.num_bytes != sum(sums.values()) or not is_within:
            raise self._broken(
                f"{name} counts {account.num_bytes} bytes of {account.max_bytes}, has {sums}"
            )
        shares = {tenant: share.num_bytes for tenant, share in account._of_tenants.items()}
        if shares != dict(sums):
            raise self._broken(f"{name} counts {shares} by tenant, has {sums}")

    def _bytes_of(self, segment: Segment) -> int:
        content = segment.content
        num_bytes = self._store.tree.bytes_of(content.tokens, content.spans)
        if content.num_bytes != num_bytes:
            raise self._broken(f"segment {segment.number} says {content.num_bytes} bytes")
        return num_bytes

    def _check_segment(self, segment: Segment) -> None:
        store, carrier, number = self._store, self._carrier, segment.number
        parent, content = segment.parent, segment.content
        if parent is None:
            siblings = store.tree._roots.get(content.namespace, {})
        else:
            siblings = parent.children
            is_behind = parent.content.start < content.start <= parent.content.end
            if store.tree.get(parent.number) is not parent or not is_behind:
                raise self._broken(f"segment {number} follows one that is not there")
        if siblings.get(content.name) is not segment:
            raise self._broken(f"segment {number} is not found by its name")
        if segment.in_host and (segment not in store.host or number not in carrier.host):
            raise self._broken(f"segment {number} is not in host memory")
        if segment in store.disk and not (segment.on_disk or segment.is_writing):
            raise self._broken(f"segment {number} is counted and not on disk")
        if not (segment in store.host or segment in store.disk):
            raise self._broken(f"segment {number} is nowhere")
        if segment.on_disk:
            stored = carrier.disk.files.get(segment.content.file_id)
            if segment not in store.disk or stored is None:
                raise self._broken(f"segment {number} is not on disk")
            key = FileKey(content.name, content.namespace, content.chain, content.start)
            if stored.found.file != key:
                raise self._broken(f"the file of segment {number} is {stored.found.file}")
            self._check_payload(segment, stored.payload)
        if segment.in_host:
            self._check_payload(segment, carrier.host[number])

    def _check_payload(self, segment: Segment, payload: Payload) -> None:
        """The pages are those that the segment says it has, and hold what its tokens give."""
        looked_at = self._looked_at.setdefault(segment.number, set())
        if id(payload) in looked_at:
            return
        looked_at.add(id(payload))
        for pool, (first, end) in segment.content.spans.items():
            expected = [self._page(segment, pool, page) for page in range(first, end)]
            if payload.get(pool, []) != expected:
                raise Broken(Layer.CONTENT, f"segment {segment.number} does not hold its {pool}")

    def _page(self, segment: Segment, pool: PoolName, page: int) -> list[int]:
        """The cells of a page of the path."""
        start = page * self._page_size - segment.content.start
        tags = self._tags_of(segment)[max(0, start) : start + self._page_size]
        return tags[-1:] if pool == POOLS[LayerKind.RECURRENT] else tags

    def _tags_of(self, segment: Segment) -> list[int]:
        tags, content = self._tags.get(segment.number), segment.content
        if tags is None:
            tag = name_value(content.namespace.tenant_salt)
            if segment.parent is not None:
                before = self._tags_of(segment.parent)
                tag = before[content.start - 1 - segment.parent.content.start]
            tags = self._tags[segment.number] = []
            for position, token in enumerate(content.tokens.tolist(), content.start):
                tag = tag_after(tag, token, position)
                tags.append(tag)
        return tags

    def _check_sessions(self, segments: Sequence[Segment]) -> None:
        """What is counted of sessions is that of sessions there are."""
        spilling, restoring = self._spilling, self._restoring
        ends = Counter(segment.number for segment in spilling._last.values())
        for segment in segments:
            if segment.num_sessions != ends[segment.number]:
                raise self._broken(f"{segment.num_sessions} sessions end in {segment.number}")
        known = {*spilling._last, *spilling._dirty, *restoring._unused, *restoring._deferred}
        if gone := {session_id for session_id in known if session_id not in self._cache}:
            raise self._broken(f"of closed sessions something is left: {sorted(gone)}")
        if spilling._num_dirty != sum(dirty.num_tokens for dirty in spilling._dirty.values()):
            raise self._broken(f"{spilling._num_dirty} tokens are dirty, not {spilling._dirty}")
        for is_ahead, num_pages in restoring._num_unused.items():
            if num_pages != sum(n for ahead, n in restoring._unused.values() if ahead is is_ahead):
                raise self._broken(f"{num_pages} pages are unused, not {restoring._unused}")
        lent = [s for s in known if self._cache.slot(s).state is SlotState.LENT]
        if busy := [s for s in lent if s in spilling._dirty or s in restoring._unused]:
            raise self._broken(f"of sessions with a turn something waits: {busy}")

    def _check_turns(self) -> None:
        """Whoever waits for a copy is told of its end."""
        for turn in self._scheduler._turns.values():
            if turn.state is not TurnState.RESTORING:
                continue
            if turn.request.session_id not in self._restoring._waiting:
                raise Broken(Layer.LIVENESS, f"{turn.turn_id} waits for no copy")
            self.reached["tier: restored after a retraction"] += turn.num_admissions > 0
        if lost := self._engine._input_drafts._restoring.keys() - self._restoring._waiting.keys():
            raise Broken(Layer.LIVENESS, f"drafts of {lost} wait for no copy")
        self.reached["tier: waits for copies of others"] += bool(self._restoring._deferred)
        self.reached["tier: copied back though nobody waits"] += not all(
            self._restoring._waiting.values()
        )
        self.reached["tier: draft waits for its copy"] += bool(
            self._engine._input_drafts._restoring
        )

    def _check_at_rest(self, segments: Sequence[Segment]) -> None:
        """No copy is under way: nothing is held for any, and nothing is there that is not known."""
        store, carrier = self._store, self._carrier
        left = {
            "copies": self._cache.copies.num_under_way,
            "fences": len(self._cache.inspect().stores.fenced),
            "spilled sessions": len(self._spilling._copying),
            "restored sessions": len(
                self._restoring._waiting.keys() - self._restoring._deferred.keys()
            ),
            "results": len(store.orders._continue),
            "refused files": sum(store.tree.get(n) is not None for n in carrier.refused),
            "writes": store.is_writing + sum(segment.is_writing for segment in segments),
            "in host memory": len(carrier.host.keys() ^ {s.number for s in segments if s.in_host}),
        }
        if store.is_listed and store.has_disk:
            known = {s.content.file_id for s in segments if s.on_disk}
            known |= {file_id for file_id, _ in unread_of(store).values()}
            left["files"] = len(carrier.disk.files.keys() ^ known)
            num_bytes = carrier.disk.num_bytes
            left["bytes on disk"] = num_bytes - store.disk.num_bytes
            left["bytes too many on disk"] = max(0, num_bytes - store.disk.max_bytes)
            left["bytes that others need"] = max(0, num_bytes - carrier.disk.told_bytes)
        if any(left.values()):
            raise self._broken(f"nothing is under way, and left are {left}")

    def check_ended(self) -> None:
        """The engine has ended as it was told to: what is worth it is on disk, if it had time."""
        store, spilling = self._store, self._spilling
        left = {
            "sessions that were not copied": len(spilling._dirty),
            "copies": len(spilling._copying),
            "segments that were not written": sum(
                segment.in_host and not (segment.on_disk or segment.is_refused)
                for segment in store.tree.segments()
            ),
        }
        may_write = store.writes.is_draining and not store.orders.disk_watch.is_silent
        if may_write and any(left.values()):
            raise self._broken(f"it has ended before its time, and left are {left}")
        if self._carrier.disk.pushed_out.num_in_vain:
            raise self._broken(
                f"{self._carrier.disk.pushed_out.num_in_vain} files pushed out what was used later"
            )
        self.reached["tier: ended with a full disk"] += store.has_disk and any(
            segment.in_host and segment.is_refused for segment in store.tree.segments()
        )
        is_short = store.has_disk and any(left.values())
        self.reached["tier: too little time to write all"] += is_short
        self.reached["tier: ended with all on disk"] += may_write and store.disk.num_bytes > 0

    def _note_reached(self) -> None:
        store, reached = self._store, self.reached
        reached["tier: host memory full"] += store.host.free_bytes < _NEARLY_FULL
        reached["tier: disk full"] += store.has_disk and store.disk.free_bytes < _NEARLY_FULL
        is_disk_full = store.disk.free_bytes < _NEARLY_FULL
        reached["tier: disk full of files from before"] += is_disk_full and bool(store._unread)
        reached["tier: file gave way that is in host memory"] += store.disk.num_bytes > 0 and any(
            segment.in_host and segment.is_refused for segment in store.tree.segments()
        )
        reached["tier: a copied beginning gave way to its end"] += any(
            self._copied_len_of(session_id) < dirty.reached_len
            for session_id, dirty in self._spilling._dirty.items()
            if dirty.reached_len > 0
        )
        reached["tier: several tenants"] += len(store.host._of_tenants) > 1
        reached["tier: several segments on a path"] += any(s.parent for s in store.tree.segments())
        reached[f"tier: {self._mixture.value}"] += store.counts.hits > 0
        reached["tier: files are looked for behind a path"] += any(
            isinstance(order, FindFiles) and order.file.start > 0 for order in self._carrier.waiting
        )

    def _copied_len_of(self, session_id: SessionId) -> int:
        slot = self._cache.slot(session_id)
        tokens = self._cache.tokens(session_id, 0, slot.protected_len)
        return self._store.find(slot.namespace, tokens).length

    @staticmethod
    def _broken(text: str) -> Broken:
        return Broken(Layer.AUDIT, f"tiers: {text}")


def pages_of(order: CopyIn) -> dict[PoolName, set[int]]:
    """The pages that a copy writes."""
    written: dict[PoolName, set[int]] = {}
    for part in order.parts:
        for pool, (_, pages) in part.pages.items():
            written.setdefault(pool, set()).update(pages.tolist())
    return written


def unread_of(store: TierStore) -> Mapping[Chain, tuple[bytes, int]]:
    """The files that no segment stands for, by their names."""
    assert isinstance(store._unread, UnreadFiles), "a directory of this engine alone"
    return store._unread._files
