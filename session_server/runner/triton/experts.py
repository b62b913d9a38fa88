"""Compute a mixture of experts with kernels of our own in Triton: a layer is four launches.

Their grids depend on shapes alone and the host reads nothing, so a CUDA graph can hold them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import triton
from torch import Tensor

from session_server.attention.triton import launching
from session_server.models.config import MoeConfig
from session_server.models.layers.block_weight import CodedWeight
from session_server.models.layers.linear import LinearFactory
from session_server.runner.layer_factories import ExpertMatrices, ExpertWeight
from session_server.runner.mxfp4 import Mxfp4Weight
from session_server.runner.triton import packing
from session_server.runner.triton.expert_kernels import (
    down_experts,
    gate_up_experts,
    lay_out_choices,
    sum_choices,
)
from session_server.runner.triton.packing import CodeFormat

FEW_CHOICES: Final = 128
"""Choices that are laid out in one look, as those of a step that decodes."""

MANY_CHOICES: Final = 2048
"""Choices that are looked at at a time, if there are more."""

SUMMED: Final = 1024
"""Numbers that a program sums over the choices."""


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Say what a program multiplies at once: rows of the inputs, rows of the weights, and inputs.

    `num_outputs`: weight rows in all, so of gate and up half of them each. `num_inputs`: of codes,
    bytes of a row, of which `packing.BLOCK_K` is a multiple.
    """

    num_rows: int
    num_outputs: int
    num_inputs: int
    num_warps: int
    num_stages: int


def every_shape(dtype: torch.dtype, *, is_coded: bool = False) -> tuple[ExpertTile, ...]:
    """Return the shapes that tiles can have for activations of a dtype, the fewest rows first.

    What limits them are shared memory and registers. A tile of few rows is bound by the weights it
    reads: it reads long pieces of few rows of them. `is_coded`: weights are codes, which become
    numbers in registers: of twice as many inputs a tile of 128 rows spills. The interpreter takes
    the tiles of halves, as are served.
    """
    if dtype == torch.float32 and not launching.IS_INTERPRETED:
        if is_coded:
            return (ExpertTile(16, 32, 64, 4, 2),)
        return ExpertTile(16, 64, 32, 4, 2), ExpertTile(32, 64, 32, 4, 2)
    if is_coded:
        return (
            ExpertTile(16, 64, 64, 4, 4),
            ExpertTile(32, 64, 64, 4, 4),
            ExpertTile(64, 128, 32, 4, 4),
            ExpertTile(128, 128, 32, 8, 4),
        )
    return (
        ExpertTile(16, 64, 128, 4, 4),
        ExpertTile(32, 64, 128, 4, 4),
        ExpertTile(64, 128, 64, 4, 4),
        ExpertTile(128, 128, 64, 8, 4),
    )


def tile_shape(num_choices: int, num_experts: int, shapes: tuple[ExpertTile, ...]) -> ExpertTile:
    """Return the shape of tiles where so many choices are of so many experts: as if each had
    equally many, and by half more rows than that: all that do not fit cost a tile more.

    `shapes`: those that tiles can have, the fewest rows first.
    """
    wanted = 3 * num_choices // (2 * num_experts)
    return next((shape for shape in shapes if shape.num_rows >= wanted), shapes[-1])


