"""Store latents of multi-head latent attention (MLA, DeepSeek-AI 2024) in pages.

Layout: [layers, num_pages, page_size, latent + rope]. A position stores one row, so consecutive
pages are one block of consecutive rows, read in place without a gather.

Readers see the rows as K and V of one head that every query head shares, where V is K itself. An
absorbed query (see `session_server.attention.mla`) is scored against the whole row. Of the weighted
sum of rows only the latent part is used, which costs an eighth more than reading that part alone
and saves a second view.
"""

from __future__ import annotations

from torch import Tensor

from cache.pool.storage import KvPool, PageFormat, cast_to_stored, movable
from cache.spec import LayerGroup, LayerKind


class MlaPool(KvPool):
    """Hold the device memory of one `LayerGroup` of kind LATENT.

    Readers see one KV head; the rotary key is the end of each row.
    """

    page_axis = 1

    def __init__(self, group: LayerGroup, pages: PageFormat) -> None:
        """Allocate the pages."""
        assert group.kind is LayerKind.LATENT, "this pool stores latents only"
        assert group.num_kv_heads == 1, "all heads share one latent"
        assert 0 < group.qk_rope_head_dim < group.head_dim, "a row is a latent and a rotary key"
        width = group.head_dim
        super().__init__(group, pages, (pages.num_pages, pages.page_size, width))
        self._by_layer = movable(self.storage).flatten(1, 2).unbind(0)
        self._layer_pages = movable(self.storage).unbind(0)
        self._rows = self.storage.view(len(group.layers), 1, 1, -1, width)
        self.kv_lora_rank = width - group.qk_rope_head_dim
        """Elements of a latent."""

    def write(self, layer: int, slot_mapping: Tensor, kv: Tensor) -> None:
        """Write new rows; the two of `kv` [tokens, 2, latent + rope] are the same."""
        rows = movable(cast_to_stored(kv[:, 0], self.dtype))
        self._by_layer[layer].index_copy_(0, slot_mapping, rows)

    def run(self, first_slot: int, num_slots: int) -> tuple[Tensor, ...]:
        """Return views of consecutive slots; K and V of a layer are the same view."""
        rows = self._rows.narrow(3, first_slot, num_slots).unbind(0)
        return tuple(view for row in rows for view in (row, row))

    def page(self, page: int, num_slots: int) -> tuple[Tensor, ...]:
        """Return latents [layers, 1, num_slots, latent] and keys [layers, 1, num_slots, rope]."""
        rows = self.storage[:, None, page, :num_slots]
        return rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]

    def gather(self, layer: int, pages: Tensor, cleared: Tensor | None = None) -> Tensor:
        """Copy whole pages, [2, 1, n * page_size, latent + rope]: one copy, seen as K and as V."""
        copied = self._layer_pages[layer].index_select(0, pages).flatten(0, 1)
        if self.read_dtype != self.dtype:
            copied = copied.view(self.dtype).to(self.read_dtype)
        if cleared is not None:
            copied.index_fill_(0, cleared, 0.0)
        return copied.expand(2, 1, -1, -1)
