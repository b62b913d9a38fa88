"""Replay forwards of few tokens a row, as graphs that were captured at start.

A decode step of a model of 36 layers is hundreds of launches, which take a host longer to make
than a GPU to compute. A CUDA graph is all of them as one. It computes a fixed number of rows over
tensors that stay where they are, so a batch is padded to the next of a few sizes: what is missing
are rows without a token, and tokens at position 0 of page 0, which nobody reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from cache.types import PoolName
from session_server.attention.base import DeviceRows, GraphPlan
from session_server.core.batch import GraphUse
from session_server.models.decoder import Decoder
from session_server.runner.capacity import free_bytes, says_out_of_memory
from session_server.runner.graph_sizes import GraphSize, choose_size
from session_server.runner.inputs import PackedInputs

NUM_WARM_UPS: Final = 2
"""Forwards before a capture: kernels are compiled and workspaces allocated in the first."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Hold what was captured. `replay` computes `out` anew, in its place."""

    replay: Callable[[], None]
    out: Tensor


class GraphApi(Protocol):
    """Capture what a function launches on a device."""

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        """Capture `run`, which returns a tensor; it is called more than once."""
        ...


class CudaGraphs:
    """Capture CUDA graphs that share one pool of memory: they are replayed one after the other."""

    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        """Create it. `max_bytes`: what all graphs may take of the device; None for anything."""
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._min_free_bytes = 0
        if max_bytes is not None:
            self._min_free_bytes = max(0, free_bytes(device) - max_bytes)

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        """Capture `run` on a stream of its own, after it ran there.

        Raises:
            torch.OutOfMemoryError: it takes more than graphs may, or than there is.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
                out = run()
        except RuntimeError as error:
            if says_out_of_memory(str(error)):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own
        if free_bytes(self._device) < self._min_free_bytes:
            raise torch.OutOfMemoryError("a graph takes more than graphs may")
        return Graph(graph.replay, out)


class DecodeGraphs:
    """Compute the hidden states of forwards of few tokens a row, by replay."""

    def __init__(
        self, decoder: Decoder, plans: GraphPlanner, *, pools: tuple[PoolName, ...], api: GraphApi
    ) -> None:
        """Create it, with no graph yet.

        `plans`: prepares the model's pools for a size. `pools`: in the order of the slots in
        `PackedInputs`, which may be more: those of a model that this one drafts for.
        """
        self._decoder = decoder
        self._plans = plans
        self._pools = pools
        self._api = api
        self._buckets: dict[GraphSize, _Bucket] = {}
        self.left_out: tuple[GraphSize, ...] = ()
        """Sizes that memory was missing for."""
        self.uses: Counter[GraphUse] = Counter()
        """How many forwards were computed in which way."""
        self.last_use = GraphUse.REPLAYED

    def capture(
        self, sizes: Sequence[GraphSize], *, on_progress: Callable[[GraphSize], None]
    ) -> None:
        """Capture graphs of these sizes, the largest first: the others fit into its memory. One
        that memory is missing for is left out. `on_progress` is told each size that was tried."""
        for size in sorted(sizes, key=lambda size: size.num_tokens, reverse=True):
            try:
                self._buckets[size] = self._captured(size)
            except torch.OutOfMemoryError:
                self.left_out += (size,)
            on_progress(size)

    def _captured(self, size: GraphSize) -> _Bucket:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self._decoder.device)

        by_token = zeros(2 + len(self._pools), size.num_tokens)
        by_row = zeros(5 + size.max_row_tokens, size.num_rows)
        token_ids, positions, *slots = by_token.unbind(0)
        rows = DeviceRows.of(by_row)
        slot_mapping = dict(zip(self._pools, slots, strict=True))
        plans = self._plans(size)
        attention = {pool: plan.plan(slot_mapping) for pool, plan in plans.items()}

        def run() -> Tensor:
            for plan in plans.values():
                plan.refresh(rows)
            return self._decoder.forward(
                token_ids, positions, attention=attention, logits_indices=None
            )

        return _Bucket(by_token, by_row, plans, self._api.capture(run))

    def forward(self, inputs: PackedInputs | None) -> Tensor | None:
        """Return the hidden states of all tokens of a forward, [tokens, hidden]; None if no graph
        computes it, which `last_use` says the reason of.

        They are overwritten by the next replay. `inputs`: None if a row has too many tokens.
        """
        bucket, self.last_use = self._bucket_of(inputs)
        self.uses[self.last_use] += 1
        if bucket is None or inputs is None:
            return None
        _copy_padded(bucket.by_token, inputs.by_token)
        _copy_padded(bucket.by_row, inputs.by_row)
        bucket.graph.replay()
        return bucket.graph.out[: inputs.by_token.shape[1]]

    def _bucket_of(self, inputs: PackedInputs | None) -> tuple[_Bucket | None, GraphUse]:
        if inputs is None:
            return None, GraphUse.MANY_TOKENS
        size, use = choose_size(
            self._buckets,
            inputs.num_rows,
            inputs.max_row_tokens,
            num_tokens=inputs.by_token.shape[1],
        )
        return None if size is None else self._buckets[size], use


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Hold one graph, and what it reads and writes beside weights and pools.

    `by_token`: int64 [2 + pools, tokens], `by_row`: int64 [5 + max_row_tokens, rows]; a batch is
    copied to them. `plans`: they have the tables of tiles, which nobody else holds.
    """

    by_token: Tensor
    by_row: Tensor
    plans: Mapping[PoolName, GraphPlan]
    graph: Graph


def _copy_padded(to: Tensor, part: Tensor) -> None:
    """Copy a matrix to the upper left of another, whose other elements become zero."""
    to.zero_()
    to[: part.shape[0], : part.shape[1]] = part


GraphPlanner = Callable[[GraphSize], Mapping[PoolName, GraphPlan]]
"""Prepare every pool of a model for forwards of a size."""
