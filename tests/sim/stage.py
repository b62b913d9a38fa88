"""One engine and its device on a stage: every step is watched, and checked when it is over."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, Final

import numpy as np

from cache.checker import Violation, find_violations
from cache.errors import AuditFailed
from cache.recount import Recount
from cache.types import SessionId
from session_server.core.batch import StepResult
from session_server.core.commands import EngineCommand
from session_server.core.events import EngineEvent, FinishReason, TurnFailed, TurnFinished
from session_server.engine.engine import StepOutcome
from tests.cache.headroom import headroom
from tests.sim.carrier import EchoCarrier
from tests.sim.context import SimContext
from tests.sim.device import ContentMismatch, EchoRunner, Faults
from tests.sim.echo import EchoModel
from tests.sim.failure import Broken, Layer
from tests.sim.fairness import FairnessWatch
from tests.sim.faults import DEVICE_SITES, DOUBT_SITES, Site
from tests.sim.hand_engine import HandEngine
from tests.sim.history import Bounds, EngineHistory
from tests.sim.story import StepRecord
from tests.sim.tier_watch import TierWatch
from tests.sim.watched_cache import WatchedCache

PROBE_INTERVAL_S: Final = 0.3
"""Work between two probes, by the virtual clock: a few in every run."""

STEPS_PER_SLICE: Final = 8
UNITS_PER_SLICE: Final = 6
"""A recount is made in slices of so many visits, with so many steps between two of them."""

MAX_DOUBTS: Final = 4
"""Times that memory is said to be wrong in one engine's life, which ends after eight."""

COPY_WEIGHT: Final = 16
"""Times that memory may be found wrong at a moment at which a copy is on its way in."""

MAX_IDLE_STEPS: Final = 64
"""Steps in a row that may promise more without launching anything."""


