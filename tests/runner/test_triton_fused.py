"""The kernels between the products of a layer against torch's: in Triton's interpreter, and with
TEST_DEVICE=cuda on a GPU.

The interpreter cuts off what does not fit into a bfloat16, where a GPU rounds, and its 8-bit floats
lose the carry.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from cache.pool.mha import MhaPool
from cache.pool.page_table import PageTable
from cache.pool.storage import PageFormat
from session_server.attention.base import AttentionMeta, AttentionRule, Span
from session_server.core.batch import SamplingStart
from session_server.core.sampling import SamplingParams
from session_server.models.config import AttentionConfig, GateConfig, GateKind, RopeConfig, RopeKind
from session_server.models.decoder import add_and_norm as plain_add_and_norm
from session_server.models.layers.attention import GqaMixer, GqaWeights
from session_server.models.layers.mla import MlaMixer
from session_server.models.layers.mlp import make_gate
from session_server.models.layers.norm import ProjectionNorm, RmsNorm, Scale
from session_server.models.layers.rope import Rope
from session_server.models.registry import load_config
from session_server.runner import greedy
from session_server.runner.sampler import Sampler
from session_server.runner.verification import SampleSpan
from session_server.runner.weights import load_decoder
from tests.depth import at_depth, cases
from tests.gpu.test_decode_graphs import Talk, runner_of
from tests.oracle.checkpoints import write_checkpoint
from tests.oracle.conftest import ALL_FAMILIES
from tests.oracle.device import DEVICE
from tests.runner.rows import Rows
from tests.runner.test_model_runner import prompt

pytest.importorskip("triton", reason="triton has no wheel for this machine")

from session_server.attention.triton import launching
from session_server.attention.triton.backend import TritonBackend
from session_server.runner.triton import fused as fusing
from session_server.runner.triton import sampling
from session_server.runner.triton.gates import SIGMOID_GATE
from session_server.runner.triton.mixers import TritonGqaMixer, TritonMlaMixer
from session_server.runner.triton.norms import TritonRmsNorm, add_and_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def assert_rounded(ours: Tensor, exact: Tensor) -> None:
    """What was computed in float32 is there, rounded to the dtype of `ours`."""
    torch.testing.assert_close(ours, exact.to(ours.dtype))


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x.float(), (x.shape[-1],), eps=EPS) * weight.float()


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "size"), cases(DTYPES, at_depth((1, 33), proof=(1, 5, 33)), (48, 130))
)
def test_rows_of_a_wider_tensor_are_normed_as_torch_does(
    dtype: torch.dtype, num_tokens: int, size: int
) -> None:
    wide, weight = noise(num_tokens, size + 40, dtype=dtype), noise(size, dtype=dtype)
    x, around = wide[:, 8 : size + 8], wide.clone()
    expected = normed(x, weight)
    norm = TritonRmsNorm(weight, EPS)
    assert_rounded(norm(x), expected)
    assert torch.equal(wide, around)
    norm.apply_(x)
    assert_rounded(x, expected)
    around[:, 8 : size + 8] = x
    assert torch.equal(wide, around)


@pytest.mark.parametrize("has_own_weights", [False, True])
def test_groups_of_a_row_are_normed_by_themselves(*, has_own_weights: bool) -> None:
    """As the heads of a gated delta layer, and the groups of Mamba2."""
    wide = noise(7, 200)
    x, weight = wide[:, 50:].view(7, 3, 50), noise(*([3] if has_own_weights else []), 50)
    assert_rounded(TritonRmsNorm(weight, EPS)(x), normed(x, weight))


@pytest.mark.parametrize(
    ("dtype", "after", "is_normed"),
    cases(DTYPES, ("nothing", "a norm", "a factor", "something else"), (False, True)),
)
def test_what_a_layer_adds_is_normed_added_and_normed(
    dtype: torch.dtype, after: str, *, is_normed: bool
) -> None:
    hidden, y = noise(35, 72, dtype=dtype), noise(35, 72, dtype=dtype)
    behind = {
        "nothing": None,
        "a norm": RmsNorm(noise(72, dtype=dtype), 10 * EPS),
        "a factor": Scale(0.22),
        "something else": torch.neg,
    }[after]
    before = RmsNorm(noise(72, dtype=dtype), EPS) if is_normed else None
    kept, exact = hidden.clone(), hidden.float()
    plain_add_and_norm(exact, y.float().clone(), behind, None)
    x = add_and_norm(kept, y, behind, before)
    assert_rounded(kept, exact)
    # What is normed are the rounded states, which the next layer sees too.
    assert_rounded(x, kept if before is None else normed(kept, before.weight))
    assert (x is kept) == (before is None)


def test_the_first_norm_adds_nothing() -> None:
    hidden, norm = noise(3, 16), TritonRmsNorm(noise(16), EPS)
    before = hidden.clone()
    assert_rounded(add_and_norm(hidden, None, None, norm), normed(hidden, norm.weight))
    assert torch.equal(hidden, before)
    assert add_and_norm(hidden, None, None, None) is hidden


@pytest.mark.parametrize(
    ("dtype", "kind", "shape"), cases(DTYPES, GateKind, ((1, 1100), (3, 36), (40, 30)))
)
def test_a_gate_is_the_one_of_torch(
    dtype: torch.dtype, kind: GateKind, shape: tuple[int, int]
) -> None:
    gate_up = noise(shape[0], 2 * shape[1], dtype=dtype) * 3
    gate, up = gate_up.chunk(2, dim=-1)
    made = make_gate(GateConfig(kind, alpha=1.7, swiglu_limit=2.5))
    expected = made(gate.float(), up.float())
    assert_rounded(fusing._fused(made)(gate, up), expected)
    assert_rounded(SIGMOID_GATE(gate, up), torch.sigmoid(gate.float()) * up.float())


def test_a_gate_lets_no_nan_become_a_bound() -> None:
    gate = fusing._fused(make_gate(GateConfig(GateKind.CLAMPED, alpha=1.7, swiglu_limit=2.5)))
    x, y = noise(2, 8), noise(2, 8)
    x[0, 3], y[1, 5] = torch.nan, torch.nan
    assert gate(x, y).isnan().nonzero().tolist() == [[0, 3], [1, 5]]


ROPE = RopeConfig(10_000.0)
SCALED = replace(ROPE, rope_type=RopeKind.LINEAR, factor=4.0, attention_factor=1.3)
PLAIN = AttentionConfig(4, 2, 24, 0.2, ROPE)
LAYERS: dict[str, tuple[AttentionConfig, str]] = {
    "llama": (PLAIN, "none"),
    "qwen": (PLAIN, "head"),
    "olmo": (PLAIN, "projection"),
    "glm": (replace(PLAIN, rope=replace(ROPE, rotary_dim=8)), "none"),
    "qwen 3.5": (replace(PLAIN, rope=replace(ROPE, rotary_dim=8), is_gated=True), "head"),
    "gpt-oss": (replace(PLAIN, rope=SCALED, has_sinks=True), "none"),
    "one kv head": (replace(PLAIN, num_heads=3, num_kv_heads=1), "head"),
    "without rope": (replace(PLAIN, rope=None), "none"),
    "without rope, normed": (replace(PLAIN, rope=None), "head"),
}
BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)
STORED = DTYPES if DEVICE.type == "cpu" else (*DTYPES, *BYTES)
SPANS = (Span(1, 0, 1, 0), Span(2, 0, 40, 1))
PAGE_SIZE = 16
POSITIONS = torch.cat([torch.arange(span.start, span.end) for span in SPANS])
SLOTS = torch.cat((torch.tensor([5 * PAGE_SIZE]), torch.arange(PAGE_SIZE, PAGE_SIZE + 40)))


class GqaWorld:
    """A layer over a pool of its own, whose rows have tokens at pages 5 and 1 to 3."""

    def __init__(
        self, mixer: GqaMixer, rope: Rope | None, *, computed: torch.dtype, stored: torch.dtype
    ) -> None:
        config, self.mixer, self.computed = mixer.config, mixer, computed
        pages = PageFormat(
            num_pages=7, page_size=PAGE_SIZE, dtype=stored, read_dtype=computed, device=DEVICE
        )
        group = replace(config.group((0, 1), "float32"), dtype_bytes=stored.itemsize)
        self.pool = MhaPool(group, pages)
        table = PageTable(2, 3, device=DEVICE)
        table.device_pages[1, 0] = 5
        table.device_pages[2] = torch.tensor([1, 2, 3])
        rule = AttentionRule(config.num_heads, config.scale)
        meta = AttentionMeta(SPANS, {group.pool: SLOTS.to(DEVICE)})
        self.plan = TritonBackend(self.pool, table, rule).plan(meta)
        positions = POSITIONS.to(DEVICE)
        self.phases = positions if rope is None else rope.phases(positions)

    def mix(self, x: Tensor) -> Tensor:
        return self.mixer(x, self.phases, self.plan)


def gqa_mixer(config: AttentionConfig, norm: str, dtype: torch.dtype) -> GqaMixer:
    """Projections that give what they are given: the input is Q, K, V and gates."""
    num_rotated = config.num_heads + config.num_kv_heads
    of_heads = noise(num_rotated, config.head_dim, dtype=dtype)
    q, k = (part.flatten() for part in of_heads.split([config.num_heads, config.num_kv_heads]))
    norms = {
        "none": None,
        "head": RmsNorm(of_heads, EPS),
        "projection": ProjectionNorm(RmsNorm(q, EPS), RmsNorm(k, EPS), config.num_heads),
    }
    sinks = noise(config.num_heads, dtype=dtype) if config.has_sinks else None
    return GqaMixer(config, 1, GqaWeights(torch.clone, torch.clone, norms[norm], sinks))


@pytest.mark.parametrize(
    ("family", "stored"),
    at_depth(
        [*((family, torch.float32) for family in LAYERS), *(("qwen", each) for each in STORED[1:])],
        proof=[*itertools.product(LAYERS, STORED)],
    ),
)
def test_heads_are_normed_rotated_and_stored_as_torch_does(
    family: str, stored: torch.dtype
) -> None:
    computed = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    config, norm = LAYERS[family]
    rope = None if config.rope is None else Rope(config.rope, config.rotary_dim, device=DEVICE)
    mixer = gqa_mixer(config, norm, computed)
    made = fusing._fused(mixer)
    assert isinstance(made, TritonGqaMixer)
    ours, theirs = (
        GqaWorld(each, rope, computed=computed, stored=stored) for each in (made, mixer)
    )
    num_heads = config.num_heads * (1 + config.is_gated) + 2 * config.num_kv_heads
    x = noise(len(SLOTS), num_heads * config.head_dim, dtype=computed)
    mixed, expected = ours.mix(x.clone()), theirs.mix(x.clone())
    if stored == torch.float32:
        assert_rounded(mixed, expected)
    stored_by = [world.pool.storage.float() for world in (ours, theirs)]
    # A number between two of the pool's dtype may be taken for either.
    step = max(torch.finfo(stored).eps, 1e-5)
    torch.testing.assert_close(*stored_by, rtol=step, atol=1e-5)
    assert stored_by[0][0].eq(0).all(), "the other layer's pages"


@pytest.mark.parametrize("stored", BYTES)
def test_what_8_bits_cannot_hold_becomes_the_largest_that_they_can(stored: torch.dtype) -> None:
    mixer = gqa_mixer(replace(PLAIN, rope=None), "none", torch.float32)
    ours, theirs = (
        GqaWorld(each, None, computed=torch.float32, stored=stored)
        for each in (fusing._fused(mixer), mixer)
    )
    x = noise(len(SLOTS), 8 * PLAIN.head_dim).to(stored).float()
    x[1, ::3] *= 1e6
    ours.mix(x.clone())
    theirs.mix(x.clone())
    numbers = ours.pool.storage.float()
    assert torch.equal(numbers, theirs.pool.storage.float())
    assert numbers.abs().max() == torch.finfo(stored).max


def test_a_nan_is_stored_as_it_is() -> None:
    """It tells that a row is lost, in 8 bits too."""
    mixer = fusing._fused(gqa_mixer(replace(PLAIN, rope=None), "none", torch.float32))
    world = GqaWorld(mixer, None, computed=torch.float32, stored=torch.float8_e5m2)
    x = noise(len(SLOTS), 8 * PLAIN.head_dim)
    x[0] = torch.nan
    world.mix(x)
    lost = world.pool.storage.float().isnan().nonzero()
    assert len(lost) == 4 * PLAIN.head_dim
    assert set(lost[:, 3].tolist()) == {5}


def test_latent_heads_and_their_key_are_rotated_as_torch_does() -> None:
    num_heads, nope, rank, size = 5, 12, 20, 8
    rope = Rope(ROPE, size, device=DEVICE)
    phases = rope.phases(torch.arange(3, 60, device=DEVICE))
    q, rows = noise(57, num_heads, nope + size), noise(57, 30 + rank + size)[:, 30:]
    expected = q.clone(), rows.clone()
    mixer: Any = object.__new__(MlaMixer)
    mixer.rotate_(expected[0][..., nope:], expected[1][:, rank:], phases)
    made: Any = object.__new__(TritonMlaMixer)
    made.rotate_(q[..., nope:], rows[:, rank:], phases)
    torch.testing.assert_close(q, expected[0])
    torch.testing.assert_close(rows, expected[1])


VOCABULARIES = (3, 100, 4100)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_most_likely_token_is_the_lowest_of_equals(vocab_size: int) -> None:
    logits = noise(21, vocab_size + 3)[:, :vocab_size]
    logits[::3] = logits[::3].round()  # equals, in one block and in several
    tokens, is_finite = sampling.most_likely(logits)
    assert is_finite.all()
    assert torch.equal(tokens, logits.argmax(dim=-1))
    assert torch.equal(tokens.cpu(), greedy.most_likely(logits.cpu().contiguous())[0])


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_row_that_is_not_finite_is_noticed(vocab_size: int) -> None:
    logits = noise(20, vocab_size)
    for row, wrong in enumerate((torch.nan, torch.inf, -torch.inf) * 3):
        logits[2 * row, row * 977 % vocab_size] = wrong
    logits[19] = torch.nan
    tokens, is_finite = sampling.most_likely(logits)
    assert is_finite.tolist() == logits.isfinite().all(dim=-1).tolist()
    assert ((tokens >= 0) & (tokens < vocab_size)).all()


def samplers(vocab_size: int, *rows: SamplingParams) -> Iterator[Sampler]:
    """One without kernels, and one with, which have begun the same turns."""
    none = np.zeros(0, dtype=np.int32)
    for has_kernels in (False, True):
        made = Sampler(vocab_size, device=DEVICE, eos_token_ids=(1,), has_kernels=has_kernels)
        for row, params in enumerate(rows):
            made.start(row, SamplingStart(params, 1000 + row, 0, none, none))
        yield made


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_seed_gives_the_same_tokens_with_kernels(vocab_size: int) -> None:
    """At every temperature, beside rows that are greedy, penalized, biased or guessed ahead."""
    rows = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=7.0, min_tokens=5),
        SamplingParams(temperature=1.0, logit_bias=((2, 3.0),), frequency_penalty=0.5),
    ]
    plain, with_kernels = samplers(vocab_size, *rows)
    spans = [SampleSpan(row, 3 + row, 1 + row % 3) for row in range(len(rows))]
    num_positions = sum(span.num_tokens for span in spans)
    inputs = torch.zeros(num_positions, dtype=torch.int64, device=DEVICE)
    drawn: Counter[int] = Counter()
    for index in range(at_depth(2, proof=40)):
        logits = noise(num_positions, vocab_size)
        if index % 2:  # at a low temperature a difference of an ulp decides
            logits = 50 + 1e-5 * logits
        tokens, finite = with_kernels.choose(logits, spans, inputs)
        assert finite.all()
        assert torch.equal(tokens, plain.choose(logits, spans, inputs)[0])
        drawn["not the most likely"] += int((tokens != logits.argmax(dim=-1)).sum())
    assert drawn["not the most likely"] > 5


def test_a_row_draws_what_it_draws_beside_a_truncated_one() -> None:
    plain, with_kernels = samplers(50, SamplingParams(), SamplingParams(top_p=0.5))
    for position in range(at_depth(5, proof=50)):
        logits = noise(2, 50)
        spans = [SampleSpan(row, position) for row in range(2)]
        together = with_kernels.sample(logits, spans)
        assert torch.equal(together, plain.sample(logits, spans))
        assert torch.equal(together[:1], with_kernels.sample(logits[:1], spans[:1]))


class Launches(TorchDispatchMode):
    """Count what a device would launch: operations that are no views, and kernels."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        run = launching.run

        def noted(kernel: Any, *args: Any, **constants: Any) -> None:
            self.counts[kernel.__name__] += 1
            with _disable_current_modes():
                run(kernel, *args, **constants)

        patch.setattr(launching, "run", noted)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().partition(".")[0].removeprefix("aten::")
        if not func.is_view and name not in {"empty", "empty_like", "new_empty", "_unsafe_view"}:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", at_depth(("gpt_oss",), proof=ALL_FAMILIES))
