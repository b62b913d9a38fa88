"""Replay forwards of rows that decode, as graphs that were captured at start.

A decode step of a model of 36 layers is hundreds of launches, which take a host longer to make
than a GPU to compute. A CUDA graph is all of them as one. It computes a fixed number of rows over
tensors that stay where they are, so a batch is padded to the next of a few sizes: what is missing
is row 0 of the tables, at position 0, in page 0, which nobody reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from cache.types import PoolName
from session_server.attention.base import DecodePlan
from session_server.attention.mla import MlaDecodePlan
from session_server.models.decoder import Decoder

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

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        """Capture `run` on a stream of its own, after it ran there."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
            out = run()
        return Graph(graph.replay, out)


def bucket_sizes(largest: int) -> tuple[int, ...]:
    """Return the numbers of rows that are captured: powers of two up to 8, then multiples of 8, and
    of 16 from 64 on; the last is at least `largest`."""
    small = [size for size in (1, 2, 4, 8) if size < 2 * largest]
    middle = [*range(16, min(largest, 64) + 8, 8)] if largest > 8 else []
    return (*small, *middle, *(range(80, largest + 16, 16) if largest > 64 else ()))


class DecodeGraphs:
    """Compute the hidden states of forwards that decode, by replay."""

    def __init__(
        self, decoder: Decoder, plans: DecodePlanner, *, pools: tuple[PoolName, ...], api: GraphApi
    ) -> None:
        """Create it, with no graph yet.

        `plans`: prepares attention for a number of rows. `pools`: in the order of the slots in
        `ForwardInputs.decoding`.
        """
        self._decoder = decoder
        self._plans = plans
        self._pools = pools
        self._api = api
        self._buckets: list[_Bucket] = []
        self.num_replays = 0
        self.fallbacks: Counter[str] = Counter()
        """Forwards that were computed without a graph, by reason."""

    def capture(self, sizes: tuple[int, ...], *, on_progress: Callable[[int], None]) -> None:
        """Capture graphs for batches of these sizes, the largest first: the others fit into its
        memory. `on_progress` is told each size that is done."""
        for size in sorted(sizes, reverse=True):
            self._buckets.insert(0, self._captured(size))
            on_progress(size)

    def _captured(self, size: int) -> _Bucket:
        device = self._decoder.device
        inputs = torch.zeros((4 + len(self._pools), size), dtype=torch.int64, device=device)
        token_ids, positions, rows, *slot_mappings, logits_indices = inputs.unbind(0)
        plans = self._plans(size)
        attention = {
            pool: plans[pool].plan(slots)
            for pool, slots in zip(self._pools, slot_mappings, strict=True)
        }

        def run() -> Tensor:
            for plan in plans.values():
                plan.refresh(rows, positions)
            return self._decoder.forward(
                token_ids, positions, attention=attention, logits_indices=logits_indices
            )

        return _Bucket(inputs, plans, self._api.capture(run))

    def forward(self, decoding: Tensor | None) -> Tensor | None:
        """Return the hidden states of a forward, [rows, hidden], in the order of the batch.

        They are overwritten by the next replay. `decoding`: see `ForwardInputs`. None if no graph
        computes that; why is counted, of batches.
        """
        if decoding is None:
            self.fallbacks["not only decode"] += 1
            return None
        num_rows = decoding.shape[1]
        bucket = next((each for each in self._buckets if each.inputs.shape[1] >= num_rows), None)
        if bucket is None:
            self.fallbacks["more rows than the largest graph"] += 1
            return None
        bucket.inputs[:, :num_rows] = decoding
        bucket.inputs[:, num_rows:].zero_()
        bucket.graph.replay()
        self.num_replays += 1
        return bucket.graph.out[:num_rows]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Hold one graph, and what it reads and writes beside weights and pools.

    `inputs`: int64 [4 + pools, rows], which a batch is copied to. `plans`: they have the tables of
    tiles, which nobody else holds.
    """

    inputs: Tensor
    plans: Mapping[PoolName, DecodePlan | MlaDecodePlan]
    graph: Graph


DecodePlanner = Callable[[int], Mapping[PoolName, DecodePlan | MlaDecodePlan]]
"""Prepare attention over every pool for forwards of a number of rows with one token each."""
