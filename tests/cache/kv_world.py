"""The KV echo: a fake device under a real `SessionAwareCache`, and a straight-line model beside it.

Every cell (page, offset) holds a tag that chains the namespace and all tokens up to its position. A
forward reads each earlier cell through the *device's* page table, which knows only the
`TableWrite`s it was sent, and compares it with the chain of the history; the "sampled" token is
taken from the last tag. An aliased page, a stale tail, a wrong prefix, a lost delta or a late write
changes a tag. `marks` counts the interesting things that happened.

Pools of several kinds hold the same tags; of a window, those that the next forward reads. A state
is the tag of the last token in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

import numpy as np

from cache.components import Component
from cache.errors import OutOfPages, OutOfRows
from cache.radix_node import RadixNode
from cache.session_cache import SessionAwareCache
from cache.spec import CacheSpec, Capacity, LayerGroup, LayerKind
from cache.stores import StoreParts
from cache.types import (
    NULL_PAGE,
    Namespace,
    PoolName,
    Retention,
    RowId,
    SessionId,
    SlotState,
    TableWrite,
    TurnId,
)
from cache.views import SlotView, TurnLoan
from tests.cache.audit import audit
from tests.cache.free_lists import FREE_LISTS, Allocation
from tests.cache.headroom import headroom

POOL = PoolName("full")
WINDOW_POOL = PoolName("window")
STATE_POOL = PoolName("state")
WINDOW = 6
NAMESPACES = (Namespace("alice", "model"), Namespace("bob", "model"))
NUM_TOKEN_IDS = 3


FULL_GROUP = LayerGroup(POOL, LayerKind.FULL, (0, 1), num_kv_heads=1, head_dim=4, dtype_bytes=4)
WINDOW_GROUP = LayerGroup(WINDOW_POOL, LayerKind.WINDOW, (2,), 1, 4, 4, window=WINDOW)

LATENT_GROUP = LayerGroup(
    PoolName("latent"),
    LayerKind.LATENT,
    (0, 1),
    num_kv_heads=1,
    head_dim=4,
    dtype_bytes=4,
    qk_rope_head_dim=1,
)

STATE_GROUP = LayerGroup(STATE_POOL, LayerKind.RECURRENT, (3,), 0, 0, 4, state_shapes=((2, 3),))

Mixture = Literal["full", "full + window", "latent", "window", "full + recurrent"]
MIXTURES: dict[Mixture, tuple[LayerGroup, ...]] = {
    "full": (FULL_GROUP,),
    "full + window": (FULL_GROUP, WINDOW_GROUP),
    "latent": (LATENT_GROUP,),
    "window": (WINDOW_GROUP,),
    "full + recurrent": (FULL_GROUP, STATE_GROUP),
}


def make_spec(page_size: int, mixture: Mixture = "full") -> CacheSpec:
    """The pools of a mixture of layers."""
    return CacheSpec(MIXTURES[mixture], page_size)


def make_cache(
    page_size: int = 4,
    *,
    num_pages: int = 33,
    num_states: int = 33,
    num_rows: int = 4,
    pinned_quota_pages: int = 0,
    max_context_len: int = 512,
    allocation: Allocation = "lifo",
    mixture: Mixture = "full",
) -> SessionAwareCache:
    """A small cache; by default the page freed last is reused first, so that mistakes alias."""
    spec = make_spec(page_size, mixture)
    pages = {group.pool: num_pages for group in spec.groups if group != STATE_GROUP}
    capacity = Capacity(pages, num_rows, max_context_len, num_states)
    return SessionAwareCache(
        spec,
        capacity,
        pinned_quota_pages=pinned_quota_pages,
        parts=StoreParts(FREE_LISTS[allocation]),
    )


@dataclass(frozen=True)
class Rest:
    """What a turn found, after its history was cut: what it is rolled back to.

    `last_page`: of the first pool, the private page that holds the end of it; 0 if none does.
    `reused_len`: what the turn does not compute again of it.
    """

    committed_len: int = 0
    last_page: int = 0
    reused_len: int = 0

    @property
    def is_recomputed(self) -> bool:
        return self.reused_len < self.committed_len


@dataclass
class LiveTurn:
    """A running turn as the model knows it."""

    turn_id: TurnId
    loan: TurnLoan
    session_id: SessionId
    base_len: int
    tokens: list[int]
    computed_len: int
    rest: Rest


@dataclass
class Device:
    """Tags per cell, and the mirror of the page table, per pool."""

    tags: dict[PoolName, np.ndarray]
    tables: dict[PoolName, np.ndarray]

    def apply(self, writes: Sequence[TableWrite]) -> None:
        for write in writes:
            table = self.tables[write.pool]
            table[write.row, write.start : write.start + len(write.pages)] = write.pages


@dataclass
class World:
    """The cache, its fake device, and the histories it must keep."""

    cache: SessionAwareCache
    page_size: int
    histories: dict[SessionId, list[int]] = field(default_factory=dict)
    namespaces: dict[SessionId, Namespace] = field(default_factory=dict)
    turns: dict[SessionId, LiveTurn] = field(default_factory=dict)
    waiting: dict[SessionId, list[int]] = field(default_factory=dict)
    closing: set[SessionId] = field(default_factory=set)
    drafts: dict[SessionId, list[int]] = field(default_factory=dict)
    fresh_forks: set[SessionId] = field(default_factory=set)
    marks: Counter[str] = field(default_factory=Counter)
    num_turns: int = 0

    def __post_init__(self) -> None:
        stores = self.cache.inspect().stores
        shape = (stores.rows.num_rows + 1, stores.rows.row_pages)
        self.device = Device(
            tags={
                pool: np.zeros((ledger.num_pages, self.page_size), np.int64)
                for pool, ledger in stores.ledgers.items()
            },
            tables={
                pool: np.zeros(shape, np.int32) for pool in stores.ledgers if pool != STATE_POOL
            },
        )

    @property
    def pool(self) -> PoolName:
        """The first pool: what is counted where one count will do."""
        return self.cache.inspect().stores.components[0].pool

    # Sessions

    def open(
        self,
        session_id: SessionId,
        namespace: Namespace,
        tokens: Sequence[int] = (),
        retention: Retention = Retention.RECLAIMABLE,
    ) -> None:
        self.cache.open(session_id, namespace=namespace, tokens=tokens, retention=retention)
        self.histories[session_id] = list(tokens)
        self.namespaces[session_id] = namespace

    def fork(self, session_id: SessionId, new_id: SessionId) -> None:
        namespace = self.namespaces[session_id]
        self.cache.fork(session_id, new_id, namespace=namespace)
        self.histories[new_id] = list(self.histories[session_id])
        self.namespaces[new_id] = namespace
        self.fresh_forks.add(new_id)

    def close(self, session_id: SessionId) -> None:
        is_gone = self.cache.close(session_id)
        assert is_gone == (session_id not in self.turns)
        if is_gone:
            self._forget(session_id)
        else:
            self.closing.add(session_id)
            self.marks["deferred close"] += 1

    def rewind(self, session_id: SessionId, to_len: int) -> None:
        if to_len < self.cache.slot(session_id).protected_len:
            self.marks["rewind below protected"] += 1
        self.cache.rewind(session_id, to_len)
        del self.histories[session_id][to_len:]
        self.waiting.pop(session_id, None)

    def cool(self, session_id: SessionId) -> None:
        if self.cache.slot(session_id).state is SlotState.PARKED:
            self.marks["cool"] += 1
        self.cache.cool(session_id)

    def quarantine(self, session_id: SessionId) -> None:
        self.cache.quarantine(session_id)
        self.marks["quarantine"] += 1
        self._ended(session_id)

    # Turns

    def begin(
        self,
        session_id: SessionId,
        new_tokens: Sequence[int],
        *,
        base_len: int | None = None,
        max_reuse_len: int | None = None,
    ) -> TurnLoan:
        history = self.histories[session_id]
        base_len = len(history) if base_len is None else base_len
        rest = self._find_rest(session_id, base_len, new_tokens)
        before, num_nodes = self.cache.slot(session_id), self._num_nodes()
        known_len = self._published_len(session_id, [*history[:base_len], *new_tokens])
        self.num_turns += 1
        turn_id = TurnId(f"turn-{self.num_turns}")
        loan = self.cache.begin_turn(
            session_id,
            turn_id,
            base_len=base_len,
            new_tokens=new_tokens,
            max_reuse_len=max_reuse_len,
        )
        self.device.apply(loan.table_writes)
        self._mark_begin(before, base_len, loan)
        is_cold, is_stateful = before.state is SlotState.COLD, STATE_POOL in self.device.tags
        self._mark("match cut back", is_stateful and is_cold and loan.cached_len < known_len)
        self._mark("split", self._num_nodes() > num_nodes)
        if before.state is SlotState.PARKED:
            self._mark("resident extends its match", loan.cached_len > before.committed_len)
            settled_len = before.committed_len - before.tail_len
            reusable = min(settled_len, base_len + len(new_tokens) - 1)
            if base_len == len(history) and max_reuse_len is None and new_tokens:
                assert loan.cached_len >= reusable, "a resident session recomputed its history"
        del history[base_len:]
        self.waiting.pop(session_id, None)
        tokens = [*history, *new_tokens]
        limit = len(tokens) - 1 if max_reuse_len is None else min(max_reuse_len, len(tokens) - 1)
        assert loan.cached_len <= limit, "one token at least is computed"
        rest = replace(rest, reused_len=min(rest.committed_len, loan.cached_len))
        self.turns[session_id] = LiveTurn(
            turn_id, loan, session_id, base_len, tokens, loan.cached_len, rest
        )
        return loan

    def step(self, session_id: SessionId, max_tokens: int) -> None:
        """One forward of at most `max_tokens`; under pressure somebody gives way first."""
        turn = self.turns[session_id]
        count = min(max_tokens, len(turn.tokens) - turn.computed_len)
        if not self.make_room(session_id, turn.computed_len + count):
            return
        last_tag = self._forward(turn, count)
        turn.computed_len += count
        sampled = [last_tag % NUM_TOKEN_IDS] if turn.computed_len == len(turn.tokens) else []
        turn.tokens += sampled
        num_nodes, num_published = self._num_nodes(), self._num_tree_pages()
        num_free = self._num_window_pages()
        writes = self.cache.record(turn.turn_id, turn.computed_len, sampled)
        self._mark("window slid", self._num_window_pages() > num_free)
        self._mark_publish(writes, num_nodes, num_published)

    def draft(self, session_id: SessionId, tokens: list[int], max_tokens: int) -> None:
        """What a session's next turn may be, computed as far as free pages and rows reach."""
        tails, history = self.cache.tails, self.histories[session_id]
        before, num_kept = self.fingerprint(), self._common_draft(session_id, tokens)
        try:
            view = tails.begin(session_id, len(history), tokens)
        except OutOfRows:
            assert self.fingerprint() == before, "a verb that raised changed something"
            self.marks["no row for a draft"] += 1
            return
        self.device.apply(view.table_writes)
        self._mark("draft extended", 0 < num_kept < len(tokens))
        if num_kept and not self.cache.inspect().stores.bounded:
            assert view.computed_len >= len(history) + num_kept, "a draft is computed again"
        self.drafts[session_id] = list(tokens)
        said = [*history, *tokens]
        turn = LiveTurn(TurnId(""), view, session_id, len(history), said, 0, Rest())
        while (start := view.computed_len) < len(said):
            turn.computed_len = start
            count = min(max_tokens, len(said) - start)
            before = self.fingerprint()
            try:
                self.device.apply(tails.grow(session_id, start + count))
            except OutOfPages:
                assert self.fingerprint() == before, "a verb that raised changed something"
                self.marks["no page for a draft"] += 1
                return
            self._forward(turn, count)
            assert tails.record(session_id, view.tail, start + count)
        self.marks["draft computed"] += 1

    def drop_draft(self, session_id: SessionId) -> None:
        """An abandoned draft leaves the session as it was."""
        before = self.cache.slot(session_id)
        self.cache.tails.drop(session_id)
        after = self.cache.slot(session_id)
        if after.state is SlotState.PARKED:
            assert after.committed_len == before.committed_len - before.tail_len
        self.marks["draft dropped"] += 1

    def overshoot(self, session_id: SessionId, num_tokens: int) -> None:
        """A launch past what will be kept: buys pages and writes what must never be read."""
        turn = self.turns[session_id]
        end = turn.computed_len + num_tokens
        if not self.make_room(session_id, end):
            return
        moves = turn.loan.state_moves(turn.computed_len, end)
        for _, page in moves.targets if moves else ():
            self.device.tags[STATE_POOL][page] = -1
        for pool in self.device.tables:
            tags = self.device.tags[pool]
            row = self.cache.inspect().stores.rows.entries(pool, self._row(session_id))
            for position in range(turn.computed_len, end):
                tags[row[position // self.page_size], position % self.page_size] = -1
        self.marks["overshoot"] += 1

    def end(self, session_id: SessionId, keep_len: int) -> None:
        turn = self.turns[session_id]
        before, last_page = self.cache.slot(session_id), self._page_at(turn.rest, session_id)
        num_nodes, num_published = self._num_nodes(), self._num_tree_pages()
        writes = self.cache.end_turn(turn.turn_id, keep_len)
        self._mark_publish(writes, num_nodes, num_published)
        self._mark("rollback", keep_len == turn.base_len)
        self.histories[session_id] = turn.tokens[:keep_len]
        if session_id in self.closing:
            self._ended(session_id)
            return
        after = self.cache.slot(session_id)
        if keep_len < before.protected_len:
            self._mark("page taken back", after.committed_len == keep_len)
        kept_len = min(before.committed_len, keep_len)
        most_len = max(kept_len, turn.rest.committed_len if turn.rest.is_recomputed else 0)
        assert after.committed_len <= most_len
        if keep_len >= before.protected_len and not self.cache.inspect().stores.bounded:
            assert after.committed_len >= kept_len
        elif keep_len >= before.committed_len:
            assert after.committed_len >= kept_len, "what was computed last is kept"
        if keep_len == turn.base_len:
            self._check_rollback(turn, before, last_page)
        self._ended(session_id)

    def _check_rollback(self, turn: LiveTurn, before: SlotView, last_page: int) -> None:
        """A session is as its turn found it. `last_page`: where its row had the end of that."""
        rest, committed_len = turn.rest, self.cache.slot(turn.session_id).committed_len
        forgets = bool(self.cache.inspect().stores.bounded)
        self._mark("rollback to a window", forgets and rest.committed_len > WINDOW)
        if rest.is_recomputed:
            assert committed_len >= rest.reused_len // self.page_size * self.page_size
            return
        is_published = before.protected_len > rest.committed_len
        was_replaced = is_published and last_page not in (NULL_PAGE, rest.last_page)
        can_be_lost = not was_replaced or WINDOW_POOL in self.device.tags
        if committed_len < rest.committed_len and is_published and can_be_lost:
            # The page it began in is published in some pool, and another session has locked it
            # there, or a window has passed it.
            assert committed_len >= rest.committed_len // self.page_size * self.page_size
            return
        self._mark("page set aside", was_replaced and rest.last_page != NULL_PAGE)
        assert committed_len >= rest.committed_len, "a rollback lost the way back"

    def discard(self, session_id: SessionId) -> None:
        turn = self.turns[session_id]
        self.device.apply(self.cache.discard(turn.turn_id))
        self.histories[session_id] = turn.tokens[: turn.base_len]
        self.marks["discard"] += 1
        self._ended(session_id)

    def retract(self, session_id: SessionId) -> None:
        turn = self.turns[session_id]
        uncommitted = self.cache.retract(turn.turn_id).tolist()
        assert uncommitted == turn.tokens[turn.base_len :], "a retracted turn lost tokens"
        self.histories[session_id] = turn.tokens[: turn.base_len]
        self.marks["retract"] += 1
        is_closing = session_id in self.closing
        self._ended(session_id)
        if not is_closing:
            self.waiting[session_id] = uncommitted

    def make_room(self, session_id: SessionId, to_len: int) -> bool:
        """What a scheduler does: cool the oldest, then retract the youngest, then give up."""
        while True:
            turn = self.turns[session_id]
            before, num_nodes = self.fingerprint(), self._num_nodes()
            num_published, num_snapshots = self._num_tree_pages(), self._num_snapshots()
            try:
                self.device.apply(self.cache.grow(turn.turn_id, to_len))
            except OutOfPages:
                assert self.fingerprint() == before, "a verb that raised changed something"
                self.marks["out of pages"] += 1
            else:
                if self._num_tree_pages() < num_published:
                    self.marks["eviction"] += 1
                    self._mark("long edge trimmed", self._num_nodes() == num_nodes)
                    self._mark("tombstone", self._has_tombstone(WINDOW_POOL))
                self._mark("snapshot gone", self._num_snapshots() < num_snapshots)
                return True
            idle = next(iter(self.cache.parked), None)
            if idle is not None:
                self._cool_for_pages(idle.session_id, dict(idle.freed_pages))
                continue
            youngest = list(self.turns)[-1]
            self.retract(youngest)
            if youngest == session_id:
                return False

    # Oracles

    def check(self) -> None:
        """The full audit, the histories, and the content of every cell anybody may read."""
        audit(self.cache)
        self._check_parked_queue()
        for session_id, history in self.histories.items():
            turn = self.turns.get(session_id)
            tail = self.cache.inspect().slots[session_id].tail
            if tail is not None:
                assert tail.start == len(history), "a tail begins behind the history"
                expected = [*history, *self.drafts[session_id]]
            else:
                expected = turn.tokens if turn else history
            assert self.cache.tokens(session_id).tolist() == expected, "history differs"
        for component in self.cache.inspect().stores.components:
            if component.pool == STATE_POOL:
                self._check_states()
            else:
                self._check_slots(component)
            self._check_tree(component.pool)

    def close_everything(self) -> None:
        """I16: with nothing running and everything evicted, every page and row is back."""
        for session_id, turn in list(self.turns.items()):
            self.end(session_id, len(turn.tokens))
        for session_id in list(self.histories):
            self.close(session_id)
        self.cache.flush()
        audit(self.cache)
        for accounts in self.cache.accounts().values():
            assert accounts.free + accounts.quarantine == accounts.pages - 1
        assert headroom(self.cache).free_rows == self.cache.inspect().stores.rows.num_rows
        assert not list(self.cache.inspect().stores.tree.roots())

    def fingerprint(self) -> tuple[object, ...]:
        """Everything visible; equal before and after a call that raised."""
        return (
            repr(self.cache.accounts()),
            repr(list(self.cache.slots())),
            repr(headroom(self.cache)),
            self._num_nodes(),
        )

    # Private

    def _common_draft(self, session_id: SessionId, tokens: list[int]) -> int:
        """How many of these tokens a session's last draft has computed already."""
        slot = self.cache.inspect().slots[session_id]
        if slot.tail is None or slot.tail.start != len(self.histories[session_id]):
            return 0
        known = self.drafts[session_id][: max(0, slot.kv_committed_len - slot.tail.start)]
        same = [a == b for a, b in zip(known, tokens, strict=False)]
        return same.index(False) if False in same else len(same)

    def _forward(self, turn: LiveTurn, count: int) -> int:
        end = turn.computed_len + count
        tags = chain(self.namespaces[turn.session_id], turn.tokens[:end])
        for component in self.cache.inspect().stores.components:
            if component.pool == STATE_POOL:
                self._forward_state(turn, tags)
            else:
                self._forward_in(component, turn, tags)
        return tags[-1]

    def _forward_state(self, turn: LiveTurn, tags: list[int]) -> None:
        start, states = turn.computed_len, self.device.tags[STATE_POOL][:, 0]
        moves = turn.loan.state_moves(start, len(tags))
        assert moves is not None
        assert (moves.source == 0) == (start == 0), "the padding page stands for the beginning"
        assert not start or states[moves.source] == tags[start - 1], "a state is not of the history"
        assert moves.targets[-1][0] == len(tags)
        for length, page in moves.targets:
            assert start < length
            assert page not in {0, moves.source}, "a state that may be wanted is overwritten"
            states[page] = tags[length - 1]
        self._mark("state on the way", len(moves.targets) > 1)

    def _forward_in(self, component: Component, turn: LiveTurn, tags: list[int]) -> None:
        row, pool = self._row(turn.session_id), component.pool
        first, num_pages = component.first_page(turn.computed_len), -(-len(tags) // self.page_size)
        entries, cells = self.device.tables[pool][row], self.device.tags[pool]
        host = self.cache.inspect().stores.rows.entries(pool, row)
        assert entries[first:num_pages].tolist() == host[first:num_pages].tolist(), (
            "a delta is lost"
        )
        for position in range(first * self.page_size, len(tags)):
            page, offset = entries[position // self.page_size], position % self.page_size
            assert page != 0, "a live position reads the padding page"
            if position < turn.computed_len:
                assert cells[page, offset] == tags[position], "KV is not of the history"
            else:
                cells[page, offset] = tags[position]

    def _check_slots(self, component: Component) -> None:
        stores, slots = self.cache.inspect()
        for slot in slots.values():
            if slot.lease is not None:
                row = stores.rows.entries(component.pool, slot.lease.row).tolist()
                length = slot.kv_committed_len
                first, end = component.first_page(length), -(-length // self.page_size)
                assert all(row[first:end]), "a page that is read next was let go"
                tokens = slot.tokens.view(0, length).tolist()
                namespace = self.namespaces[slot.session_id]
                self._check_cells(component.pool, row, chain(namespace, tokens))

    def _check_parked_queue(self) -> None:
        """Sums that are kept are those of what each session reports."""
        idle = list(self.cache.parked)
        num_sessions, freed = self.cache.parked.count()
        assert num_sessions == len(idle)
        assert freed == {pool: sum(each.freed_pages[pool] for each in idle) for pool in freed}

    def _check_states(self) -> None:
        """What slots keep, and the books' own word for what they may keep."""
        states = self.device.tags[STATE_POOL][:, 0]
        for slot in self.cache.inspect().slots.values():
            lease = slot.lease
            if lease is None:
                continue
            tags = chain(self.namespaces[slot.session_id], slot.tokens.view().tolist())
            settled = [n for n in lease.states.lengths if n <= lease.computed_len]
            for length in settled:
                assert states[lease.states.page_at(length)] == tags[length - 1], "a wrong state"
            assert len(settled) <= (3 if slot.is_active or slot.tail else 1)
            if length := lease.computed_len:
                page = lease.state_at(length)
                assert states[page] == tags[length - 1], "the state to go on from is lost"

    def _check_tree(self, pool: PoolName) -> None:
        for namespace, root in self.cache.inspect().stores.tree.roots():
            pending: list[tuple[RadixNode, list[int], list[int]]] = [(root, [], [])]
            while pending:
                node, tokens, pages = pending.pop()
                tokens = tokens + node.tokens.view().tolist()
                pages = pages + (node.pages[pool].view().tolist() if node.parent else [])
                if not node.children:
                    self._check_cells(pool, pages, chain(namespace, tokens))
                pending += [(child, tokens, pages) for child in node.children.values()]

    def _check_cells(self, pool: PoolName, pages: Sequence[int], tags: list[int]) -> None:
        if pool == STATE_POOL:
            for index, page in enumerate(pages):
                last = (index + 1) * self.page_size - 1
                assert not page or self.device.tags[pool][page, 0] == tags[last], "a wrong snapshot"
            return
        for position, tag in enumerate(tags):
            page, offset = pages[position // self.page_size], position % self.page_size
            if page or pool == POOL:
                assert self.device.tags[pool][page, offset] == tag, "a cell is not what is said"

    def _cool_for_pages(self, session_id: SessionId, promised: dict[PoolName, int]) -> None:
        before = headroom(self.cache)
        self.cool(session_id)
        after = headroom(self.cache)
        assert {p: after.pages(p) - before.pages(p) for p in promised} == promised

    def _num_window_pages(self) -> int:
        """Window pages that are free."""
        accounts = self.cache.accounts().get(WINDOW_POOL)
        return accounts.free if accounts else 0

    def _has_tombstone(self, pool: PoolName) -> bool:
        """Whether an edge has lost a page of a pool and nothing else."""
        if pool not in self.cache.inspect().stores.ledgers:
            return False
        nodes = (
            node for _, root in self.cache.inspect().stores.tree.roots() for node in root.below()
        )
        return any(not node.pages[pool].view().all() for node in nodes)

    def _num_snapshots(self) -> int:
        accounts = self.cache.accounts().get(STATE_POOL)
        return accounts.tree_evictable + accounts.tree_protected if accounts else 0

    def _published_len(self, session_id: SessionId, tokens: Sequence[int]) -> int:
        """How many of a turn's tokens the tree knows, whole pages, one token left to compute."""
        roots = dict(self.cache.inspect().stores.tree.roots())
        node, length = roots.get(self.namespaces[session_id]), 0
        known = np.array(tokens, np.int32)
        while node is not None and length < len(tokens) - 1:
            key = known[length : length + self.page_size].tobytes()
            node = node.children.get(key)
            if node is not None:
                edge = node.tokens.view()
                rest = known[length : length + len(edge)]
                common = int((rest == edge[: len(rest)]).cumprod().sum())
                length += min(common, len(tokens) - 1 - length) // self.page_size * self.page_size
                node = node if common == len(edge) else None
        return length

    def _mark_begin(self, before: SlotView, base_len: int, loan: TurnLoan) -> None:
        session_id = before.session_id
        self._mark("rewind below protected", base_len < before.protected_len)
        self._mark("cold match", before.state is SlotState.COLD and loan.cached_len > 0)
        self._mark("resume", session_id in self.waiting)
        self._mark("fork match", session_id in self.fresh_forks and loan.cached_len > 0)
        self.fresh_forks.discard(session_id)

    def _mark_publish(
        self, writes: Sequence[TableWrite], num_nodes: int, num_published: int
    ) -> None:
        self.device.apply(writes)
        self._mark("duplicate re-pointed", bool(writes))
        grew = self._num_tree_pages() > num_published
        self._mark("published", grew)
        self._mark("edge grown in place", grew and self._num_nodes() == num_nodes)

    def _mark(self, name: str, happened: bool) -> None:
        if happened:
            self.marks[name] += 1

    def _ended(self, session_id: SessionId) -> None:
        self.turns.pop(session_id, None)
        if session_id in self.closing:
            assert session_id not in self.cache, "a deferred close was forgotten"
            self._forget(session_id)

    def _forget(self, session_id: SessionId) -> None:
        self.closing.discard(session_id)
        self.waiting.pop(session_id, None)
        self.fresh_forks.discard(session_id)
        del self.histories[session_id], self.namespaces[session_id]

    def _find_rest(self, session_id: SessionId, base_len: int, new_tokens: Sequence[int]) -> Rest:
        slot = self.cache.slot(session_id)
        if slot.state is not SlotState.PARKED or self._cools(session_id, base_len, new_tokens):
            return Rest()
        settled_len = min(base_len, slot.committed_len - slot.tail_len)
        rest = Rest(self.cache.kept_len(session_id, base_len, np.empty(0, np.int32), settled_len))
        is_private = rest.committed_len > slot.protected_len
        return replace(rest, last_page=self._page_at(rest, session_id)) if is_private else rest

    def _cools(self, session_id: SessionId, base_len: int, new_tokens: Sequence[int]) -> bool:
        """Whether a turn drops the draft that warmed a session: it finds the session cold."""
        tail = self.cache.inspect().slots[session_id].tail
        if tail is None or not tail.made_resident:
            return False
        return tail.start != base_len or self.drafts[session_id][:1] != list(new_tokens[:1])

    def _page_at(self, rest: Rest, session_id: SessionId) -> int:
        entries = self.cache.inspect().stores.rows.entries(self.pool, self._row(session_id))
        return int(entries[rest.committed_len // self.page_size])

    def _row(self, session_id: SessionId) -> RowId:
        slot = self.cache.inspect().slots[session_id]
        assert slot.lease is not None
        return slot.lease.row

    def _num_tree_pages(self) -> int:
        accounts = self.cache.accounts()[self.pool]
        return accounts.tree_evictable + accounts.tree_protected

    def _num_nodes(self) -> int:
        pending = [root for _, root in self.cache.inspect().stores.tree.roots()]
        count = 0
        while pending:
            children = list(pending.pop().children.values())
            count += len(children)
            pending += children
        return count


def chain(namespace: Namespace, tokens: Sequence[int]) -> list[int]:
    """The tag of each position: a hash of the namespace and all tokens up to it."""
    tag = len(namespace.tenant_salt) * 7919
    tags = []
    for position, token in enumerate(tokens):
        tag = (tag * 1_000_003 + token * 8191 + position + 1) % (1 << 61)
        tags.append(tag)
    return tags


def documents(seed: int = 7) -> list[list[int]]:
    """Shared beginnings: two documents that agree for a while."""
    random = Random(seed)
    first = [random.randrange(NUM_TOKEN_IDS) for _ in range(40)]
    return [first, first[:19] + [random.randrange(NUM_TOKEN_IDS) for _ in range(21)]]
