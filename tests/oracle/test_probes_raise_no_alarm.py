"""Long mixed runs, probed as often as may be: no page is called wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import pytest

from cache.capacity import BoundedPools
from cache.session_cache import SessionAwareCache
from session_server.core.batch import StepResult
from session_server.core.commands import (
    CancelTurn,
    CloseSession,
    EngineCommand,
    OpenSession,
    SubmitTurn,
)
from session_server.core.events import EngineEvent, TurnFailed, TurnFinished
from session_server.core.ids import SessionId, TurnId
from session_server.core.sampling import SamplingParams
from session_server.demo import MODEL_DIR
from session_server.demo.corpus import dialogue
from session_server.engine.config import (
    EngineConfig,
    MemoryCheck,
    MemoryPolicy,
    Speculation,
)
from session_server.engine.engine import Engine
from session_server.models.config import DTypeName
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import RunnerOptions, load_runner
from tests.depth import at_depth
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import RECURRENT_FAMILIES
from tests.text.local_text import load_local_text

Text = tuple[int, ...]

NUM_SESSIONS = 10
NUM_TURNS = 110
PAGE_SIZE = 16
NUM_DRAFTS = 3


@dataclass(frozen=True)
class Scene:
    """A model, and a pool in which its sessions do not fit: they are cooled, turns retracted."""

    directory: Path
    texts: Sequence[Text]
    pool_tokens: int = 720
    dtype: DTypeName = "float32"
    kv_dtype: DTypeName | Literal["auto"] = "auto"
    num_in_flight: int = 2


class Crowd:
    """Sessions that talk, cancel, rewind and close at random; half of them begin alike."""

    def __init__(self, scene: Scene) -> None:
        loaded = load_runner(
            scene.directory,
            RunnerOptions(
                page_size=PAGE_SIZE,
                num_rows=8,
                dtype=scene.dtype,
                kv_dtype=scene.kv_dtype,
                max_context_len=512,
                memory=MemoryLimits(
                    max_total_tokens=scene.pool_tokens,
                    bounded=BoundedPools(num_drafts=NUM_DRAFTS),
                ),
            ),
        )
        settings = EngineConfig(
            model_fingerprint="probed",
            vocab_size=loaded.config.vocab_size,
            eos_token_ids=(),
            chunk_tokens=24,
            num_in_flight=scene.num_in_flight,
            memory=MemoryPolicy(MemoryCheck.WARN, probe_interval_s=0.001),
            speculation=Speculation(num_drafts=NUM_DRAFTS),
        )
        self.engine = Engine(SessionAwareCache(loaded.spec, loaded.plan.capacity), settings)
        self.runner = loaded.runner
        self.random = Random(scene.num_in_flight)
        self.results: list[StepResult] = []
        self.lengths: dict[SessionId, int] = {}
        self.live: dict[TurnId, SessionId] = {}
        self.texts = scene.texts
        self.reached: Counter[str] = Counter()
        self.num_steps = 0

    def run(self) -> None:
        """Hold all turns, then come to rest."""
        while self.reached["turns"] < NUM_TURNS:
            self._step(self._commands())
        while self.live or self.results:
            self._step([])

    def _step(self, commands: list[EngineCommand]) -> None:
        self.num_steps += 1
        # With overlap a result is settled after the next launch was planned without it.
        results = [self.results.pop(0)] if len(self.results) > self.random.randrange(2) else []
        outcome = self.engine.step(self.num_steps * 0.01, commands, results)
        if outcome.batch is not None:
            self.reached["turn batches"] += bool(outcome.batch.rows)
            result = self.runner.launch(outcome.batch).wait()
            assert result.error is None, result.error
            self.results.append(result)
        for event in outcome.events:
            self._hear(event)

    def _hear(self, event: EngineEvent) -> None:
        match event:
            case TurnFinished():
                del self.live[event.turn_id]
                self.lengths[event.session_id] = event.history_len
                self.reached["turns"] += 1
                self.reached["retracted"] += event.num_retractions > 0
                self.reached[event.reason.value] += 1
            case TurnFailed():
                pytest.fail(f"{event.code}: {event.message}")
            case _:
                pass

    def _commands(self) -> list[EngineCommand]:
        if self.random.random() < 0.5:
            return []
        session_id = SessionId(f"s{self.random.randrange(NUM_SESSIONS)}")
        turn_id = next((t for t, owner in self.live.items() if owner == session_id), None)
        if turn_id is not None:
            return self._disturb(turn_id)
        if session_id not in self.lengths:
            self.lengths[session_id] = 0
            opening = OpenSession(session_id=session_id, tenant_salt="t")
            return [opening, self._submit(session_id)]
        if self.lengths[session_id] > 300:
            del self.lengths[session_id]
            self.reached["closed"] += 1
            return [CloseSession(session_id=session_id)]
        return [self._submit(session_id)]

    def _disturb(self, turn_id: TurnId) -> list[EngineCommand]:
        if self.random.random() < 0.9:
            return []
        return [CancelTurn(turn_id=turn_id, num_outputs=self.random.choice((None, 0, 2)))]

    def _submit(self, session_id: SessionId) -> SubmitTurn:
        history = base_len = self.lengths[session_id]
        if history and self.random.random() < 0.15:
            base_len = self.random.randrange(history)
            self.reached["rewound"] += 1
        text = self.texts[int(session_id[1:]) % len(self.texts)]
        turn_id = TurnId(f"t{self.num_steps}")
        self.live[turn_id] = session_id
        return SubmitTurn(
            session_id=session_id,
            turn_id=turn_id,
            base_len=base_len,
            tokens=text[base_len : base_len + self.random.randrange(1, 60)],
            sampling=SamplingParams(
                max_tokens=self.random.randrange(60), temperature=0.0, seed=0, ignore_eos=True
            ),
        )

    def assert_honest(
        self, *, min_probes: int, share: float = 1 / 5, is_retracted: bool = True
    ) -> None:
        """Many probes, in a share of the batches, no alarm, and everything happened that moves
        pages."""
        watch, prober = self.engine.inspect().watch, self.engine.inspect().guard.prober
        assert list(watch.texts) == []
        assert prober.num_probes > self.reached["turn batches"] * share > min_probes
        assert self.engine.counters.coolings > 0
        assert (self.reached["retracted"] > 0) == is_retracted
        for name in ("rewound", "closed", "cancelled", "length"):
            assert self.reached[name], f"never happened: {name}; {dict(self.reached)}"


def dialogues() -> list[Text]:
    """What the embedded model was trained on."""
    tokenizer = load_local_text(MODEL_DIR).tokenizer
    told = [dialogue(seed, 80).turns for seed in range(NUM_SESSIONS // 2)]
    joined = ["\n".join(f"{t.user} {t.assistant}" for t in turns) for turns in told]
    return [tuple(tokenizer.encode_content(text)) for text in joined]


LAYOUTS = [
    ("gemma3_text", 560),
    ("deepseek_v3", 800),
    ("granitemoehybrid", 560),
    ("mistral_window", 480),
    ("lfm2", 560),
    ("qwen3_5_text", 560),
]
"""Families and the tokens that a pool holds."""


def noise() -> list[Text]:
    """Anything, for models that were not trained."""
    random = Random(0)
    return [
        tuple(random.randrange(3, VOCAB_SIZE) for _ in range(500)) for _ in range(NUM_SESSIONS // 2)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("dtype", "num_in_flight"),
    at_depth(
        [("float32", 1), ("bfloat16", 2)],
        proof=[("float32", 1), ("float32", 2), ("float16", 2), ("bfloat16", 2)],
    ),
)
def test_no_honest_page_is_called_wrong(dtype: DTypeName, num_in_flight: int) -> None:
    crowd = Crowd(Scene(MODEL_DIR, dialogues(), dtype=dtype, num_in_flight=num_in_flight))
    crowd.run()
    crowd.assert_honest(min_probes=100)
    assert crowd.engine.counters.accepted_tokens > 0


@pytest.mark.timeout(300)
def test_no_honest_page_in_halves_of_a_model_in_full_is_called_wrong() -> None:
    crowd = Crowd(Scene(MODEL_DIR, dialogues(), kv_dtype="bfloat16"))
    crowd.run()
    crowd.assert_honest(min_probes=100)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "pool_tokens"),
    at_depth(LAYOUTS[:3], proof=LAYOUTS),
)
def test_no_honest_page_of_another_layout_is_called_wrong(
    family: str, pool_tokens: int, checkpoints: Mapping[str, Path]
) -> None:
    """Pages behind a window are gone: what was computed from them cannot be computed again."""
    crowd = Crowd(Scene(checkpoints[family], noise(), pool_tokens))
    crowd.run()
    # Where every layer forgets, a session stops growing: nobody is retracted for the others.
    crowd.assert_honest(
        min_probes=50,
        # A page is probed where states are kept before and after it.
        share=1 / 10 if family in RECURRENT_FAMILIES else 1 / 5,
        is_retracted=family != "mistral_window",
    )
