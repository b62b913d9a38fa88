"""The parts of a layer, each against its formula."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from session_server.models.config import (
    ExpertLayout,
    GateConfig,
    GateKind,
    MlpConfig,
    MoeConfig,
    RopeConfig,
)
from session_server.models.layers.linear import (
    MIN_PACKED_ELEMENTS,
    PackedLinear,
    PlainLinear,
    make_linear,
)
from session_server.models.layers.mlp import make_gate
from session_server.models.layers.moe import MixtureOfExperts, SerialExperts
from session_server.models.layers.norm import ProjectionNorm, RmsNorm
from session_server.models.layers.rope import Rope, interleave_pairs
from session_server.models.layers.routing import Router

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_weights_give_the_same_product(num_tokens: int, has_bias: bool) -> None:
    weight, x = torch.randn(1024, 512), torch.randn(num_tokens, 512)
    bias = torch.randn(1024) if has_bias else None
    torch.testing.assert_close(
        PackedLinear(weight, bias)(x), functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4
    )


def test_only_weights_worth_packing_are_packed() -> None:
    outputs = MIN_PACKED_ELEMENTS // 512
    assert isinstance(make_linear(torch.zeros(outputs, 512)), PackedLinear)
    assert isinstance(make_linear(torch.zeros(outputs - 1, 512)), PlainLinear)
    assert isinstance(make_linear(torch.zeros(outputs, 512, dtype=torch.bfloat16)), PlainLinear)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_the_norm_is_root_mean_square(scale: float, eps: float) -> None:
    x, weight = scale * torch.randn(5, 48), torch.randn(48)
    expected = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    norm = RmsNorm(weight, eps)
    torch.testing.assert_close(norm(x), expected, rtol=2e-6, atol=1e-6)
    norm.apply_(x)
    torch.testing.assert_close(x, expected, rtol=2e-6, atol=1e-6)


def test_the_norm_of_nothing_is_nothing() -> None:
    assert not RmsNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)).any()


def test_norm_in_half_precision_stays_close_to_full() -> None:
    x, weight = torch.randn(5, 48), torch.randn(48)
    exact = RmsNorm(weight, 1e-6)(x)
    half = RmsNorm(weight.bfloat16(), 1e-6)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0.03, atol=0.03)


def test_heads_of_a_fused_norm_have_their_own_gains() -> None:
    x, gains = torch.randn(3, 4, 16), torch.randn(4, 16)
    fused = RmsNorm(gains, 1e-6)(x)
    for head in range(4):
        torch.testing.assert_close(fused[:, head], RmsNorm(gains[head], 1e-6)(x[:, head]))


def test_a_norm_over_projections_knows_no_heads() -> None:
    heads, q_gain, k_gain = torch.randn(5, 6, 8), torch.randn(32), torch.randn(16)
    q, k = heads[:, :4].flatten(1), heads[:, 4:].flatten(1)
    expected = torch.cat((RmsNorm(q_gain, 1e-6)(q), RmsNorm(k_gain, 1e-6)(k)), dim=1)
    fused = torch.randn(5, 8, 8)
    fused[:, :6] = heads
    norm = ProjectionNorm(RmsNorm(q_gain, 1e-6), RmsNorm(k_gain, 1e-6), num_heads=4)
    norm.apply_(fused[:, :6])
    torch.testing.assert_close(fused[:, :6].flatten(1), expected)


GATES = {
    GateKind.SILU: lambda gate, up: gate * torch.sigmoid(gate) * up,
    GateKind.GELU_TANH: lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    GateKind.CLAMPED: lambda gate, up: (
        gate.clamp(max=0.7) * torch.sigmoid(1.7 * gate.clamp(max=0.7)) * (up.clamp(-0.7, 0.7) + 1)
    ),
}


@pytest.mark.parametrize("kind", GateKind)
def test_a_gate_is_its_formula(kind: GateKind) -> None:
    gate, up = torch.randn(2, 7, 16)
    made = make_gate(GateConfig(kind, alpha=1.7, swiglu_limit=0.7))
    torch.testing.assert_close(made(gate.clone(), up.clone()), GATES[kind](gate, up))


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
def test_a_mixture_is_the_weighted_sum_of_the_best_experts(
    *, num_tokens: int, is_normalised: bool, has_shared: bool
) -> None:
    router, x = torch.randn(5, 16), torch.randn(num_tokens, 16)
    calls: list[int] = []
    matrices = torch.randn(5, 16, 16)

    def expert(index: int) -> Callable[[Tensor], Tensor]:
        def call(rows: Tensor) -> Tensor:
            calls.append(index)
            return rows @ matrices[index]

        return call

    config = MoeConfig(5, 2, MlpConfig(16), is_normalised, ExpertLayout.QWEN)
    common = torch.randn(16, 16) if has_shared else torch.zeros(16, 16)
    mixture = MixtureOfExperts(
        Router(PlainLinear(router, None), config, None),
        SerialExperts([expert(index) for index in range(5)]),
        PlainLinear(common.T, None) if has_shared else None,
    )
    shares = (x @ router.T).softmax(-1)
    for token, mixed in enumerate(mixture(x)):
        best = sorted(range(5), key=lambda index: -float(shares[token, index]))[:2]
        total = float(shares[token, best].sum()) if is_normalised else 1.0
        expected = sum(shares[token, e] / total * (x[token] @ matrices[e]) for e in best)
        torch.testing.assert_close(mixed, expected + x[token] @ common, rtol=1e-4, atol=1e-5)
    assert len(calls) == len(set(calls)), "an expert runs once, whatever the number of tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotating_interleaved_pairs_is_rotating_halves(dtype: torch.dtype) -> None:
    head_dim, positions = 16, torch.tensor([0, 1, 5, 4000])
    heads = torch.randn(4, 3, head_dim)
    rope = Rope(RopeConfig(10_000.0), head_dim, device=CPU)
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
    first, second = heads.chunk(2, dim=-1)
    expected = heads * cos + torch.cat((-second, first), dim=-1) * sin

    order = interleave_pairs(torch.arange(head_dim), head_dim)
    ours = heads[..., order].to(dtype)
    rope.rotate_(ours, rope.phases(positions))
    tolerance = 2e-4 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(ours.float(), expected[..., order], rtol=0, atol=tolerance)


def test_interleaving_keeps_heads_apart() -> None:
    rows = torch.arange(12)
    assert interleave_pairs(rows, 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize("num_heads", [1, 2])
def test_what_is_not_rotated_stays_where_it_is(num_heads: int) -> None:
    rows = torch.arange(8 * num_heads)
    expected = [8 * head + i for head in range(num_heads) for i in (0, 2, 1, 3, 4, 5, 6, 7)]
    assert interleave_pairs(rows, 8, rotary_dim=4).tolist() == expected
    assert rows.equal(torch.arange(8 * num_heads))


def test_the_attention_factor_scales_cosines_and_sines() -> None:
    rope = Rope(RopeConfig(100.0, attention_factor=1.5), 4, device=CPU)
    lengths = rope.phases(torch.tensor([0, 3])).abs()
    assert all(math.isclose(value, 1.5, rel_tol=1e-6) for value in lengths.flatten().tolist())
