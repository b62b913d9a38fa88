"""What a checkpoint says behind its last token, by torch and by kernels of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from cache.types import Tokens
from session_server.models.registry import load_config
from session_server.runner.loader import layer_factories
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import ComputeBackend
from session_server.runner.weights import load_decoder
from tests.oracle.checkpoints import reference_logits
from tests.oracle.conversations import capacity
from tests.runner.rows import Rows

MOST_OFF: Final = 0.1
"""Error of the kernels' logits, relative to the spread of those expected: they round the inputs of
codes to 8 bits per 32. Other weights, or inputs that were not converted, are off by about 1.4."""


def last_logits(path: Path, tokens: Tokens, *, backend: ComputeBackend = "cpu") -> Tensor:
    """Float32 [vocab]. The kernels get codes as they are, and dense matrices as float32."""
    config = load_config(path)
    decoder = load_decoder(
        path,
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        factories=layer_factories(backend, "float32"),
    )
    spec = config.cache_spec(16, "float32")
    runner = ModelRunner(decoder, spec, capacity(config, 16), backend=backend)
    rows = Rows(runner, 16)
    return runner.logits(rows.batch(rows.row(1, tokens)))[-1]


def assert_near_by_kernels(path: Path, twin: Path, tokens: Tokens) -> None:
    """Compare what the kernels compute with what `transformers` computes of `twin`."""
    by_kernels = last_logits(path, tokens, backend="native")
    assert_near(by_kernels, reference_logits(twin, tokens)[-1])


def assert_near(ours: Tensor, expected: Tensor) -> None:
    """Compare logits, between which the inputs of linears were rounded to 8 bits."""
    error = (ours - expected).square().mean().sqrt() / expected.std()
    assert error <= MOST_OFF, error
