"""Define the limits of sessions and owners, and count against them. Every limit has a name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from session_server.core.errors import ContextTooLong, QuotaExceeded, ServerBusy
from session_server.core.owner import Owner
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import TurnRequest
from session_server.sessions.budget import OwnerBudget
from session_server.sessions.ended_turns import RECORD_BYTES
from session_server.sessions.footprint import (
    input_bytes,
    max_score_bytes,
    request_bytes,
    token_bytes,
)
from session_server.sessions.journal import JournalLimits
from session_server.sessions.prompt import Prompt
from session_server.sessions.rates import OwnerRate
from session_server.sessions.session import Session
from session_server.sessions.turn import SessionTurn
from session_server.text.tokenizer import LONG_TEXT_CHARS

MAX_SPARED: Final = 64
"""Sessions that close to make room for one other, or for one turn."""

MAX_UNLOADED: Final = 1024
"""Sessions that leave the memory, and stay on disk, to make room for one other, or for one turn."""

KEPT_DIVISOR: Final = 4
"""Records of one kind take one of so many parts of the bytes of conversations at most."""

_ANY: Final = 1 << 62
"""More than all owners can hold together."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bound what one session may hold. Times are in seconds, sizes in characters.

    `max_queued_turns` wait behind a running turn. Inputs above `inline_input_chars` are tokenized
    off the event loop, for at most `tokenize_deadline_s`, after waiting at most `tokenize_wait_s`
    for their owner's turn. `allows_pinned`: whether the server keeps
    KV memory for pinned sessions. `stored_ttl_s`: of sessions on disk, None: as of all others.
    `replica_tag`: what the random part of the ids begins with that sessions are given here.
    """

    default_ttl_s: float = 900.0
    stored_ttl_s: float | None = None
    max_ttl_s: float = 7 * 86_400.0
    max_queued_turns: int = 4
    max_input_chars: int = 4 << 20
    max_messages: int = 4096
    max_tools: int = 128
    max_metadata: int = 16
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    inline_input_chars: int = LONG_TEXT_CHARS
    tokenize_deadline_s: float = 30.0
    tokenize_wait_s: float = 60.0
    allows_pinned: bool = True
    replica_tag: str = ""
    journal: JournalLimits = field(default_factory=JournalLimits)

    def ttl_s(self, *, is_stored: bool) -> float:
        """Return how long an idle session lives whose client does not say."""
        if is_stored and self.stored_ttl_s is not None:
            return self.stored_ttl_s
        return self.default_ttl_s


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Bound what the server holds in total, and each owner beyond its share of that.

    `sessions` counts those in memory, `turns` unfinished ones. `history_bytes` bounds
    conversations: tokens, texts, metadata, records of ended turns. `turn_bytes` bounds unfinished
    turns: inputs, prompts, answers, scores.
    `replay_bytes` bounds all journals together, whoever owns them; `store_bytes` what is on disk.
    `owner_input_tokens_per_min` counts new input tokens of accepted turns, as a bucket that refills
    steadily and holds one minute's worth; None does not limit the rate.
    """

    sessions: int = 10_000
    turns: int = 4096
    history_bytes: int = 2 << 30
    turn_bytes: int = 1 << 30
    replay_bytes: int = 1 << 30
    store_bytes: int = 1 << 36
    owner_sessions: int | None = 1024
    owner_turns: int | None = 1024
    owner_input_tokens_per_min: int | None = None


class MakeRoom(Protocol):
    """Close or unload one session that can be spared, the owner's or also another's."""

    def __call__(self, owner: Owner, *, of_others: bool) -> bool:
        """Return whether there was one."""
        ...


def _spare_none(owner: Owner, *, of_others: bool) -> bool:
    return False


@dataclass(slots=True)
class RoomMakers:
    """Hold what makes room: `unload` takes a session out of the memory, each of `close` closes
    one, and `delete` one that is on disk alone."""

    unload: MakeRoom = _spare_none
    close: list[MakeRoom] = field(default_factory=list)
    delete: MakeRoom = _spare_none