def most_tiles(num_choices: int, num_experts: int, num_rows: int) -> int:
    """Return how many tiles of so many rows there can be, however the choices fall."""
    return min(num_choices, num_choices // num_rows + num_experts)


ExpertFormat = Literal["numbers", "mxfp4"] | CodeFormat
"""How the matrices of experts are kept, as kernels are compiled for it."""


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Hold one matrix of all experts.

    `weights`: numbers [experts, outputs, inputs], or MXFP4 blocks, uint8 [experts, outputs,
    inputs / 32, 16], with `scales`, uint8 [experts, outputs, inputs / 32]. In other formats both,
    and `minimums` if there are any, are those of each expert's `PackedCodes`. `bias`: [experts,
    outputs]; None without.
    """

    format: ExpertFormat
    weights: Tensor
    scales: Tensor | None = None
    minimums: Tensor | None = None
    bias: Tensor | None = None

    @property
    def is_coded(self) -> bool:
        """Return whether `times_codes` multiplies by the weights."""
        return self.format not in ("numbers", "mxfp4")

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """Return weights, scales, minimums and biases for a kernel, which asks for none that is
        not there."""
        rest = (self.scales, self.minimums, self.bias)
        return self.weights, *(self.weights if of is None else of for of in rest)

    def constants(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return what a kernel is compiled for; `dtype`: that of the activations."""
        num_experts, num_outputs = self.weights.shape[:2]
        num_scales = 0 if self.scales is None else self.scales.numel()
        return {
            "HAS_BIAS": self.bias is not None,
            "FORMAT": self.format,
            "WIDTH": self.weights.numel() // (num_experts * num_outputs),
            "NUM_GROUPS": num_scales // (num_experts * num_outputs),
            "DOT_DTYPE": launching.dot_dtype(dtype),
        }


def stack_experts(
    moe: MoeConfig, experts: Iterable[ExpertMatrices], linear: LinearFactory
) -> GroupedExperts:
    """Stack the matrices of experts, one after the other as they are loaded. An `ExpertsFactory`.

    Codes are kept: MXFP4 where the model computes in bfloat16, 8-bit floats where the device
    reads them. Other codes become numbers.
    """
    del linear  # their products are one kernel's
    stacks: list[tuple[ExpertFormat, dict[str, Tensor]]] = []
    for index, matrices in enumerate(experts):
        for place, (weight, bias) in enumerate(matrices):
            kind, parts = _parts(weight)
            parts |= {} if bias is None else {"bias": bias}
            if index == 0:
                rooms = {name: _room(part, moe.num_experts) for name, part in parts.items()}
                stacks.append((kind, rooms))
            assert kind == stacks[place][0], "all experts of a layer are of one kind"
            for name, part in parts.items():
                own = stacks[place][1][name][index]
                if own.data_ptr() != part.data_ptr():
                    own.copy_(part)
    gate_up, down = (ExpertStack(kind, **stack) for kind, stack in stacks)
    return GroupedExperts(moe, gate_up, down)


def _parts(weight: ExpertWeight) -> tuple[ExpertFormat, dict[str, Tensor]]:
    """Return the format of an expert's matrix, and what it has in an `ExpertStack`, by field."""
    if isinstance(weight, Mxfp4Weight) and weight.dtype == torch.bfloat16:
        return "mxfp4", {"weights": weight.blocks, "scales": weight.scales}
    if isinstance(weight, CodedWeight) and packing.has_kernel(weight, weight.codes.device):
        codes = packing.pack(weight)
        minimums = {} if codes.minimums is None else {"minimums": codes.minimums}
        return codes.format, {"weights": codes.codes, "scales": codes.scales, **minimums}
    return "numbers", {"weights": weight if isinstance(weight, Tensor) else weight.dense()}


