"""Say what codes of 8 or 4 bits cost a model: its logits with them against those without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from cache.pool.page_table import PageTable
from cache.spec import Capacity, LayerKind
from cache.types import RowId, StateMoves, TableWrite, Tokens, TurnId, pages_for
from session_server.core.batch import Batch, BatchRow
from session_server.models.decoder import Decoder
from session_server.runner.inputs import InputBuilder
from session_server.runner.paged_decoder import PagedDecoder

NUM_TOKENS: Final = 128
"""Length of the sequence that is compared: random tokens, because only models have texts."""

_PAGE_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class QuantizationEffect:
    """Hold how far logits are from those of the weights before they were quantized.

    `error`: length of the difference, relative to that of the logits less their mean. `divergence`:
    Kullback-Leibler divergence in nats, its mean over positions. `same_choice`: share of positions
    whose most likely token is the same.
    """

    error: float
    divergence: float
    same_choice: float

    @classmethod
    def of(cls, before: Tensor, after: Tensor) -> QuantizationEffect:
        """Compare logits, float32 [tokens, vocab]."""
        centered = before - before.mean(-1, keepdim=True)
        off = (after - after.mean(-1, keepdim=True) - centered).norm() / centered.norm()
        logprobs, others = before.log_softmax(-1), after.log_softmax(-1)
        divergence = (logprobs.exp() * (logprobs - others)).sum(-1).mean()
        same = (before.argmax(-1) == after.argmax(-1)).float().mean()
        # Rounding may make it negative; what is not a number stays that.
        return cls(off.item(), max(divergence.item(), 0.0), same.item())

    def __str__(self) -> str:
        return (
            f"over {NUM_TOKENS} random tokens logits are off by {self.error:.1%}, they diverge by "
            f"{self.divergence:.2g} nats, and the most likely token is the same in "
            f"{self.same_choice:.0%}"
        )


@torch.inference_mode()
def sequence_logits(decoder: Decoder) -> Tensor:
    """Return the logits of every position of a fixed sequence: float32 [tokens, vocab].

    Uses KV memory of its own, for this one sequence.
    """
    num_tokens = min(NUM_TOKENS, decoder.config.max_position_embeddings)
    num_pages = pages_for(num_tokens, _PAGE_SIZE)
    spec = decoder.config.cache_spec(_PAGE_SIZE, decoder.dtype_name)
    pools = [group.pool for group in spec.groups if group.kind is not LayerKind.RECURRENT]
    capacity = Capacity(dict.fromkeys(pools, num_pages + 1), 1, num_tokens, num_states=2)
    tables = {pool: PageTable(1, num_pages, device=decoder.device) for pool in pools}
    for pool, table in tables.items():
        table.apply(TableWrite(pool, RowId(1), 0, np.arange(1, num_pages + 1, dtype=np.int32)))
    model = PagedDecoder(decoder, spec, capacity, tables=tables)
    builder = InputBuilder(tables, page_size=_PAGE_SIZE, last_tokens=torch.zeros(2).long())
    inputs = builder.build(Batch(0, (_row(_tokens(decoder, num_tokens)),), ()))
    return model.logits(model.forward(inputs, torch.arange(num_tokens)))


def _tokens(decoder: Decoder, num_tokens: int) -> Tokens:
    rng = np.random.default_rng(0)
    return rng.integers(0, decoder.config.vocab_size, num_tokens).astype(np.int32)


def _row(tokens: Tokens) -> BatchRow:
    return BatchRow(
        turn_id=TurnId("quantization"),
        attempt=0,
        row=RowId(1),
        start=0,
        num_tokens=len(tokens),
        tokens=tokens,
        sample=False,
        sampling=None,
        states=StateMoves(0, ((len(tokens), 1),)),
    )
