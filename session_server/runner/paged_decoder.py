"""A decoder together with the KV it keeps: what one forward is made of, whoever plans it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from torch import Tensor

from cache.pool.mha import MhaPool
from cache.pool.page_table import PageTable
from cache.spec import CacheSpec, Capacity
from session_server.attention.base import AttentionBackend, BackendFactory
from session_server.attention.cpu import CpuBackend
from session_server.attention.reference import ReferenceBackend
from session_server.models.decoder import Decoder
from session_server.runner.inputs import ForwardInputs

BackendName = Literal["auto", "cpu", "torch"]

_BACKENDS: Final[Mapping[str, BackendFactory]] = MappingProxyType(
    {"cpu": CpuBackend, "torch": ReferenceBackend}
)


class PagedDecoder:
    """One model, its KV pool and the attention over it.

    Which pages are a row's is the table's to say; decoders that share a table keep the KV of the
    same positions under the same page ids, each in a pool of its own.
    """

    __slots__ = ("_backend", "backend_name", "decoder", "pool")

    def __init__(
        self,
        decoder: Decoder,
        spec: CacheSpec,
        capacity: Capacity,
        *,
        table: PageTable,
        backend: BackendName = "auto",
    ) -> None:
        """Allocate the pool.

        Args:
            decoder: the model; decides device and dtype.
            spec: made by `decoder.config.cache_spec` for the same dtype.
            capacity: how many pages.
            table: whose pages are whose.
            backend: attention; "auto" is "cpu" on a CPU and "torch" elsewhere.

        Raises:
            torch.OutOfMemoryError: the device has less memory than the pool needs.
        """
        assert len(spec.groups) == 1, "one pool: full attention"
        (group,) = spec.groups
        device = decoder.device
        self.decoder = decoder
        self.pool = MhaPool(
            group,
            page_size=spec.page_size,
            num_pages=capacity.num_pages[group.pool],
            dtype=decoder.dtype,
            device=device,
        )
        self.backend_name = backend
        if backend == "auto":
            self.backend_name = "cpu" if device.type == "cpu" else "torch"
        num_heads = decoder.config.layers[0].mixer.num_heads
        factory = _BACKENDS[self.backend_name]
        self._backend: AttentionBackend = factory(self.pool, table, num_heads=num_heads)

    def forward(self, inputs: ForwardInputs, wanted: Tensor) -> Tensor:
        """Compute every token of a forward and write its KV.

        Args:
            inputs: the page table already holds their pages.
            wanted: int64 [n], the tokens whose hidden state is asked for.

        Returns:
            [n, hidden], normed for the head.
        """
        return self.decoder.forward(
            inputs.token_ids,
            inputs.positions,
            attention=self._backend.plan(inputs.attention),
            wanted=wanted,
        )
