"""Plays a trace on one engine in one configuration, and gives what was said."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cache.types import SessionId, TurnId
from session_server.core.commands import (
    CloseSession,
    EngineCommand,
    FlushCache,
    OpenSession,
    StopTurn,
    SubmitTurn,
)
from session_server.core.events import (
    EngineEvent,
    TokensProduced,
    TurnFailed,
    TurnFinished,
    one_by_one,
)
from session_server.core.sampling import SamplingParams
from tests.differential.traces import PlannedSession, PlannedTurn
from tests.sim.hand_engine import HandEngine

NUM_TOGETHER = 9
"""Conversations that go on at the same time."""


@dataclass(frozen=True, slots=True)
class Config:
    """What must not change a single token."""

    overlap: bool
    num_drafts: int
    page_size: int
    chunk_tokens: int
    share_prefixes: bool

    def __str__(self) -> str:
        overlap = "overlap" if self.overlap else "lockstep"
        radix = "shared" if self.share_prefixes else "apart"
        return f"{overlap}-{self.num_drafts}-page{self.page_size}-chunk{self.chunk_tokens}-{radix}"


SETTINGS = ((False, True), (0, 2, 4), (1, 4, 16), (1, 7, 64), (False, True))
"""The values of each field of a `Config`."""


@dataclass
class Conversation:
    """A session under way, as its client sees it. The engine holds `held_len` tokens of it."""

    plan: PlannedSession
    history: tuple[int, ...]
    held_len: int
    to_come: deque[PlannedTurn]
    said: list[int] = field(default_factory=list)
    is_stopped: bool = False

    @property
    def session_id(self) -> SessionId:
        return SessionId(self.plan.name)


class Player:
    """Plays on one engine. `answers`: what stays in the history of each turn; `margins`: by
    how much, in log-probability, each token of a greedy turn led the next best, where turns ask
    for both; `reached` counts what happened on the way.
    """

    def __init__(self, config: Config, hand: HandEngine) -> None:
        self._config = config
        self._hand = hand
        self._live: dict[str, Conversation] = {}
        self.answers: dict[str, tuple[int, ...]] = {}
        self.margins: list[float] = []
        self.reached: Counter[str] = Counter()

    def play(self, trace: Sequence[PlannedSession]) -> None:
        """Hold all conversations, some at a time, and see that every page came home."""
        to_come = iter(trace)
        hand = self._hand
        outcome = hand.step(0.0, self._begin(to_come, NUM_TOGETHER), [])
        while True:
            commands, results = self._hear(outcome.events, to_come), []
            if outcome.is_blocked and not commands:
                if not hand.num_launched:
                    break
                results = hand.take_results(1)
            outcome = hand.step(0.01 * hand.num_steps, commands, results)
        assert not self._live, f"{list(self._live)} did not come to their end"
        hand.step(0.01 * hand.num_steps, [FlushCache(request_id=1)], [])
        while not hand.engine.audit_slice():
            pass
        counters = hand.engine.counters
        self.reached["turns"] += len(self.answers)
        self.reached["retractions"] += counters.retractions
        self.reached["coolings"] += counters.coolings
        self.reached["right guesses"] += counters.accepted_tokens
        self.reached["wrong guesses"] += counters.draft_tokens - counters.accepted_tokens
        self.reached["overshoots"] += counters.overshoots
        for accounts in hand.cache.accounts().values():
            assert accounts.free == accounts.pages - 1, "a page did not come home"

    def _begin(self, to_come: Iterator[PlannedSession], number: int) -> list[EngineCommand]:
        commands: list[EngineCommand] = []
        for _, plan in zip(range(number), to_come, strict=False):
            talk = Conversation(plan, plan.opening, len(plan.opening), deque(plan.turns))
            self._live[plan.name] = talk
            salt = "all" if self._config.share_prefixes else plan.name
            commands.append(
                OpenSession(session_id=talk.session_id, tenant_salt=salt, tokens=plan.opening)
            )
            commands.append(self._next_turn(talk))
        return commands

    def _next_turn(self, talk: Conversation) -> SubmitTurn:
        plan = talk.to_come[0]
        talk.history = talk.history[: len(talk.history) - plan.num_dropped]
        talk.said, talk.is_stopped = [], False
        base_len = min(talk.held_len, len(talk.history))
        return SubmitTurn(
            session_id=talk.session_id,
            turn_id=TurnId(plan.name),
            base_len=base_len,
            tokens=(*talk.history[base_len:], *plan.tokens),
            sampling=SamplingParams(**plan.sampling),
        )

    def _hear(
        self, events: Sequence[EngineEvent], to_come: Iterator[PlannedSession]
    ) -> list[EngineCommand]:
        commands: list[EngineCommand] = []
        for event in one_by_one(events):
            match event:
                case TokensProduced(turn_id=turn_id):
                    talk = self._live[turn_id.partition(".")[0]]
                    talk.said += event.token_ids
                    self._note_margins(talk.to_come[0], event)
                    num_kept = talk.to_come[0].num_kept
                    if num_kept is not None and len(talk.said) >= num_kept and not talk.is_stopped:
                        talk.is_stopped = True
                        commands.append(StopTurn(turn_id=turn_id, num_outputs=num_kept))
                case TurnFinished(session_id=session_id):
                    commands += self._end(self._live[session_id], event)
                    if session_id not in self._live:
                        commands += self._begin(to_come, 1)
                case TurnFailed():
                    raise AssertionError(event)
                case _:
                    pass
        return commands

    def _note_margins(self, plan: PlannedTurn, event: TokensProduced) -> None:
        if plan.sampling.get("temperature") == 0.0:
            for (_, best), (_, second) in (logprob.top for logprob in event.logprobs):
                self.margins.append(best - second)

    def _end(self, talk: Conversation, event: TurnFinished) -> list[EngineCommand]:
        plan = talk.to_come.popleft()
        kept = tuple(talk.said[: plan.num_kept])
        self.answers[plan.name] = kept
        self.reached["cached tokens"] += event.cached_tokens
        talk.history += plan.tokens + kept
        talk.held_len = min(event.history_len, len(talk.history))
        if talk.to_come:
            return [self._next_turn(talk)]
        del self._live[talk.plan.name]
        return [CloseSession(session_id=talk.session_id)]
