"""One engine with an echo runner, driven by hand: the stage of the engine's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.session_cache import SessionAwareCache
from cache.types import PoolName, SessionId, TableWrite, TurnId
from session_server.core.batch import Batch, StepResult
from session_server.core.commands import (
    CloseSession,
    EngineCommand,
    FlushCache,
    OpenSession,
    SubmitTurn,
)
from session_server.core.events import (
    EngineEvent,
    EngineStats,
    PromptScored,
    TokensProduced,
    TurnFailed,
    TurnFinished,
    TurnStarted,
)
from session_server.core.sampling import SamplingParams, TokenLogprob
from session_server.engine.engine import Engine, StepOutcome
from session_server.engine.settings import (
    EngineSettings,
    MemoryCheck,
    MemoryPolicy,
    Speculation,
)
from tests.cache.headroom import headroom
from tests.sim.device import EchoRunner
from tests.sim.echo import EOS, VOCAB_SIZE, EchoModel, replay
from tests.sim.layers import Layers

POOL = PoolName("full")


@dataclass(frozen=True)
class Stage:
    """Sizes of one bench. `num_pages` does not count the padding page; `vocab_size` bounds inputs,

    answers are below `VOCAB_SIZE`.
    """

    num_pages: int = 64
    page_size: int = 4
    num_rows: int = 16
    max_context_len: int = 256
    chunk_tokens: int = 16
    max_running: int = 8
    num_in_flight: int = 2
    max_waiting: int = 1024
    vocab_size: int = VOCAB_SIZE
    pinned_quota_pages: int = 0
    layers: Layers = field(default_factory=Layers)
    speculation: Speculation = field(default_factory=Speculation)
    memory_check: MemoryCheck = MemoryCheck.STRICT
    probe_interval_s: float = 10.0


@dataclass
class Seen:
    """What the server side has heard of one turn."""

    tokens: list[int] = field(default_factory=list)
    starts: list[TurnStarted] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    end: TurnFinished | TurnFailed | None = None


class CountingCache(SessionAwareCache):
    """Counts what a test cannot see from outside: rows re-pointed to pages the tree had."""

    num_repoints = 0

    def record(
        self, turn_id: TurnId, computed_len: int, new_tokens: Sequence[int] = ()
    ) -> list[TableWrite]:
        writes = super().record(turn_id, computed_len, new_tokens)
        self.num_repoints += len(writes)
        return writes

    def end_turn(self, turn_id: TurnId, keep_len: int) -> list[TableWrite]:
        writes = super().end_turn(turn_id, keep_len)
        self.num_repoints += len(writes)
        return writes


class Bench:
    """Sends commands, executes launches when told, checks the order of events as it hears them."""

    def __init__(self, stage: Stage | None = None) -> None:
        self.stage = stage or Stage()
        stage = self.stage
        layers = stage.layers
        capacity = layers.capacity(
            stage.num_pages, stage.num_rows, stage.max_context_len, stage.speculation.num_drafts
        )
        self.cache = CountingCache(
            layers.spec(stage.page_size), capacity, pinned_quota_pages=stage.pinned_quota_pages
        )
        self.settings = EngineSettings(
            model_fingerprint="echo",
            vocab_size=stage.vocab_size,
            eos_token_ids=(EOS,),
            max_running=stage.max_running,
            max_waiting=stage.max_waiting,
            chunk_tokens=stage.chunk_tokens,
            num_in_flight=stage.num_in_flight,
            memory=MemoryPolicy(stage.memory_check, stage.probe_interval_s),
            speculation=stage.speculation,
        )
        self.engine = Engine(self.cache, self.settings)
        self.model = EchoModel(window=layers.read_window)
        shapes = layers.shapes(capacity, stage.page_size)
        self.runner = EchoRunner(
            shapes, salt_of=self._salt_of, num_states=capacity.num_states, model=self.model
        )
        self.now_s = 0.0
        self.salts: dict[SessionId, str] = {}
        self.sessions: dict[TurnId, SessionId] = {}
        self.turns: dict[TurnId, Seen] = {}
        self.last_lens: dict[TurnId, int] = {}
        self.events: list[EngineEvent] = []
        self.batches: list[Batch] = []

    def _salt_of(self, turn_id: TurnId) -> str:
        return self.salts[self.sessions[turn_id]]

    # Commands

    def open(self, name: str, *, salt: str = "a", tokens: tuple[int, ...] = ()) -> SessionId:
        """Open a session and step."""
        session_id = SessionId(name)
        self.salts[session_id] = salt
        self.step(OpenSession(session_id=session_id, tenant_salt=salt, tokens=tokens))
        return session_id

    def submit_command(
        self,
        session_id: SessionId,
        turn_name: str,
        tokens: tuple[int, ...],
        *,
        base_len: int = 0,
        priority: int = 0,
        **sampling: object,
    ) -> SubmitTurn:
        """A submit as the server would send it; greedy defaults that never hit EOS."""
        turn_id = TurnId(turn_name)
        self.sessions[turn_id] = session_id
        options = {"max_tokens": 4, "seed": 1, "ignore_eos": True} | sampling
        return SubmitTurn(
            session_id=session_id,
            turn_id=turn_id,
            base_len=base_len,
            tokens=tokens,
            sampling=SamplingParams(**options),  # type: ignore[arg-type]
            priority=priority,
        )

    # Steps

    def step(self, *commands: EngineCommand, results: tuple[StepResult, ...] = ()) -> StepOutcome:
        """One engine step; its batch is queued, not executed."""
        self.now_s += 0.01
        for command in commands:
            if isinstance(command, SubmitTurn):
                self.turns.setdefault(command.turn_id, Seen())
                context_len = command.base_len + len(command.tokens)
                self.last_lens[command.turn_id] = context_len + max(
                    0, command.sampling.max_tokens - 1
                )
        # STRICT, the default, recounts every page at the end of every step and raises.
        outcome = self.engine.step(self.now_s, commands, results)
        for event in outcome.events:
            self._hear(event)
        if outcome.batch is not None:
            self.batches.append(outcome.batch)
            for row in outcome.batch.rows:
                assert row.start + row.num_tokens <= self.last_lens[row.turn_id]
            self.runner.launch(outcome.batch)
        return outcome

    def settle(self) -> StepOutcome:
        """Execute the oldest launch and let the engine settle it."""
        return self.step(results=(self.runner.execute(),))

    def run(self, *commands: EngineCommand, max_steps: int = 2000) -> None:
        """Step as a loop would, until nothing is left to do."""
        outcome = self.step(*commands)
        for _ in range(max_steps):
            if not outcome.is_blocked:
                outcome = self.step()
            elif len(self.runner):
                outcome = self.settle()
            else:
                return
        raise AssertionError("the engine did not come to rest")

    def audit(self) -> None:
        """Recount memory in slices, as an engine at rest does."""
        while not self.engine.audit_slice():
            pass

    def close_all(self) -> None:
        """Close every session, flush, and see that every page and row came home."""
        self.run(*(CloseSession(session_id=session_id) for session_id in self.salts))
        self.run(FlushCache(request_id=1))
        for accounts in self.cache.accounts().values():
            assert accounts.free + accounts.quarantine == accounts.pages - 1
        assert headroom(self.cache).free_rows == self.stage.num_rows
        assert len(self.cache) == 0

    # Answers

    def finished(self, turn_name: str) -> TurnFinished:
        """How a turn ended, if it ended well."""
        end = self.turns[TurnId(turn_name)].end
        assert isinstance(end, TurnFinished), end
        return end

    def failed(self, turn_name: str) -> TurnFailed:
        """How a turn ended, if by a fault."""
        end = self.turns[TurnId(turn_name)].end
        assert isinstance(end, TurnFailed), end
        return end

    def tokens(self, turn_name: str) -> list[int]:
        """The outputs of a turn so far."""
        return self.turns[TurnId(turn_name)].tokens

    def expect(self, turn_name: str, prompt: tuple[int, ...], seed: int = 1) -> None:
        """A turn said what it would have said alone on an empty machine."""
        seen = self.turns[TurnId(turn_name)]
        salt = self._salt_of(TurnId(turn_name))
        said = replay(salt, prompt, seed=seed, max_new=len(seen.tokens), model=self.model)
        assert seen.tokens == said

    def _hear(self, event: EngineEvent) -> None:
        self.events.append(event)
        if isinstance(event, EngineStats):
            return
        turn_id = getattr(event, "turn_id", None)
        if turn_id is None:
            return
        seen = self.turns[turn_id]
        assert seen.end is None, f"{event} after the end"
        match event:
            case TurnStarted():
                seen.starts.append(event)
            case TokensProduced():
                seen.tokens.extend(event.token_ids)
            case PromptScored():
                seen.scores.extend(event.logprobs)
            case TurnFinished() | TurnFailed():
                seen.end = event
            case _:
                pass
