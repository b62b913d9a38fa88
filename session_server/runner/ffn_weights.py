"""Load the feed-forward of one layer: dense, or experts in the layouts of the families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from session_server.models.config import ExpertLayout, MlpConfig, MoeConfig, ScoringFunc
from session_server.models.layers.block_weight import BlockWeight, CodedWeight, Weight, concatenate
from session_server.models.layers.linear import make_linear
from session_server.models.layers.mlp import GatedMlp, make_gate
from session_server.models.layers.moe import Experts, MixtureOfExperts
from session_server.models.layers.routing import Router
from session_server.runner.checkpoint import WeightSource
from session_server.runner.layer_factories import ExpertMatrices, SeveralKindsError
from session_server.runner.mxfp4 import BLOCK, Mxfp4Weight
from session_server.runner.weight_rows import as_dense, join_rows


def take_ffn(
    ffn: MlpConfig | MoeConfig, hidden: int, tensors: WeightSource, prefix: str
) -> GatedMlp | MixtureOfExperts:
    """Load the feed-forward of a layer; `prefix` begins its tensors' names."""
    if isinstance(ffn, MlpConfig):
        return _dense(ffn, hidden, tensors, prefix)
    router, inner, beside, experts = _LAYOUTS[ffn.layout]
    weight = tensors.take(f"{prefix}{router}.weight", ffn.num_experts, hidden)
    bias = tensors.take(f"{prefix}{router}.bias", ffn.num_experts) if ffn.router_bias else None
    correction = None
    if ffn.routing.scoring_func is ScoringFunc.SIGMOID:
        name = f"{prefix}{router}.e_score_correction_bias"
        correction = tensors.take_as(torch.float32, name, ffn.num_experts)
    shared = None
    if ffn.shared_expert is not None:
        shared = _dense(ffn.shared_expert, hidden, tensors, f"{prefix}{beside}")
    return MixtureOfExperts(
        # Never quantized: it is small, and decides everything behind it.
        Router(make_linear(weight, bias), ffn, correction),
        experts(ffn, hidden, tensors, prefix + inner),
        shared,
    )


def _dense(mlp: MlpConfig, hidden: int, tensors: WeightSource, prefix: str) -> GatedMlp:
    """Load a gated MLP."""
    matrices = _matrices(mlp, hidden, tensors, prefix)
    gate_up, down = (tensors.linear(weight, bias) for weight, bias in matrices)
    return GatedMlp(gate_up, down, make_gate(mlp.gate))


def _matrices(
    mlp: MlpConfig, hidden: int, tensors: WeightSource, prefix: str
) -> Iterator[tuple[Weight, Tensor | None]]:
    """Load weight and bias of gate and up as one, and then those of down."""
    inner = mlp.intermediate_size
    *sides, down = mlp.layout.value
    size = 2 * inner // len(sides)

    weights = [tensors.take_linear(f"{prefix}{name}.weight", size, hidden) for name in sides]
    biases = [tensors.take(f"{prefix}{name}.bias", size) for name in sides if mlp.bias]
    weight = join_rows(weights)
    del weights  # they lie in `weight` now
    yield weight, concatenate(biases) if mlp.bias else None
    weight = tensors.take_linear(f"{prefix}{down}.weight", hidden, inner)
    yield weight, tensors.take(f"{prefix}{down}.bias", hidden) if mlp.bias else None


def _qwen_experts(moe: MoeConfig, hidden: int, tensors: WeightSource, prefix: str) -> Experts:
    """Load experts stored one by one, as on the hub, or stacked, as v5 saves them."""
    if tensors.has(f"{prefix}gate_up_proj"):
        return _stacked(moe, hidden, tensors, (f"{prefix}gate_up_proj", f"{prefix}down_proj"))
    return _one_by_one(moe, hidden, tensors, prefix)


