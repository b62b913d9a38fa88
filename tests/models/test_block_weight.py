"""Codes of blocks: what they mean, and rows of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from session_server.models.layers.block_weight import CHUNK_ELEMENTS, BlockWeight, Fp8Weight
from session_server.models.layers.linear import make_linear
from session_server.models.layers.rope import interleave_pairs
from session_server.runner.weight_rows import join_rows, reorder_rows


def four_bits(outputs: int, inputs: int, seed: int = 0) -> BlockWeight:
    generator = torch.Generator().manual_seed(seed)
    shape = (outputs, inputs // 32)
    return BlockWeight(
        codes=torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8),
        scales=torch.rand(shape, generator=generator),
        minimums=torch.rand(shape, generator=generator),
        num_bits=4,
    )


def eight_bits(outputs: int, inputs: int, seed: int = 0) -> BlockWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
    return BlockWeight(codes, torch.rand((outputs, inputs // 32), generator=generator), None, 8)


def test_a_number_is_its_scale_times_its_code_minus_its_minimum() -> None:
    weight, whole = four_bits(3, 64), eight_bits(3, 64)
    assert weight.minimums is not None
    for row, column in ((0, 0), (1, 31), (1, 32), (2, 63)):
        block = column // 32
        scale, code = weight.scales[row, block], int(weight.codes[row, column])
        expected = scale * code - weight.minimums[row, block]
        assert weight.dequantize()[row, column] == expected
        expected = whole.scales[row, block] * int(whole.codes[row, column])
        assert whole.dequantize()[row, column] == expected


def test_a_dense_copy_is_rounded_once_whatever_is_converted_at_a_time() -> None:
    outputs = CHUNK_ELEMENTS // 4096 + 3
    weight = replace(four_bits(outputs, 4096), dtype=torch.bfloat16)
    assert weight.dense().equal(weight.dequantize().to(torch.bfloat16))


def test_rows_are_chosen_reordered_and_joined_as_numbers_would_be() -> None:
    for make in (four_bits, eight_bits):
        q, k = make(16, 64, 1), make(8, 64, 2)
        parts = [reorder_rows(part, lambda rows: interleave_pairs(rows, 8)) for part in (q, k)]
        joined = join_rows(parts)
        assert isinstance(joined, BlockWeight)
        numbers = [interleave_pairs(part.dequantize(), 8) for part in (q, k)]
        assert joined.dequantize().equal(torch.cat(numbers))
        assert q.rows(torch.tensor([3, 3, 0])).dequantize().equal(q.dequantize()[[3, 3, 0]])


def test_parts_of_several_kinds_are_joined_as_numbers() -> None:
    parts = (four_bits(4, 32), eight_bits(2, 32), torch.ones(1, 32))
    joined = join_rows(parts)
    assert isinstance(joined, torch.Tensor)
    assert joined.equal(torch.cat([parts[0].dequantize(), parts[1].dequantize(), parts[2]]))
    unlike = (four_bits(4, 32), replace(four_bits(4, 32), minimums=None))
    assert isinstance(join_rows(unlike), torch.Tensor)


def test_rows_round_their_inputs_where_all_parts_do() -> None:
    plain = eight_bits(8, 32)
    rounding = replace(plain, rounds_inputs=True)
    joined = join_rows([reorder_rows(rounding, lambda rows: rows.flip(0)), rounding])
    assert isinstance(joined, BlockWeight)
    assert joined.rounds_inputs
    assert isinstance(join_rows([rounding, plain]), torch.Tensor)


def test_a_linear_of_codes_is_that_of_their_numbers() -> None:
    weight, bias, x = four_bits(8, 64), torch.rand(8), torch.rand(3, 64)
    expected = make_linear(weight.dequantize(), bias)(x)
    assert make_linear(weight, bias)(x).equal(expected)


def test_rows_of_8_bit_floats_take_their_scales_along() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn((12, 200), generator=generator).to(torch.float8_e4m3fn)
    weight = Fp8Weight(numbers.view(torch.uint8), torch.rand((12, 2), generator=generator))
    column = weight.dequantize()[:, 128]
    assert column.equal(numbers[:, 128].float() * weight.scales[:, 1])

    def reorder(rows: torch.Tensor) -> torch.Tensor:
        return interleave_pairs(rows, 6, 4)

    joined = join_rows([reorder_rows(weight, reorder), weight])
    assert isinstance(joined, Fp8Weight)
    dense = weight.dense()
    assert joined.dense().equal(torch.cat((reorder(dense), dense)))
    mixed = join_rows([weight, dense])
    assert isinstance(mixed, torch.Tensor)
    assert mixed.equal(torch.cat((dense, dense)))
