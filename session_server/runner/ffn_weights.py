"""Load the feed-forward of one layer: dense, or experts in the layouts of the families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from session_server.models.config import ExpertLayout, MlpConfig, MoeConfig, ScoringFunc
from session_server.models.layers.block_weight import BlockWeight, Weight, concatenate
from session_server.models.layers.linear import make_linear
from session_server.models.layers.mlp import GatedMlp, make_gate
from session_server.models.layers.moe import MixtureOfExperts
from session_server.models.layers.routing import Router
from session_server.runner.checkpoint import WeightSource
from session_server.runner.mxfp4 import take_mxfp4
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
        list(experts(ffn, hidden, tensors, prefix + inner)),
        shared,
    )


def _dense(
    mlp: MlpConfig,
    hidden: int,
    tensors: WeightSource,
    prefix: str,
    *,
    see: Callable[[Weight], Weight] = lambda weight: weight,
) -> GatedMlp:
    """Load a gated MLP; `see` gets both of its matrices and returns what to make linears of."""
    inner = mlp.intermediate_size
    *sides, down = mlp.layout.value
    size = 2 * inner // len(sides)

    weights = [tensors.take_linear(f"{prefix}{name}.weight", size, hidden) for name in sides]
    biases = [tensors.take(f"{prefix}{name}.bias", size) for name in sides if mlp.bias]
    gate_up = tensors.linear(see(join_rows(weights)), concatenate(biases) if mlp.bias else None)
    del weights  # they lie in `gate_up` now
    weight = see(tensors.take_linear(f"{prefix}{down}.weight", hidden, inner))
    bias = tensors.take(f"{prefix}{down}.bias", hidden) if mlp.bias else None
    return GatedMlp(gate_up, tensors.linear(weight, bias), make_gate(mlp.gate))


def _qwen_experts(
    moe: MoeConfig, hidden: int, tensors: WeightSource, prefix: str
) -> Iterator[GatedMlp]:
    """Load experts stored one by one, as on the hub, or stacked, as v5 saves them."""
    if tensors.has(f"{prefix}gate_up_proj"):
        return _stacked(moe, hidden, tensors, (f"{prefix}gate_up_proj", f"{prefix}down_proj"))
    return _one_by_one(moe, hidden, tensors, prefix)


def _one_by_one(
    moe: MoeConfig, hidden: int, tensors: WeightSource, prefix: str
) -> Iterator[GatedMlp]:
    """Load experts stored one by one. If not all are codes of one kind, all become dense.

    Kernels read the inputs of all experts of a layer in one form. Only a checkpoint whose experts
    differ is read twice.
    """
    kinds: list[int | None] = []

    def note(weight: Weight) -> Weight:
        kinds.append(weight.num_bits if isinstance(weight, BlockWeight) else None)
        return weight

    def load(see: Callable[[Weight], Weight]) -> list[GatedMlp]:
        prefixes = (f"{prefix}{index}." for index in range(moe.num_experts))
        return [_dense(moe.expert, hidden, tensors, of_expert, see=see) for of_expert in prefixes]

    experts = load(note)
    # Each has two matrices.
    if len({*kinds[::2]}) > 1 or len({*kinds[1::2]}) > 1:
        experts.clear()  # their memory is needed
        experts = load(as_dense)
    return iter(experts)


def _granite_experts(
    moe: MoeConfig, hidden: int, tensors: WeightSource, prefix: str
) -> Iterator[GatedMlp]:
    names = (f"{prefix}input_linear.weight", f"{prefix}output_linear.weight")
    return _stacked(moe, hidden, tensors, names)


def _stacked(
    moe: MoeConfig, hidden: int, tensors: WeightSource, names: tuple[str, str]
) -> Iterator[GatedMlp]:
    """Load experts from two stacked tensors, gates before ups."""
    inner = moe.expert.intermediate_size
    gate_up = tensors.take(names[0], moe.num_experts, 2 * inner, hidden)
    down = tensors.take(names[1], moe.num_experts, hidden, inner)
    for of_gate_up, of_down in zip(gate_up, down, strict=True):
        linears = tensors.linear(of_gate_up), tensors.linear(of_down)
        yield GatedMlp(*linears, make_gate(moe.expert.gate))


def _gpt_oss_experts(
    moe: MoeConfig, hidden: int, tensors: WeightSource, prefix: str
) -> Iterator[GatedMlp]:
    num, inner, gate = moe.num_experts, moe.expert.intermediate_size, make_gate(moe.expert.gate)
    gate_up = _gpt_oss_matrices(tensors, f"{prefix}gate_up_proj", (num, 2 * inner, hidden))
    gate_up_bias = tensors.take(f"{prefix}gate_up_proj_bias", num, 2 * inner)
    down = _gpt_oss_matrices(tensors, f"{prefix}down_proj", (num, hidden, inner))
    down_bias = tensors.take(f"{prefix}down_proj_bias", num, hidden)
    for index in range(num):
        yield GatedMlp(
            tensors.linear(_gate_first(gate_up[index]), _gate_first(gate_up_bias[index])),
            tensors.linear(down[index], down_bias[index]),
            gate,
        )


def _gpt_oss_matrices(tensors: WeightSource, name: str, shape: tuple[int, int, int]) -> Tensor:
    """Load stacked matrices as [experts, outputs, inputs]."""
    if tensors.has(f"{name}_blocks"):
        return take_mxfp4(tensors, name, shape)
    num_experts, outputs, inputs = shape
    return tensors.take(name, num_experts, inputs, outputs).transpose(1, 2).contiguous()


def _gate_first(rows: Tensor) -> Tensor:
    """Reorder interleaved rows of gate and up so that the gate's half comes first."""
    return concatenate((rows[::2], rows[1::2]))


_TakeExperts = Callable[[MoeConfig, int, WeightSource, str], Iterator[GatedMlp]]

_MOE: Final = "block_sparse_moe."

_LAYOUTS: Final[Mapping[ExpertLayout, tuple[str, str, str, _TakeExperts]]] = {
    ExpertLayout.QWEN: ("gate", "experts.", "shared_experts.", _qwen_experts),
    ExpertLayout.GRANITE: (f"{_MOE}router.layer", _MOE, "shared_mlp.", _granite_experts),
    ExpertLayout.GPT_OSS: ("router", "experts.", "", _gpt_oss_experts),
}
"""Names of router, experts and shared expert, and the function that loads the experts."""
