"""Store keys and values of attention (MHA, GQA, MQA) in pages, one tensor for all layers.

Layout: [layers, 2, kv_heads, num_pages, page_size, head_dim], K before V. Heads lie outside
positions, so consecutive pages are one strided block per head: attention over a run of pages reads
it in place, without a gather.
"""

from __future__ import annotations

from torch import Tensor

from cache.pool.storage import KvPool, PageFormat, cast_to_stored, movable
from cache.spec import LayerGroup, LayerKind


class MhaPool(KvPool):
    """Hold the device memory of one `LayerGroup` of kind FULL or WINDOW."""

    page_axis = 3

    def __init__(self, group: LayerGroup, pages: PageFormat) -> None:
        """Allocate the pages."""
        assert group.kind in {LayerKind.FULL, LayerKind.WINDOW}, "this pool stores K and V"
        heads, head_dim, num_layers = group.num_kv_heads, group.head_dim, len(group.layers)
        num_pages, page_size = pages.num_pages, pages.page_size
        super().__init__(group, pages, (2, heads, num_pages, page_size, head_dim))
        slots = num_pages * page_size
        self._sides = self.storage.view(num_layers * 2, 1, heads, slots, head_dim)
        stored = movable(self.storage)
        self._by_layer = stored.view(num_layers, 2 * heads, slots, head_dim).unbind(0)
        self._layer_pages = stored.view(
            num_layers, 2 * heads, num_pages, page_size * head_dim
        ).unbind(0)

    def write(self, layer: int, slot_mapping: Tensor, kv: Tensor) -> None:
        """Write new K and V; implements `KvPool.write`."""
        kv = movable(cast_to_stored(kv, self.dtype))
        self._by_layer[layer].index_copy_(1, slot_mapping, kv.transpose(0, 1))

    def run(self, first_slot: int, num_slots: int) -> tuple[Tensor, ...]:
        """Return views of consecutive slots; implements `KvPool.run`."""
        return self._sides.narrow(3, first_slot, num_slots).unbind(0)

    def page(self, page: int, num_slots: int) -> tuple[Tensor, ...]:
        """Return K and V of one page, each [layers, kv_heads, num_slots, head_dim]."""
        return self.storage[:, :, :, page, :num_slots].unbind(1)

    def gather(self, layer: int, pages: Tensor, cleared: Tensor | None = None) -> Tensor:
        """Copy whole pages of one layer; implements `KvPool.gather`."""
        copied = self._layer_pages[layer].index_select(1, pages)
        if self.read_dtype != self.dtype:
            copied = copied.view(self.dtype).to(self.read_dtype)
        heads = copied.view(2, self.num_kv_heads, -1, self.head_dim)
        return heads if cleared is None else heads.index_fill_(2, cleared, 0.0)
