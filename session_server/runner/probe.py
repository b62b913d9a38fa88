"""Check that a page holds the KV of its tokens: level 3 of the memory check.

The positions of one page are computed again, from the KV before them, into the padding page, and
both pages are compared in every layer. Wrong content (another session's KV, shifted positions, one
overwritten layer) differs by about its own size; a correct forward of another shape differs by
rounding.

Attention may read the probed positions from the page itself or from the projection. The result is
the same: up to the lowest layer in which the page is wrong, everything computed is right, so the
comparison fails there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from cache.pool.page_table import PageTable
from cache.pool.recurrent import StatePool
from cache.types import NULL_PAGE, PoolName, StateMoves
from session_server.attention.base import AttentionMeta, Span
from session_server.core.batch import Probe
from session_server.runner.inputs import ForwardInputs
from session_server.runner.paged_decoder import PagedDecoder

TOLERANCES: Final[Mapping[torch.dtype, float]] = {
    torch.float32: 1e-3,
    torch.float16: 0.1,
    torch.bfloat16: 0.5,
    torch.float8_e4m3fn: 0.5,
    torch.float8_e5m2: 0.5,
}
"""Largest `deviation` that rounding explains. Measured on the embedded model, over prefills in
chunks of every size, decoding alone and in batches, on both backends: correct pages deviate by at
most 9e-6, 0.007 and 0.06 (by 7e-6, 0.013 and 0.09 in 24 layers of random weights), of 8-bit floats
by 0.04 and 0.08 (0.06 and 0.10); foreign or shifted pages, of all layers or of one, by at least
1.3."""

_TINY: Final = torch.finfo(torch.float32).tiny


def probe_holds(probe: Probe, model: PagedDecoder, tables: Mapping[PoolName, PageTable]) -> Tensor:
    """Compute a page again, in every pool, and compare. Writes nothing but the padding pages.

    Returns:
        bool scalar on the pools' device: whether the pages hold the KV of `probe.tokens`. NaN and
        infinity count as wrong.
    """
    page_size, device = model.page_size, model.decoder.device
    num_tokens, index = len(probe.tokens), probe.start // page_size
    assert 0 < num_tokens <= page_size, "a probe looks at one page"
    assert probe.start % page_size == 0, "a probe starts where a page does"
    positions = torch.arange(probe.start, probe.start + num_tokens).to(device)
    slot_mapping = positions - probe.start + NULL_PAGE * page_size
    span = Span(probe.row, probe.start, num_tokens, 0, _into_padding(probe))
    inputs = ForwardInputs(
        token_ids=torch.from_numpy(probe.tokens).to(device, torch.int64),
        positions=positions,
        attention=AttentionMeta((span,), dict.fromkeys(model.pools, slot_mapping)),
        logits_indices=positions[:0],
        sampled=(),
        prompt_rows=(),
        unsampled=(),
        sample_spans=(),
        sample_rows=positions[:0],
        is_probe=True,
    )
    model.forward(inputs, inputs.logits_indices)
    verdicts = []
    for name, pool in model.pools.items():
        page = int(tables[name].pages(probe.row, index + 1)[-1])
        parts = zip(pool.page(NULL_PAGE, num_tokens), pool.page(page, num_tokens), strict=True)
        verdicts += [(deviation(*sides) <= TOLERANCES[pool.dtype]).all() for sides in parts]
    if model.states is not None and probe.states is not None:
        verdicts += _state_verdicts(probe.states, model.states, TOLERANCES[model.decoder.dtype])
    return torch.stack(verdicts).all()


def _into_padding(probe: Probe) -> StateMoves | None:
    if probe.states is None:
        return None
    end = probe.start + len(probe.tokens)
    return StateMoves(probe.states.source, ((end, NULL_PAGE),))


def _state_verdicts(states: StateMoves, pool: StatePool, tolerance: float) -> list[Tensor]:
    """Compare each part of the state after the page, if it is kept; a layer's is one vector."""
    ((_, kept),) = states.targets
    if kept == NULL_PAGE:
        return []
    sides = zip(pool.page(NULL_PAGE), pool.page(kept), strict=True)
    rows = ([side.flatten(1)[:, None, None] for side in part] for part in sides)
    return [(deviation(*part) <= tolerance).all() for part in rows]


def deviation(computed: Tensor, kept: Tensor) -> Tensor:
    """Measure how far the content of a page is from the computed one, relative to its size.

    A position is measured against its own norm or the page's mean one, whichever is larger, so that
    a position with hardly any content is not judged by its rounding.

    Both are one part of a page, [layers, heads, positions, elements]: K, V, the latent of MLA, or
    its rotary key. The result is float32 [layers, positions].
    """
    right = computed.float()
    norms = right.square().sum((1, 3))
    scale = torch.maximum(norms, norms.mean(-1, keepdim=True)).clamp_min(_TINY)
    return ((kept.float() - right).square().sum((1, 3)) / scale).sqrt()
