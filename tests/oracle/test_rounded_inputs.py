"""Models whose inputs of linears are rounded too are, by the kernels in Triton, what `transformers`
computes where the inputs of its linears are rounded in the same way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from session_server.models.quantization import parse_quantization
from session_server.models.registry import load_config
from session_server.runner.loader import layer_factories
from session_server.runner.weights import load_decoder
from tests.depth import IS_PROOF, at_depth
from tests.inspector.test_report import OPTIONS, assert_foretold, parts_of
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import reference_logits, write_checkpoint
from tests.oracle.last_logits import last_logits
from tests.oracle.test_packed import BY_TOKEN, CPU, FORMATS, SIZES, compressed, write_experts

pytest.importorskip("triton", reason="triton has no wheel for this machine")

from session_server.runner.triton.integer_linear import IntegerLinear

TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 12).astype(np.int32)
W8A8 = FORMATS["int_8_by_token"]
FAMILIES = at_depth(("qwen2",), proof=("qwen2", "llama", "qwen3", "gemma2", "gemma3_text", "olmo3"))


def rounded_logits(twin: Path) -> Tensor:
    """What `transformers` computes behind the last token, with the inputs of every stored matrix
    rounded: float32 [vocab]."""
    model = AutoModelForCausalLM.from_pretrained(
        twin, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def rounded(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        scales = inputs[0].abs().amax(-1, keepdim=True) / 127
        return ((inputs[0] / scales).round() * scales,)

    linears = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.endswith("_proj")
    ]
    assert len(linears) >= 4 * model.config.num_hidden_layers
    for linear in linears:
        linear.register_forward_pre_hook(rounded)
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.from_numpy(TOKENS)[None], use_cache=False).logits[
            0, -1
        ]
    return logits


def assert_rounded(path: Path, twin: Path) -> None:
    """Compare with rounded inputs; those of the weights alone must be further off."""
    ours, expected = last_logits(path, TOKENS, backend="triton"), rounded_logits(twin)
    # An input that is nearly a tie may get the other code: sums of floats have another order.
    bound = 0.01 * expected.std()
    assert (ours - expected).abs().max() <= bound
    assert (reference_logits(twin, TOKENS)[-1] - expected).abs().max() >= 5 * bound


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_rounded_inputs(family: str, tmp_path: Path) -> None:
    twin = write_checkpoint(family, tmp_path / "twin", **SIZES)
    assert_rounded(W8A8.write(twin, tmp_path / "packed"), twin)


@pytest.mark.skipif(not IS_PROOF, reason="experts in the interpreter: PROVE=1")
def test_experts_are_numbers_beside_integers(tmp_path: Path) -> None:
    twin = write_experts(tmp_path / "twin")
    path = W8A8.write(twin, tmp_path / "packed")
    # Experts are no linears there either.
    assert_rounded(path, twin)
    assert_foretold(path, replace(OPTIONS, backend="triton"))


def test_fused_matrices_stay_integers_and_are_as_large_as_foretold(tmp_path: Path) -> None:
    twin = write_checkpoint("qwen2", tmp_path / "twin", **SIZES)
    path = W8A8.write(twin, tmp_path / "packed")
    config, factories = load_config(path), layer_factories("triton", "float32")
    decoder = load_decoder(path, config, device=CPU, dtype=torch.float32, factories=factories)
    # Q, K and V; the output; gate and up; down.
    assert len([*parts_of(decoder, set(), IntegerLinear)]) == 4 * len(config.layers)
    assert_foretold(path, replace(OPTIONS, backend="triton"))


@pytest.mark.parametrize(
    ("quantization", "rounds_inputs"),
    [
        (W8A8.quantization, True),
        (compressed("naive-quantized", 8, None, inputs=BY_TOKEN), True),
        (compressed("int-quantized", 8, None), False),
        *(
            (compressed("int-quantized", 8, None, inputs=BY_TOKEN | {name: value}), False)
            for name, value in [
                ("dynamic", False),
                ("dynamic", "local"),
                ("symmetric", False),
                ("strategy", "tensor"),
                ("num_bits", 4),
                ("type", "float"),
            ]
        ),
        (compressed("int-quantized", 8, 32, inputs=BY_TOKEN), False),
        (compressed("int-quantized", 4, None, inputs=BY_TOKEN), False),
        (compressed("int-quantized", 8, None, inputs=BY_TOKEN, symmetric=False), False),
        (compressed("pack-quantized", 8, None, inputs=BY_TOKEN), False),
    ],
)
def test_inputs_are_rounded_where_kernels_can_as_the_configuration_says(
    quantization: dict[str, Any], *, rounds_inputs: bool
) -> None:
    assert parse_quantization(quantization).rounds_inputs is rounds_inputs
