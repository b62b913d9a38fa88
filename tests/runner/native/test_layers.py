"""What a layer must be before a step computes with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch

from session_server.models.bounds import MAX_CONV_WIDTH
from session_server.runner.native import WeightFormat, _native
from session_server.runner.native.linear import pack

SIZE: Final = 32
ONES: Final = torch.ones(1).numpy()


def linear(outputs: int, inputs: int = SIZE, format: WeightFormat = "float32") -> _native.Linear:
    return pack(torch.ones(outputs, inputs), format)


def short_conv(width: int) -> object:
    taps = torch.ones(width, SIZE).numpy()
    return _native.ShortConv(inputs=linear(3 * SIZE), output=linear(SIZE), taps=taps, bias=None)


def gated_delta(width: int) -> object:
    return _native.GatedDelta(
        inputs=linear(4 * SIZE + 2),
        output=linear(SIZE),
        taps=torch.ones(width, 3 * SIZE).numpy(),
        step_bias=ONES,
        rates=ONES,
        norm=_native.Norm(torch.ones(SIZE).numpy(), 1e-6),
        sizes=(1, 1, SIZE, SIZE),
    )


def mamba2(width: int) -> object:
    return _native.Mamba2(
        inputs=linear(4 * SIZE + 1),
        output=linear(SIZE),
        taps=torch.ones(width, 3 * SIZE).numpy(),
        conv_bias=None,
        of_heads=(ONES, ONES, ONES),
        norm=_native.Norm(torch.ones(1, SIZE).numpy(), 1e-6),
        sizes=(1, SIZE, 1, SIZE),
        limits=(0.0, 1.0),
    )


@pytest.mark.parametrize("mixer", [short_conv, gated_delta, mamba2])
def test_a_convolution_has_a_width_that_steps_have_memory_for(
    mixer: Callable[[int], object],
) -> None:
    mixer(1)
    mixer(MAX_CONV_WIDTH)
    for width in (0, MAX_CONV_WIDTH + 1, 1024):
        with pytest.raises(ValueError, match="1 to 16"):
            mixer(width)


def expert(
    gate_up: WeightFormat = "int8", down: WeightFormat = "int8", inner: int = SIZE
) -> _native.GatedMlp:
    matrices = linear(2 * inner, format=gate_up), linear(SIZE, inner, format=down)
    return _native.GatedMlp(*matrices, "silu", 1.0, 0.0)


def mixture(*experts: _native.GatedMlp) -> _native.Experts:
    return _native.Experts(
        router=linear(max(1, len(experts))),
        experts=experts,
        shared=None,
        num_experts_per_tok=1,
        sigmoid_and_norm=(False, False),
        groups=(1, 1),
        routed_scaling_factor=1.0,
        e_score_correction_bias=None,
    )


def test_experts_of_a_layer_are_alike() -> None:
    mixture(expert(), expert())
    mixture(*[expert("float32", "int8")] * 2)
    other = (
        expert(gate_up="float32"),
        expert(down="float32"),
        expert(gate_up="int4"),
        expert(inner=2 * SIZE),
    )
    for one in other:
        for experts in ((expert(), one), (one, expert())):
            with pytest.raises(ValueError, match="one format and one size"):
                mixture(*experts)
    with pytest.raises(ValueError, match="at least one"):
        mixture()


def gqa(
    qkv: tuple[int, int] = (4 * SIZE, SIZE),
    output: tuple[int, int] = (SIZE, 2 * SIZE),
    heads: tuple[int, int, int] = (2, 1, SIZE),
    **options: Any,
) -> _native.GroupedQuery:
    chosen = {"rope": 0, "rotary_dim": SIZE, "head_norm": None, "sinks": None, **options}
    return _native.GroupedQuery(
        qkv=linear(*qkv),
        output=linear(*output),
        heads=heads,
        is_gated=False,
        rule=_native.AttentionRule(1.0),
        projection_norm=None,
        **chosen,
    )


def add(
    mixer: _native.GroupedQuery, ffn: _native.GatedMlp, size: int = SIZE, pool: int = 0
) -> None:
    norm = _native.Norm(torch.ones(size).numpy(), 1e-6)
    rope = (torch.ones(SIZE // 2).numpy(), 1.0)
    decoder = _native.Decoder(torch.ones(3, SIZE), 1.0, norm, [rope])
    storage = torch.zeros(1, 2, 1, 4, 16, SIZE)
    decoder.add_pool(storage, False, 0, np.zeros((2, 4), np.int32))
    norms = norm, _native.After()
    decoder.add_layer(norms, mixer, norms, ffn, (pool, 0))


def mlp(
    gate_up: tuple[int, int] = (8, SIZE), down: tuple[int, int] = (SIZE, 4)
) -> _native.GatedMlp:
    return _native.GatedMlp(linear(*gate_up), linear(*down), "silu", 1.0, 0.0)


def test_the_parts_of_a_layer_fit_each_other() -> None:
    add(gqa(), mlp())
    ones = torch.ones(SIZE).numpy()
    for misfit, words in (
        (gqa(qkv=(3 * SIZE, SIZE)), r"qkv_proj is \[96, 32\] and not \[128, 32\]"),
        (gqa(qkv=(4 * SIZE, SIZE // 2)), "qkv_proj"),
        (gqa(output=(SIZE, SIZE)), "o_proj"),
        (gqa(heads=(3, 2, SIZE)), "heads are groups"),
        (gqa(heads=(2, 1, 0)), "heads are groups"),
        (gqa(rope=1), "its rotary embeddings exist"),
        (gqa(rotary_dim=SIZE // 2), "a pair has a frequency"),
        (gqa(rotary_dim=2 * SIZE), "no more is rotated"),
        (gqa(head_norm=_native.Norm(ones, 1e-6)), "a norm has a weight"),
        (gqa(sinks=ones), "a head has a sink"),
        (gqa((8 * SIZE, SIZE), (SIZE, 4 * SIZE), (4, 2, SIZE)), "its pool keeps its heads"),
    ):
        with pytest.raises(ValueError, match=f"does not fit: .*{words}"):
            add(misfit, mlp())
    for wrong in (mlp((9, SIZE)), mlp(down=(SIZE, 3)), mlp(down=(SIZE + 1, 4))):
        with pytest.raises(ValueError, match="_proj is"):
            add(gqa(), wrong)
    with pytest.raises(ValueError, match="a norm has a weight"):
        add(gqa(), mlp(), size=SIZE - 1)
    with pytest.raises(ValueError, match="its pool exists"):
        add(gqa(), mlp(), pool=1)


def test_a_team_larger_than_the_system_allows_is_refused() -> None:
    script = """
import resource
import session_server.runner.native as native
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
try:
    native.set_num_threads(1024)
except ValueError as error:
    print(error)
native.set_num_threads(2)
print(native._native.num_threads())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    refusal, num_threads = ran.stdout.splitlines()
    assert refusal.startswith("--threads 1024: the system starts no more threads")
    assert num_threads == "2"
