"""Experts by kernels in Triton against torch, token by token and expert by expert: in Triton's
interpreter, and on a GPU with TEST_DEVICE=cuda.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from session_server.models.config import ExpertLayout, GateConfig, GateKind, MlpConfig, MoeConfig
from session_server.models.layers.block_weight import BLOCK, BlockWeight, CodedWeight, Fp8Weight
from session_server.models.layers.linear import make_linear
from session_server.models.registry import load_config
from session_server.runner.capacity import MemoryLimits
from session_server.runner.layer_factories import ExpertMatrices
from session_server.runner.loader import RunnerOptions, layer_factories, load_runner
from session_server.runner.mxfp4 import Mxfp4Weight
from session_server.runner.weight_rows import as_dense
from session_server.runner.weights import load_decoder
from tests.depth import at_depth, each_value
from tests.oracle.checkpoints import to_mxfp4, write_checkpoint
from tests.oracle.device import DEVICE
from tests.oracle.test_packed import FORMATS, leave_in_floats, write_experts

pytest.importorskip("triton", reason="triton has no wheel for this machine")

from session_server.attention.triton import launching
from session_server.runner.triton import packing
from session_server.runner.triton.expert_kernels import (
    down_experts,
    gate_up_experts,
    lay_out_choices,
    sum_choices,
)
from session_server.runner.triton.experts import (
    GroupedExperts,
    every_shape,
    most_tiles,
    stack_experts,
    tile_shape,
)
from session_server.runner.triton.packing import CodeFormat

ALPHA, LIMIT = 1.7, 0.7

Matrix = tuple[Tensor, Tensor | None]
Chosen = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Layer:
    """A layer of experts. `num_used`: experts that tokens are sent to."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    kind: GateKind = GateKind.SILU
    bias: bool = False
    num_used: int | None = None

    @property
    def config(self) -> MoeConfig:
        gate = GateConfig(self.kind, ALPHA, LIMIT)
        expert = MlpConfig(self.inner, bias=self.bias, gate=gate)
        return MoeConfig(self.num_experts, self.top_k, expert, True, ExpertLayout.QWEN)

    def matrices(self) -> list[list[Matrix]]:
        sizes = ((2 * self.inner, self.hidden), (self.hidden, self.inner))
        return [
            [
                (noise(*size) / size[1] ** 0.5, noise(size[0]) if self.bias else None)
                for size in sizes
            ]
            for _ in range(self.num_experts)
        ]

    def choices(self, num_tokens: int) -> Chosen:
        """Weights and ids, no expert twice for a token."""
        scores = torch.rand(num_tokens, self.num_experts)
        scores[:, self.num_used :] = -1
        ids = scores.topk(self.top_k).indices
        return torch.rand(num_tokens, self.top_k).to(DEVICE), ids.to(DEVICE)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE)


def activated(kind: GateKind, gate: Tensor, up: Tensor) -> Tensor:
    """As the families define it."""
    if kind is GateKind.CLAMPED:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(gate * ALPHA)
    gelu = functional.gelu(gate, approximate="tanh")
    return (functional.silu(gate) if kind is GateKind.SILU else gelu) * up


def expected(kind: GateKind, matrices: Sequence[Sequence[Matrix]], x: Tensor, of: Chosen) -> Tensor:
    """Each token by itself, in float32."""
    mixed = torch.zeros_like(x)
    for token, (weights, ids) in enumerate(zip(*of, strict=True)):
        for weight, expert in zip(weights, ids.tolist(), strict=True):
            gate_up, down = matrices[expert]
            gate, up = functional.linear(x[token], *gate_up).chunk(2)
            mixed[token] += weight * functional.linear(activated(kind, gate, up), *down)
    return mixed


LAYERS = {
    "one token": (1, Layer(5, 3, 40, 24)),
    "few tokens, gelu": (6, Layer(4, 2, 160, 136, GateKind.GELU_TANH, num_used=3)),
    "more than one look": (70, Layer(2, 2, 24, 96, GateKind.CLAMPED, bias=True)),
    "all to one": (40, Layer(3, 1, 136, 72, num_used=1)),
    "tiles in groups": (5, Layer(12, 2, 16, 80, bias=True)),
    **at_depth(
        {},
        proof={
            "many looks": (2500, Layer(3, 2, 24, 40)),
        }
        | {
            f"{num_tokens} tokens, {kind.value}, {bias=}": (
                num_tokens,
                Layer(6, 3, 300, 200, kind, bias=bias, num_used=5),
            )
            for num_tokens in (1, 2, 17, 100)
            for kind in GateKind
            for bias in (False, True)
        },
    ),
}


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", LAYERS)
def test_a_token_gets_the_weighted_sum_of_its_experts(name: str) -> None:
    num_tokens, layer = LAYERS[name]
    matrices, x, chosen = (
        layer.matrices(),
        noise(num_tokens, layer.hidden),
        layer.choices(num_tokens),
    )
    experts = stack_experts(layer.config, matrices, make_linear)
    mixed = expected(layer.kind, matrices, x, chosen)
    torch.testing.assert_close(experts(x, *chosen, None), mixed, rtol=1e-4, atol=1e-4)
    if num_tokens <= 6:
        shared = noise(num_tokens, layer.hidden)
        beside = shared.clone()
        added = experts(x, *chosen, beside)
        assert added is beside
        torch.testing.assert_close(added, mixed + shared, rtol=1e-4, atol=1e-4)


