"""Whole sessions through engine, cache and runner, and how they compare with a reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from cache.capacity import BoundedPools
from cache.session_cache import SessionAwareCache
from session_server.core.batch import StepResult
from session_server.core.commands import EngineCommand, OpenSession, SubmitTurn
from session_server.core.events import TokensProduced, TurnFailed, TurnFinished
from session_server.core.ids import SessionId, TurnId
from session_server.core.sampling import SamplingParams, TokenLogprob
from session_server.engine.config import (
    EngineConfig,
    MemoryCheck,
    MemoryPolicy,
    Speculation,
    TierPolicy,
)
from session_server.engine.context import Counters
from session_server.engine.engine import Engine
from session_server.models.config import KvDTypeName
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import LoadedRunner, RunnerOptions, load_runner
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import BackendName
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.device import DEVICE

NUM_OUTPUTS = 6
MAX_STEPS = 5_000
TOLERANCE = 1e-4
NO_GUESSES = Speculation()

Reference = Callable[[list[int]], torch.Tensor]


@dataclass
class Talk:
    """One session under test: its tokens so far, and what was said of each generated one."""

    session_id: SessionId
    pieces: tuple[int, ...]
    num_outputs: int = NUM_OUTPUTS
    tokens: list[int] = field(default_factory=list)
    outputs: dict[int, TokenLogprob] = field(default_factory=dict)
    num_turns: int = 0
    num_retractions: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def next_turn(self) -> SubmitTurn:
        """Append the next piece and ask for its answer."""
        piece = self.rng.integers(3, VOCAB_SIZE, self.pieces[self.num_turns])
        base_len = len(self.tokens)
        self.tokens += piece.tolist()
        self.num_turns += 1
        return SubmitTurn(
            session_id=self.session_id,
            turn_id=TurnId(f"{self.session_id}/{self.num_turns}"),
            base_len=base_len,
            tokens=tuple(piece.tolist()),
            sampling=SamplingParams(
                max_tokens=self.num_outputs,
                temperature=0.0,
                ignore_eos=True,
                logprobs=True,
                top_logprobs=20,
                seed=0,
            ),
        )

    def hear(self, event: TokensProduced) -> None:
        """Note generated tokens."""
        for token, logprob in zip(event.token_ids, event.logprobs, strict=True):
            self.outputs[len(self.tokens)] = logprob
            self.tokens.append(token)


@dataclass(frozen=True)
class Setup:
    """One combination. `max_total_tokens`: of the pool; none: as much as a few sessions need, for
    all of it is recounted in every step.
    """

    family: str
    page_size: int
    chunk: int
    overlap: bool
    max_total_tokens: int | None = None
    speculation: Speculation = NO_GUESSES
    backend: BackendName = "auto"
    kv_dtype: KvDTypeName | Literal["auto"] = "auto"

    def __str__(self) -> str:
        mode = "overlap" if self.overlap else "lockstep"
        plain = f"{self.family}-page{self.page_size}-chunk{self.chunk}-{mode}"
        guesses = self.speculation
        return (
            f"{plain}-{guesses.drafter.value}{guesses.num_drafts}" if guesses.num_drafts else plain
        )


def load_engine(
    setup: Setup, directory: Path, *, draft: Path | None = None
) -> tuple[ModelRunner, Engine, SessionAwareCache]:
    """A runner, and the engine that plans for it on a cache that is recounted in every step."""
    loaded = load(setup, directory, draft=draft)
    cache = SessionAwareCache(loaded.spec, loaded.plan.capacity)
    return loaded.runner, Engine(cache, settings_of(setup)), cache


def load(setup: Setup, directory: Path, *, draft: Path | None = None) -> LoadedRunner:
    """A runner with pools as the setup has them."""
    return load_runner(
        directory,
        RunnerOptions(
            page_size=setup.page_size,
            num_rows=8,
            device=str(DEVICE),
            dtype="float32",
            max_context_len=256,
            draft=draft,
            backend=setup.backend,
            kv_dtype=setup.kv_dtype,
            memory=MemoryLimits(
                max_total_tokens=setup.max_total_tokens or max(384, 8 * setup.page_size),
                bounded=BoundedPools(num_drafts=setup.speculation.num_drafts),
            ),
        ),
    )


def settings_of(setup: Setup, tiers: TierPolicy | None = None) -> EngineConfig:
    """The settings of an engine."""
    return EngineConfig(
        model_fingerprint="oracle",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
        chunk_tokens=setup.chunk,
        num_in_flight=2 if setup.overlap else 1,
        speculation=setup.speculation,
        memory=MemoryPolicy(MemoryCheck.STRICT),
        tiers=tiers or TierPolicy(),
    )


def run_talks(
    setup: Setup, directory: Path, talks: list[Talk], *, draft: Path | None = None
) -> Counters:
    """Hold all talks at once, each sending its next turn as soon as the last has ended.

    Returns the engine's totals. `draft`: the checkpoint that guesses.
    """
    runner, engine, _ = load_engine(setup, directory, draft=draft)
    by_id = {talk.session_id: talk for talk in talks}
    commands: list[EngineCommand] = [
        OpenSession(session_id=talk.session_id, tenant_salt="t") for talk in talks
    ]
    commands += [talk.next_turn() for talk in talks]
    in_flight: deque[StepResult] = deque()
    num_live = len(talks)
    for step in range(MAX_STEPS):
        # With overlap a result is settled only after the next launch was planned without it.
        results = [in_flight.popleft()] if len(in_flight) >= 1 + setup.overlap else []
        outcome = engine.step(step * 0.01, commands, results)
        commands = []
        if outcome.batch is not None:
            in_flight.append(runner.launch(outcome.batch).wait())
        elif in_flight:
            late = engine.step(step * 0.01, [], [in_flight.popleft()])
            outcome.events.extend(late.events)
            if late.batch is not None:
                in_flight.append(runner.launch(late.batch).wait())
        for event in outcome.events:
            match event:
                case TokensProduced(turn_id=turn_id):
                    by_id[SessionId(turn_id.split("/")[0])].hear(event)
                case TurnFailed():
                    pytest.fail(f"{event.code}: {event.message}")
                case TurnFinished(session_id=session_id):
                    talk = by_id[session_id]
                    talk.num_retractions += event.num_retractions
                    assert event.history_len == len(talk.tokens)
                    if talk.num_turns < len(talk.pieces):
                        commands.append(talk.next_turn())
                    else:
                        num_live -= 1
        if num_live == 0:
            while not engine.audit_slice():
                pass
            return engine.counters
    pytest.fail(f"turns still ran after {MAX_STEPS} steps")


def assert_like_reference(talk: Talk, reference: Reference) -> None:
    """Every generated token is the reference's choice, with the reference's probabilities."""
    assert len(talk.outputs) == talk.num_outputs * len(talk.pieces)
    assert_said(talk.tokens, talk.outputs, reference)


def assert_said(
    tokens: list[int], outputs: Mapping[int, TokenLogprob], reference: Reference
) -> None:
    """What was generated at some positions of these tokens is what the reference says there."""
    logprobs = torch.log_softmax(reference(tokens), dim=-1)
    for position, said in outputs.items():
        expected = logprobs[position - 1]
        assert said.token_id == tokens[position] == int(expected.argmax())
        ids, given = zip((said.token_id, said.logprob), *said.top, strict=True)
        assert (torch.tensor(given) - expected[list(ids)]).abs().max() <= TOLERANCE