def test_a_family_has_the_logits_it_has_with_torch(family: str, tmp_path: Path) -> None:
    checkpoint, logits = write_checkpoint(family, tmp_path), []
    for backend in ("triton", "torch"):
        talk = Talk(runner_of(checkpoint, backend), {1: 20})
        logits.append(talk.runner.logits(talk.batch({1: 0})))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def launches_of_a_layer(checkpoint: Path) -> Counter[str]:
    """What one more layer launches in a decode step."""
    runner = runner_of(checkpoint)
    talk = Talk(runner, {1: 3})
    batch, counts = talk.batch({1: 0}), []
    decoder = runner._model.decoder
    for layers in (decoder.layers, decoder.layers * 2):
        decoder.layers = layers
        with pytest.MonkeyPatch.context() as patch, Launches(patch) as launches:
            runner.logits(batch)
        counts.append(launches.counts)
    return counts[1] - counts[0]


def test_a_layer_of_qwen3_is_nine_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four products, attention, and one kernel each between them: 23 without these kernels, where
    torch's norms are those for CPUs."""
    checkpoint = write_checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    assert launches_of_a_layer(checkpoint) == {
        "linear": 4,
        "norm_rotate_store": 1,
        "attend_tiles": 1,
        "add_and_norm_rows": 2,
        "gate_rows": 1,
    }
    monkeypatch.setattr(fusing, "fused", lambda decoder: decoder)
    without = launches_of_a_layer(checkpoint).total()
    assert without == 23 if DEVICE.type == "cpu" else without > 16


