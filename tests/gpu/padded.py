"""Forwards padded as graphs pad them, on the CPU: each "replay" computes again what was captured,
over the same inputs, with attention by torch. What no row owns is written to page 0, and what no
row owns comes out of attention as nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cache.types import PoolName
from session_server.attention.base import AttentionMeta, DeviceRows, Span
from session_server.runner.decode_graphs import DecodeGraphs, Graph
from session_server.runner.graph_sizes import GraphSize
from session_server.runner.model_runner import ModelRunner

NONSENSE = 7.0


class CalledAgain:
    """A `GraphApi` that computes again what it captured: what waits, waits in every replay."""

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        out = run().clone()

        def replay() -> None:
            out.copy_(run())

        return Graph(replay, out)


@dataclass
class PaddedPlan:
    """A `GraphPlan` over any backend of attention, which reads on the host what the rows are."""

    backend: Any
    pool: Any
    rows: DeviceRows | None = None
    slots: Tensor = field(init=False)

    def refresh(self, rows: DeviceRows) -> None:
        self.rows = rows

    def plan(self, slot_mapping: Mapping[PoolName, Tensor]) -> PaddedPlan:
        self.slots = slot_mapping[self.pool.name]
        return self

    def attend(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        assert self.rows is not None
        columns = (self.rows.rows, self.rows.starts, self.rows.lengths, self.rows.offsets)
        described = zip(*(column.tolist() for column in columns), strict=True)
        spans = tuple(Span(*row) for row in described if row[2])
        num_tokens = sum(span.num_tokens for span in spans)
        out = q.new_full((len(q), q.shape[1] * q.shape[2]), NONSENSE)
        self.pool.write(layer, self.slots[num_tokens:], kv[num_tokens:])
        if spans:
            meta = AttentionMeta(spans, {self.pool.name: self.slots[:num_tokens]})
            attended = self.backend.plan(meta).attend(layer, q[:num_tokens], kv[:num_tokens], sinks)
            out[:num_tokens] = attended
        return out


def pad_forwards(runner: ModelRunner, sizes: Sequence[GraphSize]) -> None:
    """Have a runner of GQA layers compute forwards in these sizes, its draft model's too."""
    for model in runner._models:
        backends: Any = model._backends

        def plans(_: GraphSize, model: Any = model, backends: Any = backends) -> dict[Any, Any]:
            return {name: PaddedPlan(backends[name], model.pools[name]) for name in model.pools}

        graphs = DecodeGraphs(model.decoder, plans, pools=model._table_names, api=CalledAgain())
        graphs.capture(sizes, on_progress=lambda _: None)
        model.graphs = graphs
    runner._inputs.max_row_tokens = max(size.max_row_tokens for size in sizes)
    if runner._draft is not None:
        runner._draft.use_graphs()