class Quotas:
    """Count everything that is limited per owner."""

    def __init__(self, limits: QuotaLimits) -> None:
        self.sessions = OwnerBudget("sessions", limits.sessions, owner_limit=limits.owner_sessions)
        """Sessions in memory."""

        self.owned_sessions = OwnerBudget(
            "sessions", _ANY, limit_of=lambda owner: owner.limits.max_sessions
        )
        """All sessions, those that are on disk alone among them."""

        self.turns = OwnerBudget("unfinished turns", limits.turns, owner_limit=limits.owner_turns)
        self.history_bytes = OwnerBudget(
            "bytes of conversations",
            limits.history_bytes,
            limit_of=lambda owner: _left(owner.limits.max_bytes, self.turn_bytes, owner),
        )
        self.turn_bytes = OwnerBudget(
            "bytes of unfinished turns",
            limits.turn_bytes,
            limit_of=lambda owner: _left(owner.limits.max_bytes, self.history_bytes, owner),
        )
        self.stored_bytes = OwnerBudget("bytes in the store", limits.store_bytes)
        self.kv_tokens = OwnerBudget(
            "tokens of KV", _ANY, limit_of=lambda owner: owner.limits.max_kv_tokens
        )
        self.openings: set[Session] = set()
        """Sessions that are counted and not open yet."""
        self.input_rate = OwnerRate(
            "input tokens",
            limits.owner_input_tokens_per_min,
            rate_of=lambda owner: owner.limits.input_tokens_per_min,
        )
        self.turn_rate = OwnerRate("turns", None, rate_of=lambda owner: owner.limits.turns_per_min)
        self.output_rate = OwnerRate(
            "output tokens", None, rate_of=lambda owner: owner.limits.output_tokens_per_min
        )
        self.room_makers = RoomMakers()

    def budget_of(self, records: str) -> OwnerBudget:
        """Return a budget for the bytes of records of one kind."""
        return OwnerBudget(f"bytes of {records}", self.history_bytes.limit // KEPT_DIVISOR)

    def check_session(self, owner: Owner, num_bytes: int) -> None:
        """Reject a session beyond the limit, or one that starts with more bytes than there is room
        for. Raises QuotaExceeded, ServerBusy."""
        self._check(self.owned_sessions, owner, 1)
        self._check(self.sessions, owner, 1)
        self._check(self.history_bytes, owner, num_bytes)

    def check_growth(self, owner: Owner, num_bytes: int) -> None:
        """Reject bytes that conversations have no room for. Raises QuotaExceeded, ServerBusy."""
        self._check(self.history_bytes, owner, num_bytes)

    def take_session(self, session: Session) -> None:
        """Count a session about to open, and the bytes it keeps. Raises QuotaExceeded, ServerBusy,
        with nothing counted."""
        self.check_session(session.owner, session.num_bytes)
        self.sessions.take(session.owner)
        self.owned_sessions.take(session.owner)
        self.recount(session)

    def load_session(self, session: Session) -> None:
        """Count a session that comes from the disk, where its owner had it already, and the bytes
        it keeps. Raises QuotaExceeded, ServerBusy, with nothing counted."""
        self._check(self.sessions, session.owner, 1)
        self._check(self.history_bytes, session.owner, session.num_bytes)
        self.sessions.take(session.owner)
        self.recount(session)

    @contextlib.contextmanager
    def opening(self, session: Session) -> Iterator[None]:
        """Count a session during the block, while its first messages are measured. Raises
        QuotaExceeded, ServerBusy, with nothing counted."""
        self.take_session(session)
        self.openings.add(session)
        try:
            yield
        finally:
            self.openings.remove(session)
            self.release_session(session)

    def recount(self, session: Session) -> None:
        """Update the counted bytes of an open session."""
        num_bytes = session.num_bytes
        self.history_bytes.add(session.owner, num_bytes - session.counted_bytes)
        session.counted_bytes = num_bytes

    def release_session(self, session: Session) -> None:
        """Stop counting a session that has closed."""
        self.owned_sessions.add(session.owner, -1)
        self.unload_session(session)

    def unload_session(self, session: Session) -> None:
        """Stop counting what a session keeps in memory; its owner has it still."""
        self.sessions.add(session.owner, -1)
        self.history_bytes.add(session.owner, -session.counted_bytes)
        session.counted_bytes = 0
        self.hold_kv(session, 0)

    def check_turn(self, owner: Owner, request: TurnRequest) -> None:
        """Reject a turn beyond the limit, or one whose input does not fit beside all others. Raises
        QuotaExceeded, ServerBusy."""
        self.turns.check(owner, 1)
        self.turn_bytes.check(owner, request_bytes(request))
        self._check(self.history_bytes, owner, input_bytes(request.input) + RECORD_BYTES)

    def take_turn(self, owner: Owner, turn: SessionTurn) -> None:
        """Count a turn that `check_turn` allows, from the moment it waits."""
        self.turns.take(owner)
        self.add_turn_bytes(owner, turn, request_bytes(turn.request))

    def add_turn_bytes(self, owner: Owner, turn: SessionTurn, num_bytes: int) -> None:
        """Count further bytes of an unfinished turn."""
        self.turn_bytes.add(owner, num_bytes)
        turn.held_bytes += num_bytes

    def reserve(
        self,
        session: Session,
        turn: SessionTurn,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        now_s: float,
    ) -> None:
        """Count the prompt of a turn about to run, all scores that it asks for, and the bytes that
        its input and record will add to the conversation; and, however often it is sent to the
        engine, once the tokens of its input.

        Scores can take a thousand times the bytes of their tokens, so they are counted before the
        first one is computed. `sampling` is clipped to the context. Raises QuotaExceeded,
        ServerBusy, ContextTooLong, with nothing counted.
        """
        num_bytes = token_bytes(len(prompt.tokens)) + max_score_bytes(sampling, prompt.context_len)
        growth = session.transcript.growth(prompt, turn.request.turn_id) + RECORD_BYTES
        with self.turn_bytes.held(session.owner, num_bytes):  # both count against `max_bytes`
            self._check(self.history_bytes, session.owner, growth)
        num_tokens = prompt.context_len + sampling.max_tokens
        self.check_kv(session, num_tokens)
        if not turn.is_charged:
            # Turns that waited behind this one's predecessor have written since it was accepted.
            self.output_rate.check(session.owner, 1, now_s=now_s)
            self.input_rate.charge(session.owner, len(prompt.tokens), now_s=now_s)
            turn.is_charged = True
        self.history_bytes.take(session.owner, growth)
        self.hold_kv(session, num_tokens)
        turn.reserved_bytes = growth
        self.add_turn_bytes(session.owner, turn, num_bytes)

    def check_kv(self, session: Session, num_tokens: int) -> None:
        """Reject tokens of KV that there is no room for in place of those that the session holds.
        Raises QuotaExceeded; ContextTooLong, where they are more than the owner may ever hold."""
        owner = session.owner
        limit = owner.limits.max_kv_tokens
        if limit is not None and num_tokens > limit and not owner.is_exempt:
            raise ContextTooLong(
                f"with its answer this would be {num_tokens:,} tokens of KV, and you may hold "
                f"{limit:,}: send less, or ask for fewer tokens",
                param="input",
            )
        self.kv_tokens.check(owner, max(0, num_tokens - session.copy.counted_tokens))

    def hold_kv(self, session: Session, num_tokens: int) -> None:
        """Count the tokens of KV that a session holds from now on."""
        self.kv_tokens.add(session.owner, num_tokens - session.copy.counted_tokens)
        session.copy.counted_tokens = num_tokens

    def rest_kv(self, session: Session) -> None:
        """Count the tokens of KV that a session holds while no turn of it runs."""
        self.hold_kv(session, len(session.transcript) if session.copy.state == "resident" else 0)

    def start_turn(self, owner: Owner, *, now_s: float) -> None:
        """Count a new turn against the rates of its owner. Raises QuotaExceeded, with nothing
        counted."""
        self.output_rate.check(owner, 1, now_s=now_s)
        self.turn_rate.charge(owner, 1, now_s=now_s)

    def drop_paid(self, now_s: float) -> bool:
        """Forget a slice of the owners that owe nothing; return whether there may be more."""
        rates = (self.input_rate, self.turn_rate, self.output_rate)
        return any(rate.drop_paid(now_s) for rate in rates)

    def release(self, session: Session, turn: SessionTurn) -> None:
        """Undo `reserve`, because the turn waits again."""
        self.rest_kv(session)
        self.add_turn_bytes(session.owner, turn, request_bytes(turn.request) - turn.held_bytes)
        self.history_bytes.add(session.owner, -turn.reserved_bytes)
        turn.reserved_bytes = 0

    def release_turn(self, owner: Owner, turn: SessionTurn) -> None:
        """Stop counting a turn that has ended or was rejected."""
        self.turns.add(owner, -1)
        self.turn_bytes.add(owner, -turn.held_bytes)
        self.history_bytes.add(owner, -turn.reserved_bytes)
        turn.held_bytes = turn.reserved_bytes = 0

    def _check(self, budget: OwnerBudget, owner: Owner, amount: int) -> None:
        """Reject what there is no room for, after sessions that can be spared have left the memory,
        or have closed. Raises QuotaExceeded, ServerBusy."""
        if budget.has_room_for(owner, amount):
            if budget is self.owned_sessions:  # an owner has as many wherever they are
                make, most = self.room_makers.delete, MAX_SPARED
            else:
                make, most = self.room_makers.unload, MAX_UNLOADED
            self._make_room(budget, owner, amount, make=make, most=most)
            self._make_room(budget, owner, amount, make=self._close_spared, most=MAX_SPARED)
        budget.check(owner, amount)

    @staticmethod
    def _make_room(
        budget: OwnerBudget, owner: Owner, amount: int, *, make: MakeRoom, most: int
    ) -> None:
        """Call `make` until there is room for an amount, or it finds nothing to spare."""
        for _ in range(most):
            try:
                return budget.check(owner, amount)
            except QuotaExceeded:
                of_others = False
            except ServerBusy:
                of_others = True
            if not make(owner, of_others=of_others):
                break
        return None

    def _close_spared(self, owner: Owner, *, of_others: bool) -> bool:
        return any(make(owner, of_others=of_others) for make in self.room_makers.close)

    def holds(self, owner: Owner) -> bool:
        """Return whether anything is kept for an owner: sessions, records, turns."""
        budgets = (self.owned_sessions, self.turns, self.history_bytes, self.turn_bytes)
        return any(budget.held_by(owner) for budget in budgets)

    @property
    def owners(self) -> frozenset[Owner]:
        """Return the owners for whom anything is counted."""
        budgets = (self.owned_sessions, self.turns, self.history_bytes, self.turn_bytes)
        held: frozenset[Owner] = frozenset()
        rates = (self.input_rate, self.turn_rate, self.output_rate)
        return held.union(*(each.owners for each in (*budgets, *rates)))


def _left(limit: int | None, other: OwnerBudget, owner: Owner) -> int | None:
    """Return what is left of a limit beside what another budget counts."""
    return None if limit is None else limit - other.held_by(owner)