def test_all_that_a_step_launches_is_compiled_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonBackend, "compile_all", lambda self, *, has_sinks: None)
    runner = runner_of(write_checkpoint("qwen3", tmp_path, num_hidden_layers=1))
    stored = [pool.storage.clone() for pool in runner.pools.values()]
    launched: list[set[Any]] = []
    launch = launching.run

    def noted(kernel: Any, *args: Any, **constants: Any) -> None:
        launched[-1].add((kernel.__name__, *constants.items()))
        launch(kernel, *args, **constants)

    monkeypatch.setattr(launching, "run", noted)
    launched.append(set())
    runner.compile_kernels()
    for before, pool in zip(stored, runner.pools.values(), strict=True):
        pages = pool.storage.movedim(pool.page_axis, 0)
        assert torch.equal(pages[1:], before.movedim(pool.page_axis, 0)[1:])
    rows = Rows(runner, 16)
    launched.append(set())
    rows.run(rows.row(1, prompt(5, 1)), rows.row(2, prompt(1, 2), params=SamplingParams(), seed=3))
    rows.run(rows.row(1, None, start=5))
    compiled, used = launched
    assert len({name for name, *_ in used}) == 8
    assert used <= compiled


def test_a_fused_decoder_shares_its_weights_and_leaves_the_other_as_it_is(tmp_path: Path) -> None:
    """Of a family with experts, and a norm and a rotation of latents."""
    directory = write_checkpoint("deepseek_v3", tmp_path, num_hidden_layers=2)
    config = load_config(directory)
    plain = load_decoder(directory, config, device=DEVICE, dtype=torch.float32)
    layers, norm = plain.layers, plain.norm
    made = fusing.fused(plain)
    assert (plain.layers, plain.norm, plain.add_and_norm) == (layers, norm, plain_add_and_norm)
    assert made.norm.weight is norm.weight
    for (ours, *_), (theirs, *_) in zip(made.layers, layers, strict=True):
        ours_mixer, mixer = cast(MlaMixer, ours.mixer), cast(MlaMixer, theirs.mixer)
        assert isinstance(ours_mixer, TritonMlaMixer)
        assert ours_mixer.weights.down is mixer.weights.down
        assert ours_mixer.weights.norm.weight is mixer.weights.norm.weight
        assert ours_mixer.config is mixer.config
