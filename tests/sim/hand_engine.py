"""One engine stepped by hand: every test without a real device or a clock drives this one.

A step plans and launches; a forward is carried out when its result is asked for, and nothing else
moves. The device is the echo device (`device`), or any other that waits to be asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import msgspec

from cache.session_cache import SessionAwareCache
from cache.spec import Capacity
from cache.stores import StoreParts
from cache.types import SessionId, TurnId
from session_server.core.batch import Batch, CompileRequest, CompileResult, Runner, StepResult
from session_server.core.commands import DraftInput, EngineCommand, OpenSession, SubmitTurn
from session_server.core.events import EngineReady
from session_server.engine.config import (
    Drafter,
    EngineConfig,
    MemoryCheck,
    MemoryPolicy,
    Speculation,
    TierPolicy,
)
from session_server.engine.engine import Engine, StepOutcome
from tests.cache.free_lists import FREE_LISTS, Allocation
from tests.sim.carrier import EchoCarrier
from tests.sim.device import EchoRunner
from tests.sim.echo import EchoModel, Truth
from tests.sim.layers import Layers


@dataclass(frozen=True, slots=True)
class Sizes:
    """The engine. `num_pages` does not count the padding page; lengths are tokens.

    `draft_skill`: how often in a thousand the draft model is right. `num_repeats`: see
    `EchoModel`.
    """

    layers: Layers = field(default_factory=Layers)
    page_size: int = 4
    num_pages: int = 64
    num_rows: int = 16
    max_context_len: int = 256
    chunk_tokens: int = 16
    max_running: int = 8
    max_waiting: int = 1024
    num_in_flight: int = 2
    num_drafts: int = 0
    drafter: Drafter = Drafter.NGRAM
    draft_skill: int = 700
    num_repeats: int = 0
    pinned_quota_pages: int = 0
    allocation: Allocation = "extent"
    memory_check: MemoryCheck = MemoryCheck.STRICT
    share_prefixes: bool = True
    retract_interval: int = 0
    host_kv_bytes: int = 0
    disk_kv_bytes: int = 0
    segment_pages: int = 64
    drain_s: float = 10.0
    is_disk_shared: bool = False

    @property
    def capacity(self) -> Capacity:
        """Return the pages of each pool and the rows."""
        return self.layers.capacity(
            self.num_pages, self.num_rows, self.max_context_len, self.num_drafts
        )

    @property
    def model(self) -> EchoModel:
        """Return the fake model of these layers, over its own small vocabulary."""
        return EchoModel(num_repeats=self.num_repeats, window=self.layers.read_window)

    def settings(self, model: EchoModel, *, probe_interval_s: float = 10.0) -> EngineConfig:
        """Return the settings of an engine of these sizes."""
        return EngineConfig(
            model_fingerprint="echo",
            vocab_size=model.vocab_size,
            eos_token_ids=model.alphabet[:1],
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            chunk_tokens=self.chunk_tokens,
            num_in_flight=self.num_in_flight,
            memory=MemoryPolicy(self.memory_check, probe_interval_s),
            speculation=Speculation(self.num_drafts, self.drafter),
            retract_interval=self.retract_interval,
            tiers=TierPolicy(
                self.host_kv_bytes,
                self.disk_kv_bytes,
                self.segment_pages
                * sum(self.layers.spec(self.page_size).pool_bytes_per_page.values()),
                self.drain_s,
                is_shared=self.is_disk_shared,
            ),
        )

    def device(
        self,
        model: EchoModel,
        salt_of: Callable[[TurnId], str],
        *,
        truth_of: Callable[[TurnId], Truth] | None = None,
    ) -> EchoRunner:
        """Return the echo device of an engine of these sizes."""
        capacity = self.capacity
        return EchoRunner(
            self.layers.shapes(capacity, self.page_size),
            salt_of=salt_of,
            num_states=capacity.num_states,
            model=model,
            truth_of=truth_of,
            draft_skill=self.draft_skill,
        )


@dataclass(frozen=True, slots=True)
class FakeGrammar:
    """A compiled grammar that allows everything."""

    text: str

    @property
    def num_tokens(self) -> int:
        """Return no mask."""
        return 0


class HandCompiler:
    """Compiles grammars for the next step; where it is not `at_once`, when told to."""

    def __init__(self) -> None:
        self.at_once = True
        self.asked: list[CompileRequest] = []
        self.done: list[CompileResult] = []

    def ask(self, requests: Iterable[CompileRequest]) -> None:
        """Take requests."""
        self.asked += requests
        if self.at_once:
            self.compile_all()

    def compile_all(self) -> None:
        """Compile what was asked for."""
        self.done += [
            CompileResult(request.turn_id, FakeGrammar(request.grammar.text))
            for request in self.asked
        ]
        self.asked.clear()

    def take(self) -> list[CompileResult]:
        """Return what was compiled since it was asked last."""
        done, self.done = self.done, []
        return done


class Device(Protocol):
    """Carries out forwards strictly in order, when told to."""

    def __len__(self) -> int: ...

    def launch(self, batch: Batch) -> None:
        """Queue a forward."""
        ...

    def execute(self) -> StepResult:
        """Carry out the oldest forward."""
        ...


class LateDevice:
    """A real runner as a device: it computes a forward when asked for its result.

    `batch` is the forward that it computes now, or computed last.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._queue: deque[Batch] = deque()
        self.batch: Batch | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def launch(self, batch: Batch) -> None:
        """See `Device`."""
        self._queue.append(batch)

    def execute(self) -> StepResult:
        """See `Device`."""
        self.batch = self._queue.popleft()
        return self._runner.launch(self.batch).wait()