def _room(first: Tensor, num_experts: int) -> Tensor:
    """Return room for what all experts have; if they are stored as one, the place they have."""
    shape, memory = (num_experts, *first.shape), first.untyped_storage()
    if memory.nbytes() == num_experts * first.nbytes and first.is_contiguous():
        return first.as_strided(shape, (first.numel(), *first.stride()), 0)
    return first.new_empty(shape)


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """Run all experts of a layer in one launch for gate and up, and one for down."""

    config: MoeConfig
    gate_up: ExpertStack
    down: ExpertStack

    def __call__(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, beside: Tensor | None
    ) -> Tensor:
        """Sum the chosen experts of each token; see `Experts`."""
        shapes = self._shapes(x.dtype)
        shape = tile_shape(topk_ids.numel(), self.config.num_experts, shapes)
        return self._compute(x, topk_weights, topk_ids, beside, shape=shape)

    @property
    def compiled_for(self) -> tuple[object, ...]:
        """Return what decides what is compiled in one model."""
        return self.config, self.gate_up.format, self.down.format

    def compile_all(self, hidden: int, dtype: torch.dtype) -> None:
        """Compile what forwards may launch, by launching it on few tokens and on more."""
        top_k = self.config.num_experts_per_tok
        for num_tokens in (1, FEW_CHOICES // top_k + 1):
            x = torch.zeros((num_tokens, hidden), dtype=dtype, device=self.down.weights.device)
            weights = x.new_zeros((num_tokens, top_k))
            ids = weights.to(torch.int64)
            beside = None if self.config.shared_expert is None else x
            for shape in self._shapes(dtype):
                self._compute(x, weights, ids, beside, shape=shape)

    def _shapes(self, dtype: torch.dtype) -> tuple[ExpertTile, ...]:
        """Return the shapes of tiles where activations are of a dtype."""
        return every_shape(dtype, is_coded=self.gate_up.is_coded or self.down.is_coded)

    def _compute(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        beside: Tensor | None,
        *,
        shape: ExpertTile,
    ) -> Tensor:
        assert x.is_contiguous()
        assert topk_weights.is_contiguous()
        moe, hidden, num_choices = self.config, x.shape[1], topk_ids.numel()
        inner, gate = moe.expert.intermediate_size, moe.expert.gate
        gated, out = x.new_empty((num_choices, inner)), x.new_empty((num_choices, hidden))
        tiles = self._lay_out(topk_ids, shape.num_rows)
        sizes = {"HIDDEN": hidden, "INNER": inner, **_constants(shape)}
        launching.run(
            gate_up_experts,
            (tiles.most * triton.cdiv(inner, shape.num_outputs // 2),),
            x,
            *self.gate_up.pointers,
            gated,
            *tiles.arguments,
            TOP_K=moe.num_experts_per_tok,
            GATE=gate.kind.value,
            ALPHA=gate.alpha,
            LIMIT=gate.swiglu_limit,
            BLOCK_N=shape.num_outputs // 2,
            **self.gate_up.constants(x.dtype),
            **sizes,
        )
        launching.run(
            down_experts,
            (tiles.most * triton.cdiv(hidden, shape.num_outputs),),
            gated,
            *self.down.pointers,
            topk_weights,
            out,
            *tiles.arguments,
            BLOCK_N=shape.num_outputs,
            **self.down.constants(x.dtype),
            **sizes,
        )
        mixed = x.new_empty(x.shape) if beside is None else beside
        launching.run(
            sum_choices,
            (triton.cdiv(x.numel(), SUMMED),),
            out,
            mixed,
            x.numel(),
            HIDDEN=hidden,
            TOP_K=moe.num_experts_per_tok,
            HAS_BESIDE=beside is not None,
            BLOCK_N=SUMMED,
        )
        return mixed

    def _lay_out(self, topk_ids: Tensor, num_rows: int) -> _Tiles:
        num_experts, num_choices = self.config.num_experts, topk_ids.numel()
        most = most_tiles(num_choices, num_experts, num_rows)
        choices = topk_ids.new_empty(most * num_rows, dtype=torch.int32)
        experts = topk_ids.new_empty(most + 1, dtype=torch.int32)
        launching.run(
            lay_out_choices,
            (num_experts,),
            topk_ids,
            choices,
            experts,
            num_choices,
            most,
            NUM_EXPERTS=num_experts,
            BLOCK_M=num_rows,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_N=FEW_CHOICES if num_choices <= FEW_CHOICES else MANY_CHOICES,
        )
        return _Tiles(choices, experts, num_choices, most)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Hold what `lay_out_choices` has written. `most`: tiles that there can be."""

    choices: Tensor
    experts: Tensor
    num_choices: int
    most: int

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int]:
        """Return what the kernels that multiply take of it."""
        return self.choices, self.experts, self.num_choices, self.most


def _constants(shape: ExpertTile) -> dict[str, int]:
    """Return what a shape makes of a kernel, beside the columns it computes."""
    return {
        "BLOCK_M": shape.num_rows,
        "BLOCK_K": shape.num_inputs,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
    }
