"""An engine stepped by hand as its tests see it: commands by name, and what each turn heard."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.types import PoolName, SessionId, TurnId
from session_server.core.batch import StepResult
from session_server.core.commands import (
    CloseSession,
    DraftInput,
    EngineCommand,
    FlushCache,
    OpenSession,
    SubmitTurn,
)
from session_server.core.events import (
    EngineEvent,
    EngineStats,
    PromptLogprobsComputed,
    TokensProduced,
    TurnFailed,
    TurnFinished,
    TurnStarted,
    one_by_one,
)
from session_server.core.sampling import SamplingParams, TokenLogprob
from session_server.engine.engine import StepOutcome
from tests.cache.headroom import headroom
from tests.sim.echo import EchoModel, replay
from tests.sim.hand_engine import HandEngine, Sizes

POOL = PoolName("full")


@dataclass
class Seen:
    """What the server side has heard of one turn."""

    tokens: list[int] = field(default_factory=list)
    starts: list[TurnStarted] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    end: TurnFinished | TurnFailed | None = None


class Bench:
    """Sends commands, executes forwards when told, checks the order of events as it hears them."""

    def __init__(
        self,
        sizes: Sizes | None = None,
        *,
        model: EchoModel | None = None,
        probe_interval_s: float = 10.0,
    ) -> None:
        self.sizes = sizes or Sizes()
        self.model = model or self.sizes.model
        self.hand = HandEngine.of(self.sizes, model=self.model, probe_interval_s=probe_interval_s)
        self.engine, self.cache = self.hand.engine, self.hand.cache
        self.runner, self.batches = self.hand.device, self.hand.batches
        self.now_s = 0.0
        self.turns: dict[TurnId, Seen] = {}
        self.events: list[EngineEvent] = []
        self._last_lens: dict[TurnId, int] = {}

    # Commands

    def open(
        self, name: str, *, salt: str = "a", tokens: tuple[int, ...] = (), tenant: str = ""
    ) -> SessionId:
        """Open a session and step."""
        session_id = SessionId(name)
        opening = OpenSession(session_id=session_id, tenant_salt=salt, tokens=tokens, tenant=tenant)
        self.step(opening)
        return session_id

    def submit_command(
        self,
        session_id: SessionId,
        turn_name: str,
        tokens: tuple[int, ...],
        *,
        base_len: int = 0,
        priority: int = 0,
        tenant: str = "",
        **sampling: object,
    ) -> SubmitTurn:
        """A submit as the server would send it; greedy defaults that never hit EOS."""
        options = {"max_tokens": 4, "seed": 1, "ignore_eos": True} | sampling
        return SubmitTurn(
            session_id=session_id,
            turn_id=TurnId(turn_name),
            base_len=base_len,
            tokens=tokens,
            sampling=SamplingParams(**options),  # type: ignore[arg-type]
            priority=priority,
            tenant=tenant,
        )

    # Steps

    def step(self, *commands: EngineCommand, results: tuple[StepResult, ...] = ()) -> StepOutcome:
        """One engine step; its batch is queued, not executed."""
        self.now_s += 0.01
        for command in commands:
            if isinstance(command, SubmitTurn):
                self.turns.setdefault(command.turn_id, Seen())
                context_len = command.base_len + len(command.tokens)
                self._last_lens[command.turn_id] = context_len + max(
                    0, command.sampling.max_tokens - 1
                )
            elif isinstance(command, DraftInput):
                self._last_lens[command.draft_id] = command.base_len + len(command.tokens)
        # STRICT, the default, recounts every page at the end of every step and raises.
        outcome = self.hand.step(self.now_s, commands, results)
        for event in one_by_one(outcome.events):
            self._hear(event)
        if outcome.batch is not None:
            for row in outcome.batch.rows:
                assert row.start + row.num_tokens <= self._last_lens[row.turn_id]
        return outcome

    def settle(self) -> StepOutcome:
        """Execute the oldest forward and let the engine settle it."""
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
        self.run(*(CloseSession(session_id=slot.session_id) for slot in self.cache.slots()))
        self.run(FlushCache(request_id=1))
        for accounts in self.cache.accounts().values():
            assert accounts.free + accounts.quarantine == accounts.pages - 1
        assert headroom(self.cache).free_rows == self.sizes.num_rows
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
        salt = self.hand.salt_of(TurnId(turn_name))
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
            case PromptLogprobsComputed():
                seen.prompt_logprobs.extend(event.logprobs)
            case TurnFinished() | TurnFailed():
                seen.end = event
            case _:
                pass