class HandEngine:
    """An engine, its cache and its device.

    Attributes:
        is_blocked: whether another step without news would launch nothing.
        num_steps: steps so far.
        batches: everything launched so far.
        grammars: what it asked to be compiled.
        carrier: what copies KV out of its pools; None where its device is a real one.
    """

    def __init__(
        self,
        cache: SessionAwareCache,
        settings: EngineConfig,
        make_device: Callable[[Self], Device],
    ) -> None:
        self.cache = cache
        self.settings = settings
        self.engine = Engine(cache, settings)
        self.is_blocked = True
        self.num_steps = 0
        self.batches: list[Batch] = []
        self.grammars = HandCompiler()
        self._salts: dict[SessionId, str] = {}
        self._sessions: dict[TurnId, SessionId] = {}
        self._results: deque[StepResult] = deque()
        self.device = make_device(self)
        self.carrier: EchoCarrier | None = None
        if isinstance(self.device, EchoRunner):
            self.carrier = EchoCarrier(self.device, cache.spec.page_size)

    @classmethod
    def of(
        cls, sizes: Sizes, *, model: EchoModel | None = None, probe_interval_s: float = 10.0
    ) -> Self:
        """Return an engine of these sizes on the echo device."""
        model = model or sizes.model
        cache = SessionAwareCache(
            sizes.layers.spec(sizes.page_size),
            sizes.capacity,
            pinned_quota_pages=sizes.pinned_quota_pages,
            parts=StoreParts(FREE_LISTS[sizes.allocation]),
        )
        settings = sizes.settings(model, probe_interval_s=probe_interval_s)
        return cls(cache, settings, lambda this: sizes.device(model, this.salt_of))

    def salt_of(self, turn_id: TurnId) -> str:
        """Return the tenant's salt of a turn that was submitted."""
        return self._salts[self._sessions[turn_id]]

    def session_of(self, turn_id: TurnId) -> SessionId:
        """Return the session of a turn that was submitted."""
        return self._sessions[turn_id]

    @property
    def num_launched(self) -> int:
        """Forwards, and copies of KV, that the engine has not been told the result of."""
        num_copies = 0 if self.carrier is None else len(self.carrier)
        return len(self.device) + len(self._results) + num_copies

    def execute(self) -> None:
        """Carry out the oldest forward; its result comes when it is asked for."""
        self._results.append(self.device.execute())
        if isinstance(self.device, EchoRunner):
            assert self.device.num_samplers <= self.settings.max_running, "the others have ended"

    def take_results(self, num_results: int) -> list[StepResult]:
        """Return results of the oldest forwards, which are carried out now if need be. Without any
        the copies that wait are carried out, of which the next step is told."""
        while len(self._results) < num_results and len(self.device):
            self.execute()
        if num_results and not self._results and self.carrier is not None:
            self.carrier.carry_all()
        count = min(num_results, len(self._results))
        return [self._results.popleft() for _ in range(count)]

    def step(
        self, now_s: float, commands: Sequence[EngineCommand], results: Sequence[StepResult]
    ) -> StepOutcome:
        """Take one step; what it launches waits for `execute`."""
        self.num_steps += 1
        for command in commands:
            match command:
                case OpenSession(session_id=session_id, tenant_salt=salt):
                    self._salts[session_id] = salt
                case SubmitTurn(session_id=session_id, turn_id=turn_id):
                    self._sessions[turn_id] = session_id
                case DraftInput(session_id=session_id, draft_id=draft_id):
                    self._sessions[draft_id] = session_id
                case _:
                    pass
        copied = [] if self.carrier is None else self.carrier.take()
        outcome = self.engine.step(now_s, commands, results, self.grammars.take(), copied=copied)
        self.grammars.ask(outcome.to_compile)
        if self.carrier is not None:
            self.carrier.ask(outcome.orders)
        if outcome.batch is not None:
            self.batches.append(outcome.batch)
            self.device.launch(outcome.batch)
        has_copied = self.carrier is not None and self.carrier.has_results
        self.is_blocked = outcome.is_blocked and not (self.grammars.done or has_copied)
        return msgspec.structs.replace(outcome, is_blocked=self.is_blocked)

    def ready(self, epoch: int) -> EngineReady:
        """Return what the engine says of itself when it comes up."""
        stores, tiers = self.cache.inspect().stores, self.settings.tiers
        return EngineReady(
            epoch=epoch,
            max_turn_len=self.engine.max_turn_len,
            vocab_size=self.settings.vocab_size,
            eos_token_ids=self.settings.eos_token_ids,
            page_size=stores.page_size,
            num_pages=max(ledger.num_pages for ledger in stores.ledgers.values()),
            device="echo",
            dtype="none",
            backend="echo",
            kv_tiers="disk" if tiers.disk_bytes else "host" if tiers.host_bytes else "none",
        )
