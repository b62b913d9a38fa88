"""Whole models in codes of 8 and 4 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch

from session_server.models.registry import load_config
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import RunnerOptions, layer_factories, load_runner
from session_server.runner.native import WeightFormat
from session_server.runner.quantization import QuantizationEffect, sequence_logits
from session_server.runner.weights import load_decoder
from tests.oracle.checkpoints import FAMILIES, LAYERED_FAMILIES, write_checkpoint

WIDE: Final = {"hidden_size": 1056, "intermediate_size": 1120, "num_hidden_layers": 2}
"""More inputs than one item of elementwise work covers."""

MOST_OFF: Final[dict[WeightFormat, float]] = {"int8": 0.08, "int4": 0.6}
"""Error of logits relative to their size; of other weights it would be about 1.4."""


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """Loading for the kernels leaves torch one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def effect(checkpoint: Path, format: WeightFormat) -> QuantizationEffect:
    config = load_config(checkpoint)
    before, after = (
        sequence_logits(
            load_decoder(
                checkpoint,
                config,
                device=torch.device("cpu"),
                dtype=torch.float32,
                factories=layer_factories("native", stored),
            )
        )
        for stored in ("float32", format)
    )
    return QuantizationEffect.of(before, after)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_wide_model_says_nearly_the_same(tmp_path: Path, cpu: str, format: WeightFormat) -> None:
    checkpoint = write_checkpoint("qwen3", tmp_path / "wide", std=0.03, **WIDE)
    assert 0 < effect(checkpoint, format).error < MOST_OFF[format]


@pytest.mark.parametrize("family", [*FAMILIES, *LAYERED_FAMILIES])
def test_every_family_can_be_quantized(tmp_path: Path, family: str) -> None:
    measured = effect(write_checkpoint(family, tmp_path / family, std=0.05), "int8")
    assert 0 < measured.error < 0.2
    assert measured.same_choice > 0.5


def test_loading_measures_what_codes_cost_and_says_so(tmp_path: Path) -> None:
    checkpoint = write_checkpoint("qwen3", tmp_path / "model", std=0.05)
    options = RunnerOptions(page_size=16, num_rows=2, quantize="int8", num_threads=1)
    loaded = load_runner(checkpoint, options)
    assert loaded.quantization is not None
    assert "the most likely token is the same in" in str(loaded.quantization)
    assert load_runner(checkpoint, RunnerOptions(page_size=16, num_rows=2)).quantization is None
    no_memory = MemoryLimits(max_total_tokens=64)
    on_torch = RunnerOptions(
        page_size=16, num_rows=2, quantize="int8", backend="cpu", memory=no_memory
    )
    with pytest.raises(ValueError, match="--quantize int8 needs the native kernels"):
        load_runner(checkpoint, on_torch)


def test_logits_that_are_no_numbers_are_not_near_any() -> None:
    logits = torch.randn(4, 9)
    effect = QuantizationEffect.of(logits, logits * float("nan"))
    assert math.isnan(effect.error)
    assert math.isnan(effect.divergence)
