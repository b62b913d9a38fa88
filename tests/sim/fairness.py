"""Nobody waits in vain, nobody is overtaken out of turn: looked at after every step."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from cache.types import TurnId, pages_for
from session_server.core.batch import Batch
from session_server.core.events import EngineEvent, SessionCooled, TurnFailed, TurnStarted
from session_server.engine.engine import Engine, StepOutcome
from session_server.engine.plan_admission import KEPT_PLACES
from session_server.engine.scheduler_view import FLOOD_FORWARDS
from session_server.engine.shares import MAX_SHARES, share_len
from session_server.engine.turn import Turn, TurnState
from tests.cache.headroom import headroom
from tests.sim.failure import Broken, Layer
from tests.sim.hand_engine import Sizes
from tests.sim.history import EngineHistory
from tests.sim.service import ServiceWatch
from tests.sim.watched_cache import WatchedCache

PLENTY: Final = 2
"""Pages left over for each turn, beyond all it can ever need, before we speak of plenty."""

PATIENCE: Final = 3
"""Forwards in a row with tokens left over that the first of the line may have to see."""


class FairnessWatch:
    """Knows nothing of how plans are made. It finds a turn left behind although there was plenty
    of everything, and lines that are out of order.
    """

    def __init__(
        self,
        engine: Engine,
        cache: WatchedCache,
        sizes: Sizes,
        history: EngineHistory,
    ) -> None:
        """`history`: what the engine was told and has said, of this step too."""
        self._counters = engine.counters
        parts = engine.inspect()
        self._scheduler, self._settler = parts.scheduler, parts.settler
        self._in_flight = parts.in_flight
        self._drafts: Container[TurnId] = history.drafts
        self._service = ServiceWatch(history.turns)
        self._cache = cache
        self._sizes = sizes
        self._num_hindrances = 0
        self._num_waits = 0
        self._num_retries = 0
        self._num_passed = 0

    def check(self, outcome: StepOutcome) -> None:
        """After a step.

        Raises:
            Broken: somebody waits without a reason, or in the wrong place.
        """
        scheduler, counters = self._scheduler, self._counters
        lines: dict[str, list[Turn]] = {}
        for turn in scheduler.waiting:
            lines.setdefault(turn.request.tenant, []).append(turn)
        for line in (*lines.values(), list(scheduler.running)):
            orders = [turn.order for turn in line]
            if orders != sorted(orders):
                raise Broken(Layer.LIVENESS, f"out of order: {[turn.turn_id for turn in line]}")
        self._service.count(outcome.events)
        self._service.check(line[0] for line in lines.values())
        self._cache.reached["tenants wait for each other"] += len(lines) > 1
        # A promise of pages that could not be kept, an injected shortage, a turn retracted or
        # refused: what was planned was not done, and the next plan makes up for it.
        num_hindrances = counters.shortfalls + counters.retractions
        is_hindered, self._num_hindrances = num_hindrances > self._num_hindrances, num_hindrances
        is_hindered |= any(isinstance(event, TurnFailed) for event in outcome.events)
        batch = outcome.batch
        if not self._settler.retry_alone:
            self._num_retries = 0
        if batch is None or not batch.rows:
            return
        oldest = next(iter(scheduler.running), None)
        if oldest is not None and any(row.turn_id == oldest.turn_id for row in batch.rows):
            self._num_passed = 0  # whatever became of the others
        if is_hindered:
            return
        self._check_drafts(batch)
        if self._settler.retry_alone:
            self._check_retry()
            return
        self._check_running(batch, outcome.events)
        started = {event.turn_id for event in outcome.events if isinstance(event, TurnStarted)}
        if started:
            self._count_rotation(started)
            self._check_passers(batch, started)
        else:
            self._check_first(
                batch, outcome.events
            )  # nobody before it has taken what it was to have

    def _check_drafts(self, batch: Batch) -> None:
        """Chunks of drafts have what turns leave. A forward with turns has a share of them, and
        none while a turn waits; there is one without turns only while there is no turn at all and
        nothing is in flight, so a turn that comes then waits for it alone.
        """
        chunks = [row for row in batch.rows if row.turn_id in self._drafts]
        if not chunks:
            return
        num_tokens = sum(row.num_tokens for row in chunks)
        if len(chunks) == len(batch.rows):
            is_fair = not self._scheduler and len(self._in_flight) == 1
            is_fair &= num_tokens <= self._sizes.chunk_tokens
        else:
            is_fair = not self._scheduler.waiting
            is_fair &= num_tokens <= share_len(self._sizes.chunk_tokens)
        if not is_fair:
            raise Broken(Layer.LIVENESS, f"turns wait for drafts: {batch.rows}")
        launched = {row.turn_id for row in batch.rows}
        left = [turn for turn in self._scheduler.running if turn.turn_id not in launched]
        needed = sum(self._pages_to_come(turn) for turn in self._scheduler.running)
        is_short = min(self._cache.headroom().pages) < needed
        if any(turn.num_uncomputed for turn in left) and not is_short:
            raise Broken(Layer.LIVENESS, f"drafts take the place of {left[0].turn_id}")

    def _check_retry(self) -> None:
        """Each turn of a forward that failed is tried alone once, then all go on together."""
        self._num_retries += 1
        if self._num_retries > self._sizes.max_running:
            raise Broken(Layer.LIVENESS, f"{self._num_retries} forwards of one turn in a row")

    def _count_rotation(self, started: set[TurnId]) -> None:
        """A turn that came later went first, because its tenant was served less."""
        running = [turn for turn in self._scheduler.running if turn.turn_id in started]
        first = {turn.request.tenant: turn.order for turn in reversed(running)}
        self._cache.reached["another tenant went first"] += any(
            turn.request.tenant != tenant and turn.order < order
            for turn in self._scheduler.waiting
            for tenant, order in first.items()
        )

    def _check_passers(self, batch: Batch, started: set[TurnId]) -> None:
        """Where nothing runs the first of the line comes first: what it waits for comes to it, and
        would not if others took it. Whoever was to run may be waiting for a copy of its KV, and
        whoever found the tokens of this forward given to shorter ones has those of the next.
        """
        is_full = sum(row.num_tokens for row in batch.rows) >= self._sizes.chunk_tokens
        if self._waits_for_copy or (is_full and self._cache.num_tenants > 1):
            return
        waiting, running = self._scheduler.waiting, self._scheduler.running
        if all(turn.turn_id in started for turn in running):
            first = next(iter(waiting), running[0])
            # One of another tenant may have come first: then something did run.
            is_of_one = all(turn.request.tenant == first.request.tenant for turn in running)
            if is_of_one and first.order < running[0].order:
                raise Broken(Layer.LIVENESS, f"{started} passed {first.turn_id}")

    def _check_running(self, batch: Batch, events: Sequence[EngineEvent]) -> None:
        """The oldest turn is in every forward, and so is whoever lacks one position, if pages are
        free. What a cooling frees beyond its promise is for the next one. In a flood the oldest may
        be left out of one forward, for tenants that are behind, and not of two in a row.
        """
        launched = {row.turn_id for row in batch.rows}
        has_cooled = any(isinstance(event, SessionCooled) for event in events)
        has_pages = not has_cooled and self._free_pages() > 0
        for rank, turn in enumerate(self._scheduler.running):
            num_missing = 0 if turn.turn_id in launched else turn.num_uncomputed
            if rank == 0:
                is_left_out = num_missing > 1 and self._is_flooded
                self._num_passed = self._num_passed + 1 if is_left_out else 0
                self._cache.reached["left out for a tenant behind"] += is_left_out
                if self._num_passed == 1:
                    continue
            if num_missing and (rank == 0 or (num_missing == 1 and has_pages)):
                raise Broken(Layer.LIVENESS, f"{turn.turn_id} was passed over")

    def _check_first(self, batch: Batch, events: Sequence[EngineEvent]) -> None:
        """The first of the line is admitted while there are places, rows and pages in plenty: one
        that fits into a share at once, or with the next forward if a cooling made room in this
        step, as after a copy that has ended; another one soon after tokens are left over.
        """
        scheduler, sizes = self._scheduler, self._sizes
        if self._waits_for_copy:
            return  # what it was to have may come of that
        is_shared = self._cache.num_tenants > 1
        num_kept = sizes.max_running // KEPT_PLACES if is_shared else 0
        if not scheduler.waiting or len(scheduler.running) >= sizes.max_running - num_kept:
            return
        first = next(iter(scheduler.waiting))
        needed = sum(self._pages_to_come(turn) for turn in scheduler.running)
        needed += pages_for(first.max_computed_len, sizes.page_size) + PLENTY
        needed += max(self._cache.shares(first.request.tenant).reserved_pages)
        if self._free_pages() < needed or headroom(self._cache).usable_rows <= 0:
            return
        # In a flood those that are not behind have a share together, two where nobody is.
        num_tokens = share_len(sizes.chunk_tokens) if self._is_flooded else sizes.chunk_tokens
        num_left = num_tokens - sum(row.num_tokens for row in batch.rows)
        self._num_waits = self._num_waits + 1 if num_left >= first.known_len else 0
        # The oldest that runs has the first share; all but the tiniest forward have a second one.
        # Where there are several tenants, one's turns share what it has.
        is_alone = not is_shared and sizes.chunk_tokens > 1
        is_alone &= not any(isinstance(event, SessionCooled) for event in events)
        has_share = is_alone and first.known_len <= share_len(sizes.chunk_tokens)
        if has_share or self._num_waits > PATIENCE:
            raise Broken(Layer.LIVENESS, f"{first.turn_id} waits beside plenty of everything")

    @property
    def _is_flooded(self) -> bool:
        """Whether the last plan may have been made in a flood; it counts one up or down."""
        is_shared = self._cache.num_tenants > 1 and self._sizes.chunk_tokens >= MAX_SHARES
        return is_shared and self._scheduler.waiting.load.num_full >= FLOOD_FORWARDS - 1

    @property
    def _waits_for_copy(self) -> bool:
        """Whether pages are on their way, or a turn has given up its place for them, if only until
        their files are found."""
        turns = self._scheduler._turns.values()
        is_restoring = any(turn.state is TurnState.RESTORING for turn in turns)
        return is_restoring or self._cache.copies.num_under_way > 0

    def _free_pages(self) -> int:
        """Of positions: a row comes with its states."""
        return min(self._cache.accounts()[pool].free for pool in self._cache.paged_pools)

    def _pages_to_come(self, turn: Turn) -> int:
        held = turn.current_admission.loan.capacity_len
        missing = pages_for(max(0, turn.max_computed_len - held), self._sizes.page_size)
        return missing + PLENTY
