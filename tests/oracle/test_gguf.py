"""GGUF files compute what `transformers` computes with the weights that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from session_server.models.layers import linear
from session_server.models.layers.block_weight import BlockWeight
from session_server.models.layers.linear import Linear, PlainLinear
from session_server.models.registry import load_config
from session_server.runner.weights import load_decoder, open_checkpoint
from tests.depth import at_depth
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import reference_logits, write_checkpoint
from tests.oracle.gguf_files import ARCHITECTURES, write_gguf
from tests.oracle.last_logits import assert_near_by_kernels, last_logits
from tests.oracle.test_packed import assert_near_on_a_gpu, triton_only

TOLERANCE = 1e-4
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
K_SIZES = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
FIELDS = {
    "qwen3_moe": {"mlp_only_layers": [], "moe_intermediate_size": 32},
    # What llama.cpp computes from the size of a head.
    "gemma2": {"query_pre_attn_scalar": 16, "attention_bias": False},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    # Files have no biases of convolutions.
    "lfm2": {"conv_bias": False},
}
BLOCKS = (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.F16, Type.BF16)
K_BLOCKS = (Type.Q4_K, Type.Q5_K, Type.Q6_K)
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 60).astype(np.int32)


def assert_exact(path: Path, twin: Path) -> None:
    """Compare the logits behind the last token with those of `transformers`."""
    expected = reference_logits(twin, TOKENS)[-1]
    assert expected.std() > 0.1, "logits that say nothing"
    worst = (last_logits(path, TOKENS) - expected).abs().max()
    assert worst <= TOLERANCE, worst


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_of_floats_is_the_checkpoint_that_it_was_written_from(
    family: str, tmp_path: Path
) -> None:
    twin = write_checkpoint(family, tmp_path / "twin", **FIELDS.get(family, {}))
    assert_exact(write_gguf(twin, tmp_path / "model.gguf"), twin)


@pytest.mark.parametrize("kind", [*BLOCKS, *K_BLOCKS], ids=lambda kind: kind.name)
def test_matrices_of_every_type_are_what_they_stand_for(kind: Type, tmp_path: Path) -> None:
    sizes = K_SIZES if kind in K_BLOCKS else SIZES
    twin = write_checkpoint("llama", tmp_path / "twin", **sizes)
    path = write_gguf(twin, tmp_path / "model.gguf", lambda _: kind)
    assert_exact(path, twin)
    assert_near_by_kernels(path, twin, TOKENS)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_files_of_several_types_are_what_they_stand_for(family: str, tmp_path: Path) -> None:
    kinds = {"v_proj": Type.Q6_K, "down_proj": Type.Q6_K, "embed": Type.Q6_K, "gate": Type.F32}

    def choose(name: str) -> Type:
        if ".experts." in name:
            return Type.Q8_0
        return next((kind for part, kind in kinds.items() if part in name), Type.Q4_K)

    sizes = {**FIELDS.get(family, {}), **K_SIZES, "block_multiple_of": 256}
    if family.startswith("gemma"):
        sizes["query_pre_attn_scalar"] = K_SIZES["head_dim"]
    twin = write_checkpoint(family, tmp_path / "twin", **sizes)
    path = write_gguf(twin, tmp_path / "model.gguf", choose)
    assert_exact(path, twin)
    assert_near_by_kernels(path, twin, TOKENS)


@triton_only
@pytest.mark.parametrize(
    "kind",
    at_depth([Type.Q8_0], proof=[Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q4_K]),
    ids=lambda kind: kind.name,
)
def test_experts_that_stay_codes_on_a_gpu_are_what_they_stand_for(
    kind: Type, tmp_path: Path
) -> None:
    sizes = SIZES | FIELDS["qwen3_moe"]
    if kind is Type.Q4_K:
        sizes |= K_SIZES | {"moe_intermediate_size": 256}
    twin = write_checkpoint("qwen3_moe", tmp_path / "twin", **sizes, num_hidden_layers=1)
    path = write_gguf(twin, tmp_path / "model.gguf", lambda _: kind)
    assert_near_on_a_gpu(path, twin)


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=lambda rope: str(rope["rope_type"]))
def test_scaled_rotary_frequencies_are_those_of_the_checkpoint(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    twin = write_checkpoint("llama", tmp_path / "twin", rope_parameters=rope)
    assert_exact(write_gguf(twin, tmp_path / "model.gguf"), twin)


def test_fused_projections_keep_the_codes_of_the_file(tmp_path: Path) -> None:
    twin = write_checkpoint("llama", tmp_path / "twin", **SIZES)
    path = write_gguf(twin, tmp_path / "model.gguf", lambda _: Type.Q4_0)
    config = load_config(path)
    seen = []

    def keep(weight: BlockWeight, bias: torch.Tensor | None) -> Linear:
        seen.append(weight)
        return PlainLinear(weight.dense(), bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "make_block_linear", keep)
        load_decoder(path, config, device=torch.device("cpu"), dtype=torch.float32)
    assert len(seen) == 4 * len(config.layers) + 1, "qkv, output, gate and up, down; the head"
    assert {weight.num_bits for weight in seen} == {4}
    assert seen[0].shape == ((4 + 2 * 2) * 16, 64)


def test_the_dtype_of_the_model_is_that_of_all_weights(tmp_path: Path) -> None:
    twin = write_checkpoint("llama", tmp_path / "twin", **K_SIZES)
    kinds = {"q_proj": Type.Q8_0, "o_proj": Type.F16, "embed": Type.Q6_K}
    path = write_gguf(
        twin,
        tmp_path / "model.gguf",
        lambda name: next((kind for part, kind in kinds.items() if part in name), Type.Q4_K),
    )
    with open_checkpoint(path, load_config(path)).reader(
        device=torch.device("cpu"), dtype=torch.bfloat16
    ) as reader:
        for name, shape in (("model.embed_tokens", (VOCAB_SIZE, 256)), ("model.norm", (256,))):
            assert reader.take(f"{name}.weight", *shape).dtype == torch.bfloat16
        weight = reader.take_linear("model.layers.0.self_attn.q_proj.weight", 64, 256)
        assert isinstance(weight, BlockWeight)
        assert weight.dense().dtype == weight.dtype == torch.bfloat16