def _one_by_one(moe: MoeConfig, hidden: int, tensors: WeightSource, prefix: str) -> Experts:
    """Load experts stored one by one. If not all are codes of one kind, all become dense.

    Kernels read the inputs of all experts of a layer in one form. Only experts that differ are read
    twice, from the first on.
    """
    kinds: list[object] = []

    def note(weight: Weight) -> Weight:
        kinds.append(weight.kind if isinstance(weight, CodedWeight) else Tensor)
        # Each has two matrices.
        if len(kinds) > 2 and kinds[-1] != kinds[-3]:
            raise SeveralKindsError
        return weight

    def matrices(index: int, see: Callable[[Weight], Weight]) -> ExpertMatrices:
        stored = _matrices(moe.expert, hidden, tensors, f"{prefix}{index}.")
        return ((see(_plain(weight)), bias) for weight, bias in stored)

    def load(see: Callable[[Weight], Weight]) -> Experts:
        return tensors.experts(moe, (matrices(index, see) for index in range(moe.num_experts)))

    with suppress(SeveralKindsError):
        return load(note)
    return load(as_dense)


def _plain(weight: Weight) -> Weight:
    """Return a weight whose inputs are not rounded: what multiplies experts does not."""
    if isinstance(weight, BlockWeight) and weight.rounds_inputs:
        return replace(weight, rounds_inputs=False)
    return weight


def _granite_experts(moe: MoeConfig, hidden: int, tensors: WeightSource, prefix: str) -> Experts:
    names = (f"{prefix}input_linear.weight", f"{prefix}output_linear.weight")
    return _stacked(moe, hidden, tensors, names)


def _stacked(moe: MoeConfig, hidden: int, tensors: WeightSource, names: tuple[str, str]) -> Experts:
    """Load experts from two stacked tensors, gates before ups."""
    inner = moe.expert.intermediate_size
    gate_up = tensors.take(names[0], moe.num_experts, 2 * inner, hidden)
    down = tensors.take(names[1], moe.num_experts, hidden, inner)
    pairs = zip(gate_up, down, strict=True)
    return tensors.experts(moe, (((first, None), (second, None)) for first, second in pairs))


def _gpt_oss_experts(moe: MoeConfig, hidden: int, tensors: WeightSource, prefix: str) -> Experts:
    num, inner = moe.num_experts, moe.expert.intermediate_size
    gate_up = _gpt_oss_weights(tensors, f"{prefix}gate_up_proj", (num, 2 * inner, hidden))
    gate_up_bias = tensors.take(f"{prefix}gate_up_proj_bias", num, 2 * inner)
    down = _gpt_oss_weights(tensors, f"{prefix}down_proj", (num, hidden, inner))
    down_bias = tensors.take(f"{prefix}down_proj_bias", num, hidden)

    def matrices(index: int) -> ExpertMatrices:
        weight = gate_up[index]
        first = _gate_first(weight) if isinstance(weight, Tensor) else weight.rows(_gate_first)
        yield first, _gate_first(gate_up_bias[index])
        yield down[index], down_bias[index]

    return tensors.experts(moe, map(matrices, range(num)))


def _gpt_oss_weights(
    tensors: WeightSource, name: str, shape: tuple[int, int, int]
) -> Sequence[Tensor] | Sequence[Mxfp4Weight]:
    """Load stacked matrices [experts, outputs, inputs]: each as numbers, or as MXFP4."""
    num_experts, outputs, inputs = shape
    if not tensors.has(f"{name}_blocks"):
        stored = tensors.take(name, num_experts, inputs, outputs)
        return stored.transpose(1, 2).contiguous().unbind()
    shape = (num_experts, outputs, inputs // BLOCK)
    blocks = tensors.take_as(torch.uint8, f"{name}_blocks", *shape, BLOCK // 2)
    scales = tensors.take_as(torch.uint8, f"{name}_scales", *shape)
    parts = zip(blocks, scales, strict=True)
    return [Mxfp4Weight(of_blocks, of_scales, tensors.dtype) for of_blocks, of_scales in parts]


def _gate_first(rows: Tensor) -> Tensor:
    """Reorder interleaved rows of gate and up so that the gate's half comes first."""
    return concatenate((rows[::2], rows[1::2]))


_TakeExperts = Callable[[MoeConfig, int, WeightSource, str], Experts]

_MOE: Final = "block_sparse_moe."

_LAYOUTS: Final[Mapping[ExpertLayout, tuple[str, str, str, _TakeExperts]]] = {
    ExpertLayout.QWEN: ("gate", "experts.", "shared_experts.", _qwen_experts),
    ExpertLayout.GRANITE: (f"{_MOE}router.layer", _MOE, "shared_mlp.", _granite_experts),
    ExpertLayout.GPT_OSS: ("router", "experts.", "", _gpt_oss_experts),
}
"""Names of router, experts and shared expert, and the function that loads the experts."""
