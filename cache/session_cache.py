"""`SessionAwareCache`: own the KV of all sessions of one engine, behind one set of verbs.

A turn calls `begin_turn`, then `grow` and `record` per step, then one of `end_turn`, `discard` and
`retract`. A verb that raises one of the errors it lists has changed nothing; after an assertion
only `rebuild` is safe. Call it from one thread; nothing here blocks,
logs or reads a clock. A verb costs O(new tokens) per turn and O(1) per step, whatever the length of
the history and the number of idle sessions; only the match of a cold session reads the history.

Under pressure `grow` evicts unlocked published pages. Cooling a session or retracting a turn is the
caller's decision: see `headroom` and `parked`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from cache.borrower import Borrower
from cache.changes import Changes
from cache.errors import NamespaceMismatch, SlotBusy, SlotExists, UnknownSession
from cache.lease import KVLease
from cache.ledger import Accounts
from cache.lockstep import Lockstep
from cache.page_copies import PageCopies
from cache.parked_queue import ParkedQueue
from cache.pinned_quota import PinnedQuota
from cache.radix_node import MatchResult
from cache.room import Room
from cache.session_slot import SessionSlot
from cache.spec import CacheSpec, Capacity
from cache.stores import KVStores, StoreParts
from cache.tails import Tails
from cache.types import (
    Namespace,
    PoolName,
    Retention,
    SessionId,
    SlotState,
    TableWrite,
    Tokens,
    TurnId,
    pages_for,
)
from cache.views import CacheParts, Headroom, SlotView, TenantShare, TurnLimits, TurnLoan


class SessionAwareCache:
    """Hold all sessions of one engine and their KV."""

    def __init__(
        self,
        spec: CacheSpec,
        capacity: Capacity,
        *,
        pinned_quota_pages: int = 0,
        parts: StoreParts | None = None,
    ) -> None:
        """Create a cache without sessions.

        `pinned_quota_pages`: pages of the largest pool that PINNED sessions may keep from being
        reclaimed; of every other pool the same fraction.
        """
        parts = parts or StoreParts()
        self._empty_stores = partial(KVStores.empty, spec, capacity, parts, changes=Changes())
        self._stores = self._empty_stores()
        self.spec = spec
        self.max_context_len = capacity.max_context_len
        self._empty_quota = partial(PinnedQuota, pinned_quota_pages)
        self._pinned = self._empty_quota(self._stores)
        self._slots: dict[SessionId, SessionSlot] = {}
        self._turns: dict[TurnId, Borrower] = {}
        self.parked = ParkedQueue(self._stores, self._pinned)
        self.tails = Tails(self._stores, self._slots, self.parked)
        self.copies = PageCopies(self._stores, Room(self._stores, self.tails))

    # Sessions

    def open(
        self,
        session_id: SessionId,
        *,
        namespace: Namespace,
        tokens: Sequence[int] | Tokens = (),
        retention: Retention = Retention.RECLAIMABLE,
        tenant_weight: int | None = None,
    ) -> None:
        """Create a cold slot with a history. `tenant_weight`: that of its tenant, from now on.

        Raises:
            SlotExists: the id is taken.
            PinQuotaExceeded: PINNED, and the quota has no room for the history (at least a page).
        """
        if session_id in self._slots:
            raise SlotExists(session_id)
        slot = SessionSlot(session_id, namespace, retention)
        self._check_quota(slot, max(1, len(tokens)))
        slot.tokens.append(tokens)
        self._slots[session_id] = slot
        self._stores.tree.tenants.enter(namespace.tenant, tenant_weight)

    def fork(
        self,
        session_id: SessionId,
        new_id: SessionId,
        *,
        namespace: Namespace,
        retention: Retention = Retention.RECLAIMABLE,
    ) -> None:
        """Open `new_id` with the history of another session, without its running turn.

        Copies the tokens; the pages are shared when the fork's first turn matches them.

        Raises:
            NamespaceMismatch: `namespace` is not that of `session_id`.
            UnknownSession, SlotExists, PinQuotaExceeded: as for `open`.
        """
        slot = self._slot(session_id)
        if slot.namespace != namespace:
            raise NamespaceMismatch(session_id)
        turn = self._turns[slot.borrower] if slot.borrower is not None else None
        history = slot.tokens.copy(0, turn.base_len if turn else slot.history_len)
        self.open(new_id, namespace=namespace, tokens=history, retention=retention)

    def rewind(self, session_id: SessionId, to_len: int) -> None:
        """Cut the history of an idle session. Published pages stay in the tree, to match again.

        Raises:
            SlotBusy: a turn has borrowed it.
            HistoryMismatch: the history is shorter than `to_len`.
        """
        slot = self._slot(session_id)
        slot.check_not_busy()
        slot.check_history_len(to_len)
        self.tails.drop(session_id)
        self._stores.changes.record_session(session_id)
        if slot.lease is not None:
            self._stores.changes.version += 1  # `kept_len` of this session changes
            with self.parked.changing(slot):
                slot.lease.rewind(to_len)
        slot.tokens.truncate(to_len)
        if slot.kv_allocated_len == 0:
            self.cool(session_id)

    def cool(self, session_id: SessionId) -> None:
        """Drop the KV of an idle session and keep its tokens. Its published pages become evictable.

        Raises:
            SlotBusy: a turn has borrowed it.
        """
        slot = self._slot(session_id)
        slot.check_not_busy()
        if slot.lease is None:
            return
        assert (
            slot.tail is not None
            or slot.lease.computed_len - slot.lease.protected_len < self._stores.page_size
        ), "a parked lease has published its whole pages"
        self._stores.changes.record_session(session_id)
        self.parked.remove_cold(slot)
        self.tails.forget(slot)
        slot.lease.release()
        slot.lease = None
        slot.move_to(SlotState.COLD)

    def close(self, session_id: SessionId) -> bool:
        """Remove a session, or mark it CLOSING while a turn has borrowed it. Return whether it is
        removed now; True for an unknown session, so closing twice is harmless.
        """
        slot = self._slots.get(session_id)
        if slot is None:
            return True
        if slot.is_active:
            if slot.state is not SlotState.CLOSING:
                slot.move_to(SlotState.CLOSING)
            return False
        self._remove(slot)
        return True

    # Turns

    def begin_turn(
        self,
        session_id: SessionId,
        turn_id: TurnId,
        *,
        base_len: int,
        new_tokens: Sequence[int] | Tokens,
        max_reuse_len: int | None = None,
    ) -> TurnLoan:
        """Cut the history to `base_len`, append the input and lend the lease.

        A resident session continues from its own KV; a cold one takes a row and locks what the tree
        has of its tokens. Allocates no pages. Leaves at least one token to compute. Repeating the
        call for the same turn changes nothing and returns the same loan.

        With `max_reuse_len`, recompute from this position on, even if its KV is valid.

        Raises:
            UnknownSession, SlotBusy, OutOfRows; HistoryMismatch: it is shorter than `base_len`.
            PinQuotaExceeded: PINNED, and the quota has no room for the context of this turn.
            ValueError: no token at all, or more than a row can address.
        """
        slot = self._slot(session_id)
        if turn_id in self._turns and slot.borrower == turn_id:
            return self._turns[turn_id].loan
        slot.check_not_busy()
        if turn_id in self._turns:
            raise SlotBusy(f"turn {turn_id} has borrowed another session")
        slot.check_history_len(base_len)
        context_len = base_len + len(new_tokens)
        if not 0 < context_len <= self.max_context_len:
            raise ValueError(f"a context of {context_len} tokens does not fit a row")
        self._check_quota(slot, context_len)
        self._stores.changes.record_session(session_id)
        kept_len = slot.common_len(base_len, new_tokens)
        if kept_len == base_len:
            self.tails.drop(session_id)
        if slot.lease is None:
            slot.lease = KVLease(self._stores, slot.namespace)
        else:
            self.parked.remove(slot)
        lease = slot.restore_to_req(turn_id)
        # A forward needs a query, so the last token is never reused.
        reuse_len = min(context_len - 1, context_len if max_reuse_len is None else max_reuse_len)
        if slot.tail is None:
            lease.mark(base_len, reuse_len)
        tail_len = self.tails.take(slot, min(kept_len, reuse_len))
        slot.tokens.truncate(base_len)
        slot.tokens.append(new_tokens)
        writes = lease.extend_match(slot.tokens.view(lease.protected_len, reuse_len))
        loan = TurnLoan(lease, lease.computed_len, tuple(writes), tail_len)
        self._turns[turn_id] = Borrower(slot, lease, base_len, context_len, loan)
        self._stores.changes.turn_version += 1
        self._update_pinned(slot)
        assert lease.computed_len < len(slot.tokens), "one token at least is computed"
        return loan

    def grow(self, turn_id: TurnId, to_len: int, num_drafts: int = 0) -> list[TableWrite]:
        """Allocate pages for positions up to `to_len`, the last `num_drafts` of them drafts. What
        is not free is taken from tails, oldest first; unlocked published pages are evicted before
        a pool is exhausted.

        Raises:
            OutOfPages: a pool has too few free and evictable pages, those of tails included;
                nothing was changed.
        """
        turn = self._changing_turn(turn_id)
        assert to_len <= self.max_context_len, "a row has no entry past the context length"
        if not (missing := turn.lease.missing_pages(to_len, num_drafts)):
            return []
        ledgers = self._stores.ledgers
        self.copies.room.make({ledgers[pool]: count for pool, count in missing.items()})
        writes = turn.lease.grow(to_len, num_drafts)
        self._update_pinned(turn.slot)
        return writes

    def record(
        self, turn_id: TurnId, computed_len: int, new_tokens: Sequence[int] = ()
    ) -> list[TableWrite]:
        """Record a step's outcome: KV is valid up to `computed_len`, and `new_tokens` were sampled.

        Once the prompt is complete its whole pages are published, so that others can match them
        while the turn still runs. Call it only for a forward that has completed and was finite.
        """
        turn = self._changing_turn(turn_id)
        slot, lease = turn.slot, turn.lease
        slot.tokens.append(new_tokens)
        assert lease.computed_len <= computed_len <= lease.capacity_len, "KV grows within its pages"
        assert computed_len <= len(slot.tokens), "KV of a token needs the token"
        lease.advance(computed_len)
        if turn.is_prompt_complete or computed_len < turn.prompt_len:
            return []
        turn.is_prompt_complete = True
        return self._publish(slot, lease)

    def step_together(self, turn_ids: Sequence[TurnId]) -> Lockstep | None:
        """Let turns step together, see `Lockstep`. Return None where a prompt is not complete, and
        where states of a recurrent pool need a page in every step.
        """
        turns = [self._turns[turn_id] for turn_id in turn_ids]
        if self._stores.recurrent is not None or not all(turn.is_prompt_complete for turn in turns):
            return None
        slots = [turn.slot for turn in turns]
        assert [slot.borrower for slot in slots] == list(turn_ids), "a loan is known to both sides"
        return Lockstep(slots, self._stores, headroom=self.headroom, quota=self._pinned)

    def end_turn(self, turn_id: TurnId, keep_len: int) -> list[TableWrite]:
        """Keep the history up to `keep_len`, publish whole pages and park the lease.

        With `keep_len == base_len` the session is as it was before the turn. A CLOSING session is
        removed.
        """
        turn = self._changing_turn(turn_id)
        slot, lease = turn.slot, turn.lease
        assert turn.base_len <= keep_len <= len(slot.tokens), "a turn ends in its own tokens"
        writes = lease.roll_back(keep_len, slot.tokens.view())
        slot.tokens.truncate(keep_len)
        writes += self._publish(slot, lease)
        self._finish(turn_id)
        return writes

    def discard(self, turn_id: TurnId) -> list[TableWrite]:
        """End a turn whose KV cannot be trusted, and restore the session to before it.

        The history is cut to `base_len`; nothing it computed stays, and what it had published is
        removed from the tree unless another session has locked it.
        """
        turn = self._changing_turn(turn_id)
        slot, loan = turn.slot, turn.loan
        to_len = min(turn.base_len, loan.cached_len - loan.tail_len)
        writes = turn.lease.roll_back(to_len, slot.tokens.view())
        slot.tokens.truncate(turn.base_len)
        self._finish(turn_id)
        return writes

    def forget_launches(self, turn_id: TurnId) -> None:
        """Free the states that forwards of a turn would leave which are launched and forgotten."""
        lease = self._changing_turn(turn_id).lease
        lease.states.drop_beyond(lease.computed_len, lease.holder)

    def release_rollback_page(self, turn_id: TurnId) -> bool:
        """Free the page that a running turn keeps only for its rollback, which then ends at a page
        boundary; return whether there was one. The last resort for a turn that needs a page.
        """
        return self._changing_turn(turn_id).lease.release_rollback_page()

    def retract(self, turn_id: TurnId) -> Tokens:
        """Publish and release the KV of a running turn, and commit nothing to the history.

        Return its input and output: what a later `begin_turn` with the same `base_len` appends to
        resume it.
        """
        turn = self._changing_turn(turn_id)
        slot, lease = turn.slot, turn.lease
        # Drop what was grown and not computed, so that whole computed pages are published.
        lease.rewind(lease.computed_len)
        self._publish(slot, lease)
        uncommitted = slot.tokens.copy(turn.base_len)
        slot.tokens.truncate(turn.base_len)
        lease.release()
        slot.lease = None
        self._finish(turn_id)
        return uncommitted

    def quarantine(self, session_id: SessionId) -> None:
        """Move the pages of a session with a violation to quarantine, and keep its tokens.

        A running turn ends, and the history is cut to before it. Published pages that other
        sessions have locked stay in the tree.
        """
        slot = self._slot(session_id)
        if slot.lease is None:
            return
        self.copies.void_out()
        self._stores.changes.record_session(session_id)
        self.parked.remove(slot)
        self.tails.forget(slot)
        slot.lease.quarantine()
        slot.lease = None
        if slot.borrower is not None:
            slot.tokens.truncate(self._turns[slot.borrower].base_len)
            self._finish(slot.borrower)
            return
        slot.move_to(SlotState.COLD)
        self._update_pinned(slot)

    def rebuild(self) -> list[SlotView]:
        """Replace all stores by empty ones, for violations that name no session.

        Histories stay; every turn ends with the history as it was before it, CLOSING sessions are
        removed, all others are cold, and nothing is published. Quarantined pages stay quarantined.
        Return the sessions that had KV, as they were before.
        """
        resident = [view for view in self.slots() if view.state is not SlotState.COLD]
        for turn in self._turns.values():
            turn.slot.tokens.truncate(turn.base_len)
        self._turns.clear()
        self._stores.changes.turn_version += 1
        tenants = self._stores.tree.tenants
        slots = self._slots.items()
        self._slots = {name: slot for name, slot in slots if slot.state is not SlotState.CLOSING}
        for slot in self._slots.values():
            slot.reset()
        self._stores = self._empty_stores(before=self._stores)
        tenants.enter_into(self._stores.tree.tenants, self._slots.values())
        self._pinned = self._empty_quota(self._stores)
        self.parked = ParkedQueue(self._stores, self._pinned)
        self.tails = Tails(self._stores, self._slots, self.parked)
        room, num_begun = Room(self._stores, self.tails), self.copies.num_begun
        self.copies = PageCopies(self._stores, room, num_begun=num_begun)
        return resident

    # Answers

    def __contains__(self, session_id: SessionId) -> bool:
        return session_id in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_rows(self) -> int:
        """Return the number of sessions that can be resident at the same time."""
        return self._stores.rows.num_rows

    @property
    def paged_pools(self) -> tuple[PoolName, ...]:
        """Return the pools of positions, in the order of all counts of pages."""
        return tuple(self._stores.paged)

    @property
    def num_tenants(self) -> int:
        """Return how many tenants have sessions."""
        return self._stores.tree.tenants.num_present

    @property
    def num_turns(self) -> int:
        """Return the number of turns that have borrowed a session."""
        return len(self._turns)

    def peek(self, tokens: Tokens, namespace: Namespace) -> MatchResult:
        """Return what a cold turn with these tokens would match in the tree. Changes nothing."""
        return self._stores.tree.match_prefix(namespace, tokens[: max(0, len(tokens) - 1)])

    def is_current(self, match: MatchResult) -> bool:
        """Return whether `peek` would give the same match again. O(edges of the match)."""
        return self._stores.tree.is_current(match)

    @property
    def match_version(self) -> int:
        """Return a number that changes whenever any `peek`, or `kept_len` of any idle session, may
        give another answer."""
        return self._stores.changes.version

    def kept_len(
        self, session_id: SessionId, base_len: int, new_tokens: Tokens, max_len: int
    ) -> int:
        """Return the position, at most `max_len`, that a turn of a parked session would continue
        from, with `new_tokens` behind the first `base_len` tokens of its history."""
        slot = self._slot(session_id)
        to_len = min(slot.common_len(base_len, new_tokens), max_len)
        return slot.lease.rewound_len(to_len) if slot.lease is not None else 0

    def headroom(self) -> Headroom:
        """Return the pages and rows that could be handed out now. O(pools)."""
        return Headroom.of(self._stores, self.tails.num_pages, self.parked.guarded_pages())

    def shares(self, tenant: str) -> TenantShare:
        """Return what a tenant has of the memory now. O(1)."""
        return TenantShare(tenant, self._stores, is_guarding=self.parked.is_guarding)

    def turn_limits(self, num_ahead: int) -> TurnLimits:
        """Return what one turn may take of the pools, if `num_ahead` positions may be launched
        and not settled."""
        return TurnLimits.of(self._stores, self._pinned, self.max_context_len, num_ahead=num_ahead)

    def is_balanced(self) -> bool:
        """Return whether the accounts of every pool sum to its pages: level 0 of the memory check.
        O(pools)."""
        return all(ledger.is_balanced() for ledger in self._stores.ledgers.values())

    def accounts(self) -> dict[PoolName, Accounts]:
        """Return the accounts of every pool, for reports."""
        return {pool: ledger.snapshot() for pool, ledger in self._stores.ledgers.items()}

    def slot(self, session_id: SessionId) -> SlotView:
        """Return one session as it is now; raise `UnknownSession` if there is none."""
        return SlotView.of(self._slot(session_id), self._stores.ledgers)

    def slots(self) -> Iterator[SlotView]:
        """Yield all sessions; O(sessions), for reports."""
        return (SlotView.of(slot, self._stores.ledgers) for slot in self._slots.values())

    def tokens(self, session_id: SessionId, start: int = 0, end: int | None = None) -> Tokens:
        """Return a copy of [start, end) of a session's tokens, including a running turn's."""
        return self._slot(session_id).tokens.copy(start, end)

    def inspect(self) -> CacheParts:
        """Return the parts of this cache, for `cache.checker` and tests. Serving code uses the
        verbs and views above."""
        return CacheParts(self._stores, self._slots)

    def flush(self) -> None:
        """Cool every session and evict the whole tree.

        Raises:
            SlotBusy: a turn is running; nothing was changed.
        """
        if self._turns:
            raise SlotBusy(f"{len(self._turns)} turns are running")
        for slot in self._slots.values():
            self.cool(slot.session_id)
        for pool, ledger in self._stores.ledgers.items():
            self._stores.evict(pool, ledger.num_evictable)

    # Private

    def _slot(self, session_id: SessionId) -> SessionSlot:
        slot = self._slots.get(session_id)
        if slot is None:
            raise UnknownSession(session_id)
        return slot

    def _changing_turn(self, turn_id: TurnId) -> Borrower:
        turn = self._turns.get(turn_id)
        if turn is None:
            raise UnknownSession(f"turn {turn_id} has borrowed no session")
        assert turn.slot.borrower == turn_id, "a loan is known to both sides"
        self._stores.changes.record_session(turn.slot.session_id)
        self._stores.changes.turn_version += 1
        return turn

    def _publish(self, slot: SessionSlot, lease: KVLease) -> list[TableWrite]:
        return lease.publish(slot.tokens.view(lease.protected_len, lease.computed_len))

    def _finish(self, turn_id: TurnId) -> None:
        """End a turn's loan: every way a turn ends comes here."""
        slot = self._turns.pop(turn_id).slot
        self._stores.changes.turn_version += 1
        if slot.state is SlotState.CLOSING:
            self._remove(slot)
            return
        if slot.lease is not None and slot.lease.num_pages == 0:
            # No page is left, so a parked lease would only occupy a row.
            slot.lease.release()
            slot.lease = None
        slot.end_loan()
        if slot.lease is not None:
            self.parked.add(slot)
        self._update_pinned(slot)

    def _remove(self, slot: SessionSlot) -> None:
        self._stores.changes.record_session(slot.session_id)
        if slot.lease is not None:
            self.parked.remove(slot)
            self.tails.forget(slot)
            slot.lease.release()
            slot.lease = None
        self._update_pinned(slot)
        del self._slots[slot.session_id]
        self._stores.tree.tenants.leave(slot.namespace.tenant)

    def _check_quota(self, slot: SessionSlot, num_tokens: int) -> None:
        if slot.retention is Retention.PINNED:
            num_pages = pages_for(num_tokens, self._stores.page_size)
            self._pinned.check_room(slot.session_id, num_pages)

    def _update_pinned(self, slot: SessionSlot) -> None:
        if slot.retention is Retention.PINNED:
            num_pages = slot.lease.num_pages if slot.lease else None
            self._pinned.set_row_pages(slot.session_id, num_pages)
