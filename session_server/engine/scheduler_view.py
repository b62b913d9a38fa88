"""What the planner sees: protocols and frozen values, read-only.

Tests pass frozen fakes. The engine passes its view of live turns and the live cache
(`engine.view`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

import msgspec

from cache.types import SessionId, TurnId
from session_server.engine.shortage import PoolPages, ReclaimableSession, ReclaimableTotal


class BlockReason(enum.Enum):
    """Say why the first waiting turn still waits."""

    TURNS = "turns"
    TOKENS = "tokens"
    PAGES = "pages"
    SHORTAGE = "shortage"
    """Turns that run already are short of pages."""


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Bound one forward.

    `num_tokens`: prefill tokens. `num_turns`: turns that run at a time. `page_size`: positions per
    page.
    """

    num_tokens: int
    num_turns: int
    page_size: int


FLOOD_FORWARDS: Final = 8
"""Forwards filled beyond a share that begin a flood, if there are sessions of several tenants. So a
long prompt on a server that has little to do is computed as fast as by a tenant alone."""


class Load(msgspec.Struct, frozen=True, gc=False):
    """Say what the plans before found, where there are sessions of several tenants.

    `num_full`: forwards that tenants filled beyond a share, one less for each that they did not,
    from 0 to `FLOOD_FORWARDS`. `has_postponed`: the last forward went to tenants behind the others
    alone.
    """

    num_full: int = 0
    has_postponed: bool = False

    @property
    def is_flood(self) -> bool:
        """Return whether forwards are to be short, and none planned behind one in flight."""
        return self.num_full == FLOOD_FORWARDS


class RunningTurn(Protocol):
    """Describe a turn that borrows its session's KV."""

    @property
    def turn_id(self) -> TurnId: ...

    @property
    def tenant(self) -> str:
        """Return whose turn it is."""

    @property
    def num_uncomputed(self) -> int:
        """Return the positions that can be launched now; those in flight count as done."""

    @property
    def num_drafts(self) -> int:
        """Return the drafts it could verify too; 0 unless a single position is uncomputed."""

    @property
    def num_spare(self) -> int:
        """Return the positions that its pages can still take."""

    @property
    def held_pages(self) -> PoolPages:
        """Return the pages that retracting it makes free or evictable; a lower bound."""

    @property
    def promised_pages(self) -> PoolPages:
        """Return the pages it still takes until nothing is uncomputed.

        In a pool of bounded size, where it gives pages back as it proceeds, this is less than its
        positions fill.
        """


class AdmissionQuote(msgspec.Struct, frozen=True, gc=False):
    """Say what admitting a waiting turn costs.

    `num_uncomputed`: positions to compute before its next token. `context_pages`: pages it takes
    soon, but never past its last position, and evictable pages that its match would lock, which are
    headroom too. `needs_row`: whether it needs a free row. `own_pages`: pages that cooling its own
    idle session would free, which is no help to it; None if that session is not counted in
    `SchedulerView.idle_total`.
    """

    num_uncomputed: int
    context_pages: PoolPages
    needs_row: bool
    own_pages: PoolPages | None = None


class WaitingTurn(Protocol):
    """Describe a turn that holds no KV."""

    @property
    def turn_id(self) -> TurnId: ...

    @property
    def session_id(self) -> SessionId: ...

    @property
    def tenant(self) -> str:
        """Return whose turn it is."""

    @property
    def times_bypassed(self) -> int:
        """Return how many turns behind it were admitted while it waited for pages."""

    @property
    def reserved_pages(self) -> PoolPages:
        """Return the pages that other tenants lack of their minimums, and that it leaves free while
        other turns run."""

    def quote(self) -> AdmissionQuote:
        """Return what its admission costs now; may match the whole history of a cold session."""


class SchedulerView(Protocol):
    """Describe the turns and the memory that a plan decides about."""

    @property
    def running(self) -> Sequence[RunningTurn]:
        """Return running turns, oldest first."""

    @property
    def waiting(self) -> Iterable[WaitingTurn]:
        """Return waiting turns, in order of admission."""

    @property
    def is_shared(self) -> bool:
        """Return whether there are sessions of several tenants."""

    def served(self, tenant: str) -> int:
        """Return the tokens a tenant counts as served; of several the least comes first."""

    def lag(self, tenant: str) -> int:
        """Return how many tokens a tenant is behind who was served most."""

    @property
    def load(self) -> Load:
        """Return what the plan before found; see `StepPlan.load`."""

    @property
    def known_denial(self) -> tuple[TurnId, BlockReason] | None:
        """Return the blocked turn and the reason that an earlier plan found, if they still hold.

        That plan had `StepPlan.is_denial`, and nothing that it depended on has become better since.
        It says nothing while a running turn lacks more than one position.
        """

    @property
    def idle(self) -> Iterator[ReclaimableSession]:
        """Return reclaimable sessions, least recently used first; read only as far as needed."""

    @property
    def idle_total(self) -> ReclaimableTotal:
        """Return what all of `idle` would free, without asking each of them."""

    @property
    def headroom_pages(self) -> PoolPages:
        """Return the free and evictable pages of each pool."""

    @property
    def num_free_rows(self) -> int: ...

    @property
    def is_in_flight(self) -> bool:
        """Return whether a forward is in flight, so that pages may yet come back."""
