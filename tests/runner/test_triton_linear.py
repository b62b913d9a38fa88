"""Linears of codes by the kernels in Triton are those of the weights that the codes stand for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from session_server.attention.triton import launching
from session_server.models.layers.block_weight import BlockWeight, CodedWeight, Fp8Weight
from session_server.models.layers.linear import PlainLinear
from tests.depth import at_depth, cases
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import reference_logits, write_checkpoint
from tests.oracle.device import DEVICE
from tests.oracle.gguf_files import write_gguf
from tests.oracle.last_logits import last_logits
from tests.oracle.test_gguf import K_SIZES
from tests.oracle.test_packed import FORMATS, SIZES

pytest.importorskip("triton", reason="triton has no wheel for this machine")

from session_server.runner.triton.linear import TritonLinear, TritonLinears, tile_shapes
from session_server.runner.triton.packing import pack

SHAPES: Final = ((1, 32), (65, 96), *at_depth((), proof=((40, 544), (130, 1056))))
"""Outputs and inputs: one block, halves of 4 bits that are not whole blocks, splits with a rest."""

NUM_ROWS: Final = at_depth((1, 17, 140), proof=(1, 5, 16, 17, 32, 33, 64, 65, 128, 140))
KINDS: Final = ("int4", "int4 without minimums", "int8", "fp8")
EPSILON: Final = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Rounding, or cutting off as the interpreter does."""


def coded(kind: str, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> CodedWeight:
    """Codes of every value, whose scales and minimums 16 bits hold."""
    (outputs, inputs), generator = shape, torch.Generator().manual_seed(0)
    if kind == "fp8":
        inputs += 98  # of two blocks at least, one of which ends within a row
        numbers = torch.randn((outputs, inputs), generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand((outputs, -(-inputs // 128)), generator=generator)
        return Fp8Weight(numbers.view(torch.uint8), scales, dtype).to(DEVICE)
    scales = torch.rand((outputs, inputs // 32), generator=generator).half().float()
    minimums = (scales * 7.4).half().float() if kind == "int4" else None
    num_bits = 8 if kind == "int8" else 4
    low, high = (-128, 128) if num_bits == 8 else (0, 16)
    codes = torch.randint(low, high, shape, generator=generator)
    codes = codes.to(torch.int8 if num_bits == 8 else torch.uint8)
    return BlockWeight(codes, scales, minimums, num_bits, dtype).to(DEVICE)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "shape", "num_rows", "dtype", "has_bias"),
    cases(KINDS, SHAPES, NUM_ROWS, EPSILON, (True, False)),
)
def test_codes_are_multiplied_as_the_numbers_they_stand_for(
    kind: str, shape: tuple[int, int], num_rows: int, dtype: torch.dtype, *, has_bias: bool
) -> None:
    weight = coded(kind, shape, dtype)
    x = random(num_rows, weight.shape[1]).to(dtype)
    bias = random(shape[0], seed=2).to(dtype) if has_bias else None
    y = TritonLinear(pack(weight), bias)(x)
    assert y.dtype == dtype
    x, numbers = x.double(), weight.dequantize().double()
    expected = functional.linear(x, numbers, None if bias is None else bias.double())
    # The result is rounded, and a GPU rounds the numbers; the interpreter computes in 32 bits.
    of_numbers = 2e-6 if launching.IS_INTERPRETED else EPSILON[dtype]
    bound = EPSILON[dtype] * expected.abs() + of_numbers * (x.abs() @ numbers.abs().T) + 1e-6
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", at_depth(("int4",), proof=KINDS))
def test_a_row_of_a_decode_step_does_not_notice_the_others(kind: str) -> None:
    weight = coded(kind, (65, 1056))
    x = random(16, weight.shape[1])
    linear = TritonLinear(pack(weight), random(65, seed=2))
    together = linear(x)
    assert together.sub(functional.linear(x, weight.dense(), linear.bias)).abs().max() < 1e-3
    assert linear(x[:1]).equal(together[:1])
    assert linear(x[3:14]).equal(together[3:14])


def test_rows_may_be_none_and_of_any_layout() -> None:
    linear = TritonLinear(pack(coded("int4", (40, 64))), None)
    x = random(3, 128)
    assert linear(x[:0, :64]).shape == (0, 40)
    assert linear(x[:, ::2]).equal(linear(x[:, ::2].contiguous()))
    assert linear(x[None, :, 64:]).equal(linear(x[:, 64:].contiguous())[None])


def test_what_is_no_number_shows_and_stays_with_its_row() -> None:
    linear = TritonLinear(pack(coded("int8", (20, 64))), None)
    x = random(3, 64)
    healthy = linear(x)
    x[1, 40] = float("nan")
    sick = linear(x)
    assert sick[1].isnan().all()
    assert sick[::2].equal(healthy[::2])


def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What decides what is compiled of each launch from now on."""
    seen: list[tuple[object, ...]] = []
    run = launching.run

    def note(kernel: Any, grid: tuple[int, ...], *args: object, **constants: object) -> None:
        kinds = tuple(
            arg.dtype if isinstance(arg, Tensor) else name in kernel_sizes and int(arg) % 16 == 0
            for name, arg in zip(kernel.arg_names, args, strict=False)
        )
        seen.append((kernel, *kinds, *sorted(constants.items())))
        run(kernel, grid, *args, **constants)

    kernel_sizes = ("num_outputs", "num_inputs", "width")
    monkeypatch.setattr(launching, "run", note)
    return seen


def test_all_that_is_launched_was_compiled_with_the_first_weight_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, linears = launched(monkeypatch), TritonLinears()
    first = linears(coded("int4", (17, 1056), torch.bfloat16))
    compiled = {*seen}
    assert len(compiled) == 2 * len(tile_shapes(torch.bfloat16)) + 1
    seen.clear()
    alike = linears(coded("int4", (65, 96), torch.bfloat16))
    assert not seen
    first(random(1, 1056).bfloat16())
    for num_rows in (1, 20, 40, 130):
        alike(random(num_rows, 96).bfloat16())
    assert {*seen} <= compiled
    seen.clear()
    linears(coded("int8", (17, 96), torch.bfloat16))
    assert seen
    assert isinstance(linears(random(4, 4)), PlainLinear)


EXACT_INPUTS: Final = tuple(name for name in FORMATS if not name.endswith("by_token"))


@pytest.fixture(params=at_depth(("gptq", "Q8_0"), proof=(*EXACT_INPUTS, "Q4_0", "Q8_0", "Q4_K")))
def quantized(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A checkpoint of codes, and one of the numbers they stand for."""
    if request.param in FORMATS:
        twin = write_checkpoint("qwen2", tmp_path / "twin", **SIZES)
        yield FORMATS[request.param].write(twin, tmp_path / "packed"), twin
    else:
        from gguf import GGMLQuantizationType

        kind = GGMLQuantizationType[request.param]
        sizes = K_SIZES if kind.name.endswith("K") else SIZES
        twin = write_checkpoint("llama", tmp_path / "twin", **sizes)
        yield write_gguf(twin, tmp_path / "model.gguf", lambda _: kind), twin


def test_a_quantized_checkpoint_is_the_model_its_weights_stand_for(
    quantized: tuple[Path, Path],
) -> None:
    path, twin = quantized
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 12).astype(np.int32)
    ours, expected = last_logits(path, tokens, backend="triton"), reference_logits(twin, tokens)[-1]
    # Scales and minimums that are products are rounded to 16 bits.
    assert ours.sub(expected).abs().max() <= 0.01 * expected.std()
