"""The same traces on a real model in fp32, greedy and sampled, in configurations that have every
pair of settings somewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product, zip_longest
from pathlib import Path

import pytest
import torch

from cache.session_cache import SessionAwareCache
from session_server.engine.config import (
    Drafter,
    EngineConfig,
    MemoryCheck,
    MemoryPolicy,
    Speculation,
)
from session_server.runner.capacity import MemoryLimits
from session_server.runner.decode_graphs import CudaGraphs
from session_server.runner.graph_sizes import graph_sizes
from session_server.runner.loader import RunnerOptions, load_runner
from session_server.runner.paged_decoder import BackendName
from tests.depth import at_depth, pairwise
from tests.differential.player import NUM_TOGETHER, SETTINGS, Config, Player
from tests.differential.traces import PlannedSession, Size, make_trace
from tests.gpu.padded import pad_forwards
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import WEIGHT_STD, write_checkpoint
from tests.oracle.device import DEVICE
from tests.sim.hand_engine import HandEngine, LateDevice

NUM_TURNS = 100
MAX_RUNNING = 6
BACKEND: BackendName = "cpu" if DEVICE.type == "cpu" else "triton"
SMALLEST_MARGIN = 1e-4
"""Log-probability by which a greedy choice must lead: batch shapes change it by 1e-6."""

PLAIN = Config(overlap=False, num_drafts=0, page_size=16, chunk_tokens=64, share_prefixes=False)
DRAFTING = Config(overlap=True, num_drafts=2, page_size=4, chunk_tokens=64, share_prefixes=True)
SIZE = Size(num_inputs=(1, 9), num_outputs=(1, 16))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3", std=WEIGHT_STD)


@cache
def trace() -> tuple[PlannedSession, ...]:
    """One half greedy, the other sampled; the seeds are the turns' own."""
    greedy = {"temperature": 0.0, "logprobs": True, "top_logprobs": 2}
    sampled = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
    half = NUM_TURNS // 2
    first = make_trace("greedy", half, vocab_size=VOCAB_SIZE, size=SIZE, **greedy)
    second = make_trace("sampled", half, vocab_size=VOCAB_SIZE, size=SIZE, **sampled)
    pairs = zip_longest(first, second)
    return tuple(session for pair in pairs for session in pair if session is not None)


def play(config: Config, checkpoint: Path, *, in_graphs: bool = False) -> Player:
    """The trace in one configuration. Two guesses come from the history, four from the model.

    `in_graphs`: forwards of few tokens a row are padded to the sizes of graphs; on a GPU they are
    graphs.
    """
    drafter = Drafter.MODEL if config.num_drafts == 4 else Drafter.NGRAM
    loaded = load_runner(
        checkpoint,
        RunnerOptions(
            page_size=config.page_size,
            num_rows=NUM_TOGETHER + 2,
            device=DEVICE.type,
            dtype="float32",
            max_context_len=256,
            backend="auto" if DEVICE.type == "cpu" and not in_graphs else BACKEND,
            draft=checkpoint if drafter is Drafter.MODEL else None,
            memory=MemoryLimits(max_total_tokens=288),
        ),
    )
    sizes = graph_sizes(MAX_RUNNING, config.num_drafts)
    if in_graphs and DEVICE.type == "cuda":
        assert loaded.runner.capture_graphs(sizes, CudaGraphs(DEVICE)) is None
    elif in_graphs:
        pad_forwards(loaded.runner, sizes)
    settings = EngineConfig(
        model_fingerprint="tiny",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
        max_running=MAX_RUNNING,
        chunk_tokens=config.chunk_tokens,
        num_in_flight=2 if config.overlap else 1,
        speculation=Speculation(config.num_drafts, drafter),
        memory=MemoryPolicy(MemoryCheck.STRICT),
    )
    cache = SessionAwareCache(loaded.spec, loaded.plan.capacity)
    player = Player(config, HandEngine(cache, settings, lambda _: LateDevice(loaded.runner)))
    player.play(trace())
    assert len(loaded.runner._sampler._rows) <= MAX_RUNNING, "the rows of others are at rest"
    if (graphs := loaded.runner.graphs) is not None:
        player.reached.update({use.value: count for use, count in graphs.uses.items()})
    return player


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Player:
    return play(PLAIN, checkpoint)


def test_every_configuration_says_the_same(checkpoint: Path, plain: Player) -> None:
    configs = [Config(*values) for values in pairwise(list(product(*SETTINGS)))]
    assert min(plain.margins) > SMALLEST_MARGIN, "a tie in fp32 would say nothing about sessions"
    reached = plain.reached.copy()
    for config in configs:
        player = play(config, checkpoint)
        assert player.answers == plain.answers, config
        assert (player.reached["right guesses"] > 0) == (config.num_drafts > 0), config
        reached += player.reached
    assert reached["turns"] >= 1_000
    missing = {"retractions", "coolings", "wrong guesses", "overshoots"} - set(reached)
    assert not missing, reached


def test_batches_that_are_padded_as_graphs_are_say_the_same(
    checkpoint: Path, plain: Player
) -> None:
    configs = [Config(*values) for values in pairwise(list(product(*SETTINGS)))]
    reached: Counter[str] = Counter()
    for config in at_depth([DRAFTING], proof=[PLAIN, DRAFTING, *configs]):
        player = play(config, checkpoint, in_graphs=True)
        assert player.answers == plain.answers, config
        reached += player.reached
    assert reached["replayed"] > 50
    assert reached["many_tokens"] > 10
    assert reached["right guesses"] > 0
