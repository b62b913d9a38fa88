"""Frozen views for the planner: what it is told, by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cache.types import SessionId, TurnId, pages_for
from session_server.engine.plan import StepPlan
from session_server.engine.scheduler_view import AdmissionQuote, BlockReason, Limits, Load
from session_server.engine.shortage import PoolPages, ReclaimableTotal, add_pages


@dataclass(frozen=True)
class FakeRunning:
    turn_id: TurnId
    num_uncomputed: int
    num_spare: int = 0
    held_pages: PoolPages = (0,)
    promised_pages: PoolPages = (0,)
    num_drafts: int = 0
    tenant: str = ""


@dataclass(frozen=True)
class FakeWaiting:
    turn_id: TurnId
    session_id: SessionId
    price: AdmissionQuote
    times_bypassed: int = 0
    tenant: str = ""
    reserved_pages: PoolPages = (0,)

    def quote(self) -> AdmissionQuote:
        return self.price


@dataclass(frozen=True)
class FakeIdle:
    session_id: SessionId
    freed_pages: PoolPages


@dataclass(frozen=True)
class FakeView:
    running: tuple[FakeRunning, ...] = ()
    waiting: tuple[FakeWaiting, ...] = ()
    idle_sessions: tuple[FakeIdle, ...] = ()
    headroom_pages: PoolPages = (0,)
    num_free_rows: int = 8
    is_in_flight: bool = False
    known_denial: tuple[TurnId, BlockReason] | None = None
    is_shared: bool = False
    load: Load = field(default_factory=Load)
    served_tokens: Mapping[str, int] = field(default_factory=dict)

    def served(self, tenant: str) -> int:
        return self.served_tokens.get(tenant, 0)

    def lag(self, tenant: str) -> int:
        return max(self.served_tokens.values(), default=0) - self.served(tenant)

    @property
    def idle_total(self) -> ReclaimableTotal:
        nothing = (0,) * len(self.headroom_pages)
        freed = (session.freed_pages for session in self.idle_sessions)
        return ReclaimableTotal(len(self.idle_sessions), add_pages(nothing, freed))

    @property
    def idle(self) -> Iterator[FakeIdle]:
        return iter(self.idle_sessions)


LIMITS = Limits(num_tokens=16, num_turns=8, page_size=4)


def running(name: str, num_uncomputed: int, spare: int = 0, held: int = 0) -> FakeRunning:
    promised = pages_for(max(0, num_uncomputed - spare), LIMITS.page_size)
    return FakeRunning(TurnId(name), num_uncomputed, spare, (held,), (promised,))


def waiting(name: str, num_uncomputed: int, *, context: int | None = None) -> FakeWaiting:
    room = num_uncomputed if context is None else context
    return in_line(name, num_uncomputed, (pages_for(room, LIMITS.page_size),))


def in_line(name: str, num_uncomputed: int, pages: PoolPages) -> FakeWaiting:
    quote = AdmissionQuote(num_uncomputed, pages, needs_row=True)
    return FakeWaiting(TurnId(name), SessionId(f"of {name}"), quote)


def work_of(plan: StepPlan) -> dict[str, int]:
    return {work.turn_id: work.num_tokens for work in plan.work}
