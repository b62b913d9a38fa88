"""What a plan is made from: the world as the planner sees it, read-only.

Everything here is a protocol or a frozen value. Tests pass frozen fakes; the engine passes its
window on live turns and the live cache (`engine.view`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from cache.types import SessionId, TurnId
from session_server.engine.shortage import PoolPages, ReclaimableSession, ReclaimableTotal


class BlockReason(enum.Enum):
    """Why the first waiting turn still waits."""

    TURNS = "turns"
    TOKENS = "tokens"
    PAGES = "pages"
    SHORTAGE = "shortage"
    """Of pages, for turns that run already."""


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Bounds of one forward.

    `num_tokens`: prefill tokens. `num_turns`: turns that run at a time. `page_size`: positions of a
    page.
    """

    num_tokens: int
    num_turns: int
    page_size: int


class RunningTurn(Protocol):
    """A turn that borrows its session's KV."""

    @property
    def turn_id(self) -> TurnId: ...

    @property
    def num_uncomputed(self) -> int:
        """Positions that could be launched now, those in flight counted as done."""
        ...

    @property
    def num_drafts(self) -> int:
        """Drafts that it could verify too; 0 unless a single position is uncomputed."""
        ...

    @property
    def num_spare(self) -> int:
        """Positions that pages already held can still take."""
        ...

    @property
    def held_pages(self) -> PoolPages:
        """Pages that retracting it makes free or evictable; a lower bound."""
        ...

    @property
    def promised_pages(self) -> PoolPages:
        """Pages it still takes until nothing is uncomputed. Less than its positions fill in a pool
        where it gives pages back as it goes."""
        ...


class AdmissionQuote(msgspec.Struct, frozen=True, gc=False):
    """What admitting a waiting turn would cost.

    `num_uncomputed`: positions to compute before its next token. `context_pages`: what it needs
    before long, but never past its last position: pages it will take, and evictable pages that its
    match would lock, which is headroom spent. `own_pages`: what cooling its own idle session would
    give back, which is no help to it; None if that is not counted in `SchedulerView.idle_total`.
    """

    num_uncomputed: int
    context_pages: PoolPages
    needs_row: bool
    own_pages: PoolPages | None = None


class WaitingTurn(Protocol):
    """A turn that holds nothing."""

    @property
    def turn_id(self) -> TurnId: ...

    @property
    def session_id(self) -> SessionId: ...

    @property
    def times_bypassed(self) -> int:
        """Turns behind it that were admitted while it waited for pages."""
        ...

    def quote(self) -> AdmissionQuote:
        """Price of admission now; may match the whole history of a cold session."""
        ...


class SchedulerView(Protocol):
    """The world as the planner sees it."""

    @property
    def running(self) -> Sequence[RunningTurn]:
        """Oldest first."""
        ...

    @property
    def waiting(self) -> Iterable[WaitingTurn]:
        """In order of admission."""
        ...

    @property
    def known_denial(self) -> tuple[TurnId, BlockReason] | None:
        """Who is blocked, and why, if a plan with `StepPlan.is_denial` found so and nothing that
        this depended on has become better since. It says nothing while a running turn lacks more
        than one position.
        """
        ...

    @property
    def idle(self) -> Iterator[ReclaimableSession]:
        """Least recently used first; consumed only as far as needed."""
        ...

    @property
    def idle_total(self) -> ReclaimableTotal:
        """What all of `idle` would give back, without asking each of them."""
        ...

    @property
    def headroom_pages(self) -> PoolPages:
        """Free and evictable pages."""
        ...

    @property
    def num_free_rows(self) -> int: ...

    @property
    def is_in_flight(self) -> bool:
        """Whether some launch is not settled, so that pages may still come back by themselves."""
        ...