def mxfp4(outputs: int, inputs: int) -> Mxfp4Weight:
    """Random codes, of numbers about as large as those of `Layer.matrices`."""
    blocks = torch.randint(0, 256, (outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(119, 124, (outputs, inputs // 32), dtype=torch.uint8)
    return Mxfp4Weight(blocks.to(DEVICE), scales.to(DEVICE), torch.bfloat16)


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "inner"), at_depth([(3, 160, 96)], proof=[(3, 64, 96), (50, 288, 160)])
)
def test_mxfp4_is_multiplied_as_it_is_stored(num_tokens: int, hidden: int, inner: int) -> None:
    """What is off is what is rounded to bfloat16, which the interpreter does towards zero."""
    layer = Layer(4, 2, hidden, inner, GateKind.CLAMPED, bias=True)
    x, (weights, ids) = noise(num_tokens, hidden).bfloat16(), layer.choices(num_tokens)
    sizes = ((2 * inner, hidden), (hidden, inner))
    matrices = [[(mxfp4(*size), noise(size[0]).bfloat16()) for size in sizes] for _ in range(4)]
    experts = stack_experts(layer.config, matrices, make_linear)
    assert experts.gate_up.weights.dtype == experts.down.weights.dtype == torch.uint8
    ours = experts(x, weights.bfloat16(), ids, None).float()
    dense = [[(weight.dense().float(), bias.float()) for weight, bias in each] for each in matrices]
    mixed = expected(layer.kind, dense, x.float(), (weights.bfloat16().float(), ids))
    assert (ours - mixed).norm() <= 0.01 * mixed.norm()


def coded(kind: CodeFormat, outputs: int, inputs: int) -> CodedWeight | Tensor:
    """Random codes of every value, of numbers about as large as those of `Layer.matrices`. Scales
    differ from output to output and from group to group; 16 bits hold them. Integers come in whole
    blocks: of other inputs there are numbers, as of a checkpoint."""
    if kind == "fp8":
        codes = (noise(outputs, inputs) * 30).to(torch.float8_e4m3fn).view(torch.uint8)
        return Fp8Weight(codes, torch.rand(outputs, -(-inputs // 128), device=DEVICE) * 0.01)
    if inputs % BLOCK:
        return noise(outputs, inputs) / inputs**0.5
    num_bits = 8 if kind == "int8" else 4
    low, high = (-128, 128) if num_bits == 8 else (0, 16)
    integers = torch.randint(low, high, (outputs, inputs), device=DEVICE)
    scales = torch.rand(outputs, inputs // BLOCK, device=DEVICE) * 4 / high / inputs**0.5
    scales = scales.half().float()
    minimums = (scales * 7.4).half().float() if kind == "int4" else None
    codes = integers.to(torch.int8 if num_bits == 8 else torch.uint8)
    return BlockWeight(codes, scales, minimums, num_bits)


CODED_LAYERS = {
    "one token": (1, Layer(5, 3, 64, 96)),
    "a kind beside numbers": (3, Layer(4, 2, 160, 48, GateKind.GELU_TANH, num_used=3)),
    "biases, all to one": (70, Layer(2, 1, 32, 96, GateKind.CLAMPED, bias=True, num_used=1)),
    **at_depth(
        {},
        proof={
            f"{num_tokens} tokens, {hidden}, {inner}": (num_tokens, Layer(6, 3, hidden, inner))
            for num_tokens in (2, 33, 70, 150)
            for hidden, inner in ((288, 160), (128, 224))
        },
    ),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    each_value(("int4", "int4 without minimums", "int8", "fp8"), [*CODED_LAYERS]),
)
def test_codes_are_multiplied_as_the_numbers_they_stand_for(kind: CodeFormat, name: str) -> None:
    if kind == "fp8" and not packing.has_e4m3(DEVICE):
        pytest.skip("this GPU has no such dtype")
    num_tokens, layer = CODED_LAYERS[name]
    x, chosen = noise(num_tokens, layer.hidden), layer.choices(num_tokens)
    matrices = [
        [(coded(kind, *weight.shape), bias) for weight, bias in each] for each in layer.matrices()
    ]
    experts = stack_experts(layer.config, iter(matrices), make_linear)
    assert experts.gate_up.format == kind
    assert experts.down.format == (kind if kind == "fp8" or layer.inner != 48 else "numbers")
    dense = [[(as_dense(weight), bias) for weight, bias in each] for each in matrices]
    mixed = expected(layer.kind, dense, x, chosen)
    shared = noise(num_tokens, layer.hidden)
    ours = experts(x, *chosen, shared.clone()) - shared
    assert (ours - mixed).norm() <= 1e-5 * mixed.norm()
    assert mixed.std() > 0.01, "sums that say nothing"


def test_a_checkpoint_in_mxfp4_says_the_same_kept_and_dequantized(tmp_path: Path) -> None:
    directory = write_checkpoint(
        "gpt_oss", tmp_path, hidden_size=64, intermediate_size=96, num_hidden_layers=1
    )
    to_mxfp4(directory)
    config, x = load_config(directory), noise(3, 64).bfloat16()
    kept, dense = (
        load_decoder(
            directory,
            config,
            device=DEVICE,
            dtype=torch.bfloat16,
            factories=layer_factories(backend, "bfloat16"),
        )
        .layers[0][0]
        .ffn(x)
        .float()
        for backend in ("triton", "torch")
    )
    assert (kept - dense).norm() <= 0.02 * dense.norm()


def test_what_is_stacked_is_not_copied_and_what_is_loaded_one_by_one_is_held_once() -> None:
    layer = Layer(3, 1, 8, 4, bias=True)
    gate_up, down, bias = noise(3, 8, 8), noise(3, 8, 4), noise(3, 8)

    def rows() -> Iterable[ExpertMatrices]:
        for index in range(3):
            yield [(gate_up[index], bias[index]), (down[index].clone(), bias[index].clone())]

    experts = stack_experts(layer.config, rows(), make_linear)
    assert experts.gate_up.weights.data_ptr() == gate_up.data_ptr()
    assert experts.gate_up.bias is not None
    assert experts.gate_up.bias.data_ptr() == bias.data_ptr()
    assert experts.down.weights.equal(down)
    assert experts.down.weights.untyped_storage().nbytes() == down.nbytes
    assert experts.down.bias is not None
    assert experts.down.bias.equal(bias)


@pytest.mark.parametrize("num_experts", [1, 4, 60])
def test_tiles_suffice_however_choices_fall(num_experts: int) -> None:
    random = Random(num_experts)
    for _ in range(300):
        counts = [random.choice([0, 0, 1, random.randint(0, 200)]) for _ in range(num_experts)]
        for num_rows in (16, 32, 64, 128):
            tiles = sum(-(-count // num_rows) for count in counts)
            assert tiles <= most_tiles(sum(counts), num_experts, num_rows) <= sum(counts)


@pytest.mark.parametrize("layer", [Layer(128, 8, 64, 32), Layer(8, 2, 64, 32)])
def test_compiling_all_launches_whatever_a_forward_does(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: set[tuple[object, ...]] = set()

    def noted(kernel: object, grid: tuple[int, ...], *args: object, **constants: object) -> None:
        dtypes = tuple(arg.dtype for arg in args if isinstance(arg, Tensor))
        launched.add((kernel, dtypes, *constants.items()))

    monkeypatch.setattr(launching, "run", noted)
    monkeypatch.setattr(launching, "IS_INTERPRETED", False)
    experts: GroupedExperts = stack_experts(layer.config, layer.matrices(), make_linear)
    experts.compile_all(layer.hidden, torch.float32)
    compiled = launched.copy()
    shapes = set()
    for num_tokens in (*range(1, 40), 64, 100, 200, 500, 1000, 4000):
        num_choices = num_tokens * layer.top_k
        shapes.add(tile_shape(num_choices, layer.num_experts, every_shape(torch.float32)))
        experts(noise(num_tokens, layer.hidden), *layer.choices(num_tokens), None)
    assert launched == compiled
    assert shapes == {*every_shape(torch.float32)}


def test_a_model_that_is_served_by_triton_has_its_experts_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = write_experts(tmp_path / "twin", num_hidden_layers=2, mlp_only_layers=[])
    directory = FORMATS["gptq"].write(twin, tmp_path / "packed")
    leave_in_floats(directory, twin, "layers.1.mlp.experts.0.down_proj")
    memory = MemoryLimits(max_total_tokens=64)
    options = RunnerOptions(
        page_size=16, num_rows=1, device=str(DEVICE), backend="triton", memory=memory
    )
    runner = load_runner(directory, options).runner
    launched: set[object] = set()

    def noted(kernel: object, *_: object, **constants: object) -> None:
        launched.add((kernel, constants.get("FORMAT")))

    monkeypatch.setattr(launching, "run", noted)
    runner.compile_kernels()
    of_both_layers = {(gate_up_experts, "int4"), (down_experts, "int4"), (down_experts, "numbers")}
    assert of_both_layers | {(lay_out_choices, None), (sum_choices, None)} <= launched