class Stage(HandEngine):
    """An engine whose every step is watched: accounts and touched sessions after every step, all
    pages every `audit_every` steps, and every event. What does not hold raises `Broken`.
    """

    device: EchoRunner
    cache: WatchedCache

    def __init__(self, context: SimContext, model: EchoModel) -> None:
        sizes = context.config.sizes
        cache = WatchedCache(sizes, strikes=context.faults.strikes, reached=context.reached)
        settings = sizes.settings(model, probe_interval_s=PROBE_INTERVAL_S)
        self._context = context
        self._model = model
        self._num_idle = self._num_rebuilds = 0
        self.skipped_s = 0.0
        self._doubt_told: Site | None = None
        super().__init__(cache, settings, Stage._watched_device)
        self._watch_carrier()
        self.tiers = TierWatch(self.engine, self.cache, self._carrier, sizes.layers.mixture)
        self._recount = Recount(self.cache)
        self._fairness = FairnessWatch(self.engine, self.cache, sizes, self.history)

    @property
    def rest_budget(self) -> int:
        """Steps within which everything live has to end, retractions and all."""
        num_live = len(self.history.live) + len(self.history.drafts.owed)
        num_pages = (
            sum(each.allocated_len for each in self.cache.slots()) // self.cache.spec.page_size
        )
        num_copies = num_pages if self.settings.tiers.host_bytes else 0
        return 100 + 12 * self.engine.max_turn_len * num_live + 4 * num_copies

    def execute(self) -> None:
        """See `HandEngine.execute`."""
        try:
            super().execute()
        except ContentMismatch as error:
            raise Broken(Layer.CONTENT, str(error)) from error

    def step(
        self, now_s: float, commands: Sequence[EngineCommand], results: Sequence[StepResult]
    ) -> StepOutcome:
        """See `HandEngine.step`; everything is checked after it."""
        history = self.history
        self.tiers.told(commands)
        history.told(commands, has_results=bool(results))
        if self._doubt_told is not None:
            history.doubt()
        outcome: StepOutcome | None = None
        try:
            outcome = super().step(now_s, commands, results)
        except AuditFailed as error:
            raise Broken(Layer.LEDGER, str(error)) from error
        finally:
            if self._context.story is not None:
                self._context.story.step(self._record(commands, results, outcome))
        if self._doubt_told is not None:
            self.tiers.doubt(self._doubt_told)
            self._doubt_told = None
        history.heard(outcome.events)
        self._check_memory(outcome.events)
        self.tiers.check(outcome.orders)
        self._fairness.check(outcome)
        self._note_progress(outcome, is_news=bool(commands or results))
        for event in outcome.events:
            if isinstance(event, TurnFinished | TurnFailed):
                self._leave_device(event)
        return outcome

    def draw_fault(self) -> dict[str, Any]:
        """What goes wrong with the forward that the device carries out next, if anything, as
        fields of the operation that is to `inject` it."""
        batch = self.device.next_batch()
        sites = self._memory_sites() if self.settings.tiers.host_bytes else ()
        if batch is not None and batch.rows:
            sites += DEVICE_SITES
        struck = [site for site in sites if self._context.faults.strikes(site)]
        if not struck:
            return {}
        return {"fault": struck[-1].value, "which": self._context.draws.below("which row", 8)}

    def inject(self, fault: str, which: int) -> None:
        """Let the forward that the device carries out next go wrong: all of it ("device_raise"),
        or one of its rows, now ("device_nan") or until its turn ends ("device_poison"). Or let
        memory be found wrong with the next step, where nothing else would show it.
        """
        if fault == Site.EVICTION:
            self.history.reached["fault eviction"] += 1
            self.cache.evict_all()
            return
        if fault in DOUBT_SITES:
            self._doubt(Site(fault), which)
            return
        device, turns = self.device, self.history.live
        batch = device.next_batch()
        if batch is None or not batch.rows:
            return
        self.history.reached[f"fault {fault}"] += 1
        turn_id = batch.rows[which % len(batch.rows)].turn_id
        if fault == "device_nan":
            device.faults.nan_turns.add(turn_id)
            if turn_id in turns:
                turns[turn_id].faults.add("numerical_error")
            return
        if fault == "device_raise":
            device.faults.fail_steps.add(batch.step)
        else:
            device.faults.poison_turns.add(turn_id)
        # Who meets a failed forward twice fails; a poisonous turn may meet everybody.
        for turn in turns.values():
            turn.faults.add("device_failed")

    def _memory_sites(self) -> tuple[Site, ...]:
        """What can happen to memory now. It is found wrong in the middle of a copy more often than
        it would be by chance."""
        ledgers = self.cache.inspect().stores.ledgers.values()
        sites = (Site.EVICTION,) if any(ledger.num_evictable for ledger in ledgers) else ()
        if self._num_doubts >= MAX_DOUBTS or not self._resident_sessions():
            return sites
        transits = self.cache.inspect().stores.transits.values()
        num_asked = COPY_WEIGHT if any(each.is_incoming for each in transits) else 1
        return sites + DOUBT_SITES * num_asked

    @property
    def _num_doubts(self) -> int:
        guard = self.engine.inspect().guard
        return guard.num_rebuilds + len(guard.quarantined) + (self._doubt_told is not None)

    def _resident_sessions(self) -> list[SessionId]:
        return [each.session_id for each in self.cache.slots() if each.allocated_len]

    def _doubt(self, fault: Site, which: int) -> None:
        history, watch = self.history, self.engine.inspect().watch
        resident = self._resident_sessions()
        if self._num_doubts >= MAX_DOUBTS or not resident:
            return
        history.reached[f"fault {fault}"] += 1
        if fault is Site.REBUILD:
            watch.note_failure(AuditFailed("injected"))
        else:
            session_id = resident[which % len(resident)]
            watch.note_content([Violation("injected", session_id)])
        self._doubt_told = fault

    def calm(self) -> None:
        """No more faults, and copies wait no longer than forwards do."""
        self._context.faults.calm()
        # What has failed already is told with its result.
        self.device.faults = Faults(refused_alone=self.device.faults.refused_alone)

    def audit(self) -> None:
        """Recount every page."""
        if violations := find_violations(self.cache, 2):
            raise Broken(Layer.AUDIT, "; ".join(violation.text for violation in violations))

    def check_empty(self) -> None:
        """Everything is as it was before the first command. Call it when all is closed and the
        tree was flushed."""
        self.audit()
        counters, accounts = self.engine.counters, self.cache.accounts().values()
        self.history.reached["overshoot"] += counters.overshoots
        self.history.reached["shortfall"] += counters.shortfalls
        left = {
            "pages": sum(a.pages - 1 - a.free - a.quarantine for a in accounts),
            "rows": self._context.config.sizes.num_rows - headroom(self.cache).free_rows,
            "sessions": len(self.cache),
            "turns": len(self.history.live),
            "namespaces": len(list(self.cache.inspect().stores.tree.roots())),
            "launches": self.num_launched,
            "segments": len(self.engine.inspect().tiers.store.tree),
        }
        if any(left.values()):
            raise Broken(Layer.AUDIT, f"not given back: {left}")

    def _watched_device(self) -> EchoRunner:
        """Return a device that compares what it reads with the shadow of the engine's history."""
        sizes, stores = self._context.config.sizes, self.cache.inspect().stores
        bounds = Bounds(self.engine.max_turn_len, bool(stores.bounded), stores.page_size)
        reached = self._context.reached
        self.history = EngineHistory(self.settings, self._model, bounds, reached)
        device = sizes.device(self._model, self.history.salt_of, truth_of=self.history.truth_of)
        device.reached = reached
        return device

    def _watch_carrier(self) -> None:
        """Let copies wait, fail as the configuration says, and find what an earlier engine has
        written."""
        carrier = self._carrier
        carrier.at_once = False
        carrier.disk = self._context.disk
        carrier.fails = self._strikes_copy

    @property
    def _carrier(self) -> EchoCarrier:
        assert self.carrier is not None, "the echo device has one"
        return self.carrier

    def _strikes_copy(self, site: Site) -> bool:
        does_strike = self._context.faults.strikes(site)
        self.history.reached[f"fault {site.value}"] += does_strike
        return does_strike

    def _record(
        self,
        commands: Sequence[EngineCommand],
        results: Sequence[StepResult],
        outcome: StepOutcome | None,
    ) -> StepRecord:
        return StepRecord(
            number=self.num_steps,
            results=results,
            commands=commands,
            batch=outcome.batch if outcome is not None else None,
            accounts=next(iter(self.cache.accounts().values())),
            events=outcome.events if outcome is not None else (),
        )

    def _check_memory(self, events: Sequence[EngineEvent]) -> None:
        cache = self.cache
        for ledger in cache.inspect().stores.ledgers.values():
            if not ledger.is_balanced():
                raise Broken(Layer.LEDGER, f"the accounts do not sum: {ledger.snapshot()}")
        if cache.touched or self.history.drafts.dropped:
            for session_id in cache.touched:
                if violations := find_violations(cache, 1, session_id):
                    text = "; ".join(violation.text for violation in violations)
                    raise Broken(Layer.PAIR, text)
            self._check_at_rest(cache.touched.keys() | self.history.drafts.dropped)
            cache.touched.clear()
        num_rebuilds = self.engine.inspect().guard.num_rebuilds
        if num_rebuilds > self._num_rebuilds:
            self._num_rebuilds = num_rebuilds
            self._recount.stop()
            self._recount = Recount(cache)
        for event in events:
            if isinstance(event, TurnFinished | TurnFailed) and event.session_id in cache:
                self._check_held(event)
        if self.num_steps % STEPS_PER_SLICE == 0:
            self._recount_some()
        if self.num_steps % self._context.config.audit_every == 0:
            self.audit()

    def _check_at_rest(self, session_ids: Set[SessionId]) -> None:
        """Only drafts leave tails, and none takes KV from the history before it."""
        slots = {s: self.cache.slot(s) for s in session_ids if s in self.cache}
        borrowed = {s for s, slot in slots.items() if slot.borrower is not None}
        tails = self.cache.inspect().slots
        self.history.drafts.check_tails({s for s in slots.keys() - borrowed if tails[s].tail})
        for session_id in slots.keys() - borrowed:
            session = self.history.sessions.get(session_id)
            if session is None or session.live is not None:
                continue
            num_lost = session.resident_len - slots[session_id].committed_len
            if num_lost > 0:
                raise Broken(Layer.SHADOW, f"{session_id}: a draft took {num_lost} positions")

    def _recount_some(self) -> None:
        """Go on with a recount in slices, beside all that sessions do meanwhile."""
        if self._recount.advance(UNITS_PER_SLICE):
            self._recount.stop()
            if violations := self._recount.violations:
                texts = "; ".join(violation.text for violation in violations)
                raise Broken(Layer.AUDIT, f"in slices: {texts}")
            self._context.reached["recount beside changes"] += self._recount.has_seen_changes
            self._recount = Recount(self.cache)

    def _check_held(self, event: TurnFinished | TurnFailed) -> None:
        """The engine's copy of the history is what the turn's end says. Behind it is what a turn
        that never ran was going to cut off, and nothing otherwise. Its KV is there, and can be
        found by others.
        """
        session = self.history.sessions[event.session_id]
        turn = self.history.turns[event.turn_id]
        if session.live is not None or turn.session is not session:
            return
        held = session.held
        num_compared = None if turn.num_starts else len(held)
        copy = self.cache.tokens(event.session_id, 0, num_compared)
        if tuple(copy.tolist()) != held:
            raise Broken(Layer.SHADOW, f"{event}: the engine holds {copy}, not {held}")
        slot = self.cache.slot(event.session_id)
        if slot.committed_len < session.resident_len:
            num_lost = session.resident_len - slot.committed_len
            raise Broken(Layer.SHADOW, f"{event}: KV of {num_lost} positions was let go")
        if not turn.num_starts or session.resident_len < len(held) - 1:
            return
        if isinstance(event, TurnFailed) or slot.protected_len < event.cached_tokens:
            return  # what an earlier cut left before this turn may be too little for others
        found = self.cache.peek(np.array((*held, 0), np.int32), slot.namespace)
        if found.matched_len < slot.protected_len:
            num_found = f"{found.matched_len} of {slot.protected_len} positions"
            raise Broken(Layer.SHADOW, f"{event}: others can go on from {num_found} published")

    def _leave_device(self, event: TurnFinished | TurnFailed) -> None:
        """A turn that has said all it may has nothing launched behind that, and one that the device
        has refused was tried alone before it was given up.
        """
        device, turn_id = self.device, event.turn_id
        device.faults.nan_turns.discard(turn_id)
        device.faults.poison_turns.discard(turn_id)
        if isinstance(event, TurnFailed):
            if event.code == "device_failed" and turn_id not in device.faults.refused_alone:
                raise Broken(Layer.SHADOW, f"{event}, and it never failed alone")
        elif event.reason is FinishReason.LENGTH and device.is_queued(turn_id):
            raise Broken(Layer.SHADOW, f"{event}, and more of it is launched")

    def _note_progress(self, outcome: StepOutcome, *, is_news: bool) -> None:
        waiting = self.history.live or self.history.drafts.owed
        if self.is_blocked and not self.num_launched and waiting:
            raise Broken(Layer.LIVENESS, f"nothing moves, and waits: {sorted(waiting)}")
        is_idle = not (is_news or outcome.batch or outcome.is_blocked)
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if self._num_idle > MAX_IDLE_STEPS:
            raise Broken(Layer.LIVENESS, f"{MAX_IDLE_STEPS} steps launched nothing and went on")
