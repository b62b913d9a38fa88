"""One engine and its runner, in one process: sessions that speak when they are told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from session_server.core.batch import StepResult
from session_server.core.commands import (
    CancelTurn,
    CloseSession,
    EngineCommand,
    FlushCache,
    OpenSession,
    SubmitTurn,
)
from session_server.core.events import TokensProduced, TurnFailed, TurnFinished
from session_server.core.ids import SessionId, TurnId
from session_server.core.sampling import SamplingParams, TokenLogprob
from session_server.engine.engine import StepOutcome
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.talks import Setup, load_engine

MAX_STEPS = 400


@dataclass
class Guest:
    """One session: the history it has, and by position what was said in its latest turn."""

    id: SessionId
    tokens: list[int]
    said: dict[int, TokenLogprob] = field(default_factory=dict)
    num_turns: int = 0
    num_retractions: int = 0

    def hear(self, event: TokensProduced) -> None:
        """Note generated tokens."""
        for token, logprob in zip(event.token_ids, event.logprobs, strict=True):
            self.said[len(self.tokens)] = logprob
            self.tokens.append(token)


class House:
    """One engine and its runner; with overlap a cancel finds a launch in flight."""

    def __init__(self, setup: Setup, directory: Path) -> None:
        self.runner, self.engine, self.cache = load_engine(setup, directory)
        self.num_in_flight = 1 + setup.overlap
        self.rng = np.random.default_rng(setup.page_size)
        self.guests: dict[SessionId, Guest] = {}
        self.in_flight: list[StepResult] = []
        self.has_launched = False
        self.num_steps = 0
        self.num_sessions = 0

    def open(self, tokens: tuple[int, ...] = ()) -> Guest:
        """A new session; with tokens, one that goes on from another's history."""
        self.num_sessions += 1
        guest = Guest(SessionId(f"s{self.num_sessions}"), list(tokens))
        self.guests[guest.id] = guest
        self._step([OpenSession(session_id=guest.id, tenant_salt="t", tokens=tokens)])
        return guest

    def say(
        self, guest: Guest, num_tokens: int, num_outputs: int, *, base_len: int | None = None
    ) -> None:
        """Hold a turn."""
        self.hold([self.submit(guest, num_tokens, num_outputs, base_len=base_len)])

    def submit(
        self, guest: Guest, num_tokens: int, num_outputs: int, *, base_len: int | None = None
    ) -> SubmitTurn:
        """A turn of random tokens, on the first `base_len` of the history."""
        kept = len(guest.tokens) if base_len is None else base_len
        piece = tuple(self.rng.integers(3, VOCAB_SIZE, num_tokens).tolist())
        guest.tokens[kept:] = piece
        guest.said.clear()
        guest.num_turns += 1
        return SubmitTurn(
            session_id=guest.id,
            turn_id=TurnId(f"{guest.id}/{guest.num_turns}"),
            base_len=kept,
            tokens=piece,
            sampling=SamplingParams(
                max_tokens=num_outputs,
                temperature=0.0,
                ignore_eos=True,
                logprobs=True,
                top_logprobs=20,
                seed=0,
            ),
        )

    def hold(
        self,
        commands: list[SubmitTurn],
        *,
        cancel: CancelTurn | None = None,
        when: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run turns to their ends; `cancel` is sent as soon as `when` says so."""
        live = {command.turn_id for command in commands}
        coming: list[EngineCommand] = list(commands)
        for _ in range(MAX_STEPS):
            if cancel is not None and when():
                coming.append(cancel)
                cancel = None
            live -= self._step(coming)
            coming = []
            if not live and not self.in_flight:
                return
        raise AssertionError(f"turns {live} do not end")

    def cool(self, guest: Guest) -> None:
        """Take its KV away."""
        self.cache.cool(guest.id)

    def flush(self) -> None:
        """Take everybody's KV away, and forget what was published."""
        self._step([FlushCache(request_id=1)])

    def close(self, *guests: Guest) -> None:
        """Forget sessions."""
        self._step([CloseSession(session_id=guest.id) for guest in guests])

    def assert_empty(self) -> None:
        """Every page and every row is back once the tree gives up what nobody uses."""
        self.flush()
        assert all(a.free == a.pages - 1 for a in self.cache.accounts().values())

    def _advance(self, commands: list[EngineCommand], results: list[StepResult]) -> StepOutcome:
        return self.engine.step(self.num_steps * 0.01, commands, results)

    def _guest(self, turn_id: TurnId) -> Guest:
        return self.guests[SessionId(turn_id.split("/")[0])]

    def _step(self, commands: list[EngineCommand]) -> set[TurnId]:
        """One engine step; returns the turns that ended in it."""
        self.num_steps += 1
        # With overlap a result is settled after the next launch was planned without it.
        is_due = len(self.in_flight) == self.num_in_flight or (
            self.in_flight and not self.has_launched
        )
        results = [self.in_flight.pop(0)] if is_due else []
        outcome = self._advance(commands, results)
        self.has_launched = outcome.batch is not None
        if outcome.batch is not None:
            self.in_flight.append(self.runner.launch(outcome.batch).wait())
        ended = set()
        for event in outcome.events:
            match event:
                case TokensProduced(turn_id=turn_id):
                    self._guest(turn_id).hear(event)
                case TurnFinished():
                    guest = self.guests[event.session_id]
                    guest.num_retractions += event.num_retractions
                    del guest.tokens[event.history_len :]
                    ended.add(event.turn_id)
                case TurnFailed():
                    raise AssertionError(f"{event.code}: {event.message}")
        return ended
