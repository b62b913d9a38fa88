"""Latents of multi-head latent attention (MLA, DeepSeek-AI 2024), paged, one tensor for all layers.

Layout: [layers, num_pages, page_size, latent + rope]. What a position stores is one row, so
consecutive pages are one block of consecutive rows, read in place without a gather.

To a reader the rows are K and V of one head that every query head shares, where V is K itself. An
absorbed query (see `session_server.attention.mla`) is scored against the whole row; of the mixture
of rows only the latent part is used, which costs an eighth more than reading that part alone and
saves a second view.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache.pool.storage import zeros
from cache.spec import LayerGroup, LayerKind
from cache.types import PoolName


class MlaPool:
    """Device memory of one `LayerGroup` of kind LATENT. Implements `KvPages`.

    Pages start as zeros, so that padding never reads a NaN. A page handed from one holder to the
    next keeps its contents: readers must stop at their own length.
    """

    __slots__ = (
        "_by_layer",
        "_rows",
        "_storage",
        "dtype",
        "name",
        "page_size",
        "read_dtype",
        "rope_dim",
    )

    def __init__(
        self,
        group: LayerGroup,
        *,
        page_size: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        read_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the pages.

        Args:
            group: what a position takes.
            page_size: positions of a page.
            num_pages: the padding page included.
            dtype: of what is stored; what is written is cast to it.
            device: where the pages lie.
            read_dtype: of the copies that `gather` makes; None for `dtype`.

        Raises:
            torch.OutOfMemoryError: the device has less memory than the pool needs.
        """
        assert group.kind is LayerKind.LATENT, "this pool stores latents only"
        assert group.num_kv_heads == 1, "all heads share one latent"
        assert 0 < group.rope_dim < group.head_dim, "a row is a latent and a rotary key"
        assert dtype.itemsize == group.dtype_bytes, "the spec was made for another dtype"
        self.name: PoolName = group.pool
        self.page_size = page_size
        self.dtype = dtype
        self.read_dtype = dtype if read_dtype is None else read_dtype
        self.rope_dim = group.rope_dim
        num_layers, width = len(group.layers), group.head_dim
        shape = (num_layers, num_pages, page_size, width)
        self._storage = zeros(shape, dtype=dtype, device=device)
        self._rows = self._storage.view(num_layers, 1, 1, num_pages * page_size, width)
        self._by_layer = self._storage.view(num_layers, num_pages * page_size, width).unbind(0)

    @property
    def num_pages(self) -> int:
        """Pages held, the padding page 0 included."""
        return self._storage.shape[1]

    @property
    def num_layers(self) -> int:
        """Layers that share the pool."""
        return self._storage.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """One: every query head reads the same row."""
        return 1

    @property
    def head_dim(self) -> int:
        """Elements of a row, the rotary key included."""
        return self._storage.shape[3]

    @property
    def rank(self) -> int:
        """Elements of a latent."""
        return self.head_dim - self.rope_dim

    @property
    def bytes_per_layer_token(self) -> int:
        """Bytes of one position in one layer."""
        return self.head_dim * self._storage.element_size()

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self._storage.device

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for the pages of all layers."""
        return self._storage.nbytes

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store new positions of one layer.

        Args:
            layer: index within the group, not within the model.
            slots: int64 [tokens], page * page_size + offset of each position.
            kv: [tokens, 2, latent + rope]; both are the same row, the first is stored.
        """
        rows = kv[:, 0]
        if rows.dtype != self.dtype:
            rows = rows.to(self.dtype)
        self._by_layer[layer].index_copy_(0, slots, rows)

    def run(self, first_slot: int, num_slots: int) -> tuple[Tensor, ...]:
        """Views of consecutive slots in every layer, without a copy.

        Returns:
            (K of layer 0, V of layer 0, K of layer 1, ...), each [1, 1, num_slots, latent + rope];
            K and V of a layer are the same view.
        """
        rows = self._rows.narrow(3, first_slot, num_slots).unbind(0)
        return tuple(view for row in rows for view in (row, row))

    def page(self, page: int, num_slots: int) -> tuple[Tensor, ...]:
        """Views of the first slots of one page in every layer.

        Returns:
            The latents [layers, 1, num_slots, latent] and rotary keys [layers, 1, num_slots, rope].
        """
        rows = self._storage[:, None, page, :num_slots]
        return rows[..., : self.rank], rows[..., self.rank :]

    def gather(self, layer: int, pages: Tensor, cleared: Tensor | None = None) -> Tensor:
        """Copy whole pages of one layer together.

        Args:
            layer: index within the group.
            pages: int64 [n].
            cleared: int64 [m], slots of the copy that are to be zero.

        Returns:
            [2, 1, n * page_size, latent + rope]; one copy, seen as K and as V.
        """
        copied = self._storage[layer].index_select(0, pages).flatten(0, 1)
        if self.read_dtype != self.dtype:
            copied = copied.to(self.read_dtype)
        if cleared is not None:
            copied.index_fill_(0, cleared, 0.0)
        return copied.expand(2, 1, -1, -1)
