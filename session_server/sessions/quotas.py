"""Bounds of sessions and shares of owners. Every number has a bound and every bound a name."""

from __future__ import annotations

from dataclasses import dataclass, field

from session_server.core.errors import QuotaExceeded, ServerBusy
from session_server.core.owner import Owner
from session_server.sessions.journal import JournalLimits
from session_server.text.tokenizer import LONG_TEXT_CHARS

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What one session may hold. Times in seconds, sizes in characters.

    `max_queued_turns` wait behind a running turn. `max_kept_turns` ended turns answer for their
    id again. Inputs above `inline_input_chars` are tokenised off the event loop, for at most
    `tokenize_deadline_s`.
    """

    default_ttl_s: float = 900.0
    max_ttl_s: float = 7 * 86_400.0
    max_queued_turns: int = 4
    max_kept_turns: int = 16
    max_input_chars: int = 4 << 20
    max_messages: int = 1024
    max_metadata: int = 16
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    inline_input_chars: int = LONG_TEXT_CHARS
    tokenize_deadline_s: float = 30.0
    journal: JournalLimits = field(default_factory=JournalLimits)


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """What the server and one owner may hold. None means without bound of its own.

    `owner_turns` counts turns that have not ended. `owner_input_tokens_per_min` counts new input
    tokens of accepted turns, as a bucket that refills steadily and holds one minute's worth.
    """

    sessions: int = 10_000
    turns: int = 4096
    owner_sessions: int = 1024
    owner_turns: int = 1024
    owner_input_tokens_per_min: int | None = None


@dataclass(slots=True)
class _Share:
    """What one owner uses now. `debt`: input tokens not yet refilled at `paid_at_s`."""

    sessions: int = 0
    turns: int = 0
    debt: float = 0.0
    paid_at_s: float = 0.0


class Quotas:
    """Counts per owner: `take_*` counts or refuses, `give_*` undoes. Unused owners cost nothing."""

    def __init__(self, limits: QuotaLimits) -> None:
        self._limits = limits
        self._shares: dict[Owner, _Share] = {}
        self._sessions = 0
        self._turns = 0

    def take_session(self, owner: Owner) -> None:
        """Count one more session.

        Raises:
            ServerBusy: the server holds as many as it may.
            QuotaExceeded: the owner does.
        """
        if self._sessions >= self._limits.sessions:
            raise ServerBusy(f"the server holds {self._sessions} sessions, its maximum")
        share = self._shares.setdefault(owner, _Share())
        if share.sessions >= self._limits.owner_sessions:
            raise QuotaExceeded(f"{share.sessions} sessions are open, the maximum")
        share.sessions += 1
        self._sessions += 1

    def give_session(self, owner: Owner) -> None:
        """Count one session less."""
        share = self._shares[owner]
        assert share.sessions > 0, "a session was given back twice"
        share.sessions -= 1
        self._sessions -= 1
        self._forget_unused(owner)

    def take_turn(self, owner: Owner) -> None:
        """Count one more unfinished turn.

        Raises:
            ServerBusy: the server holds as many as it may.
            QuotaExceeded: the owner does.
        """
        if self._turns >= self._limits.turns:
            raise ServerBusy(f"{self._turns} turns are waiting or running, the maximum")
        share = self._shares.setdefault(owner, _Share())
        if share.turns >= self._limits.owner_turns:
            raise QuotaExceeded(f"{share.turns} turns are waiting or running, the maximum")
        share.turns += 1
        self._turns += 1

    def give_turn(self, owner: Owner) -> None:
        """Count one unfinished turn less."""
        share = self._shares[owner]
        assert share.turns > 0, "a turn was given back twice"
        share.turns -= 1
        self._turns -= 1
        self._forget_unused(owner)

    def charge_input(self, owner: Owner, num_tokens: int, *, now_s: float) -> None:
        """Count new input tokens against the owner's rate.

        A full bucket lets one turn of any size through, so that a turn larger than a minute's
        worth is slow and not impossible.

        Raises:
            QuotaExceeded: earlier turns have used up the rate; nothing was counted.
        """
        rate = self._limits.owner_input_tokens_per_min
        if rate is None:
            return
        share = self._shares.setdefault(owner, _Share())
        self._refill(share, rate, now_s)
        if share.debt > 0 and share.debt + num_tokens > rate:
            raise QuotaExceeded(f"{rate} input tokens per minute are used up")
        share.debt += num_tokens

    def forget_idle(self, now_s: float) -> None:
        """Drop owners that hold nothing and whose rate is whole again."""
        rate = self._limits.owner_input_tokens_per_min or 0
        for owner, share in list(self._shares.items()):
            self._refill(share, rate, now_s)
            self._forget_unused(owner)

    def _refill(self, share: _Share, rate: int, now_s: float) -> None:
        elapsed_s = max(0.0, now_s - share.paid_at_s)
        share.debt = max(0.0, share.debt - elapsed_s * rate / _MINUTE_S)
        share.paid_at_s = now_s

    def _forget_unused(self, owner: Owner) -> None:
        share = self._shares[owner]
        if share.sessions == 0 and share.turns == 0 and share.debt == 0.0:
            del self._shares[owner]
