"""Count what the engine has done since the server started, over all engines it has had.

An engine counts from its own start. What is added here is the growth from one sample to the next,
so a restart takes nothing back; what a lost engine did since its last sample is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from session_server.core.events import SIZE_BOUNDS, CheckerReport, EngineStats, SizeCounts

_BOUNDS: Final = (*map(str, SIZE_BOUNDS), "+Inf")


class _Total(NamedTuple):
    """Name the counter of one total, what it counts, and its unit in those of the total."""

    counter: str
    text: str
    unit: float = 1.0


_OF_STATS: Final[Mapping[str, _Total]] = {
    "steps": _Total("forwards", "Forwards of the engine."),
    "forward_ms": _Total("forward_seconds", "Seconds in forwards.", 1e-3),
    "host_ms": _Total("host_seconds", "Seconds of engine steps outside forwards.", 1e-3),
    "prompt_tokens": _Total("prompt_tokens", "Tokens of the prompts of admitted turns."),
    "cached_tokens": _Total(
        "prompt_tokens_cached",
        "Those of them that were not computed, because their KV was there.",
    ),
    "generated_tokens": _Total(
        "generation_tokens", "Tokens generated, counted while their turns run."
    ),
    "draft_tokens": _Total(
        "spec_decode_num_draft_tokens", "Draft tokens of the output that forwards verified."
    ),
    "accepted_tokens": _Total(
        "spec_decode_num_accepted_tokens", "Those of them that were accepted."
    ),
    "retractions": _Total(
        "retractions", "Running turns that had to wait again, because memory was short."
    ),
    "input_draft_tokens": _Total(
        "input_draft_tokens", "Tokens of drafts of the input that were computed."
    ),
    "used_draft_tokens": _Total(
        "input_draft_tokens_used", "Those of them that a turn then did not compute."
    ),
}
_OF_TIERS: Final[Mapping[str, _Total]] = {
    "spilled_tokens": _Total("kv_spilled_tokens", "Tokens whose KV was copied out of the pools."),
    "spilled_bytes": _Total("kv_spilled_bytes", "Bytes of KV copied out of the pools."),
    "spill_ms": _Total("kv_spill_seconds", "Seconds that copies out of the pools took.", 1e-3),
    "restored_tokens": _Total(
        "kv_restored_tokens", "Tokens whose KV was copied back, and so not computed again."
    ),
    "restored_bytes": _Total("kv_restored_bytes", "Bytes of KV copied back into the pools."),
    "restore_ms": _Total("kv_restore_seconds", "Seconds that copies back took.", 1e-3),
    "lookups": _Total("kv_lookups", "Cold sessions that were looked for outside of the pools."),
    "hits": _Total("kv_hits", "Those of them for which KV was copied back."),
    "written_bytes": _Total("kv_written_bytes", "Bytes of KV written to files."),
    "refused_files": _Total("kv_refused_files", "Files of KV that were not what they should be."),
    "failed_copies": _Total("kv_failed_copies", "Copies of KV that memory or the disk refused."),
    "no_room_files": _Total(
        "kv_no_room_files", "Files among them, for which the disk had no room or too little."
    ),
    "dropped_segments": _Total("kv_dropped_segments", "Copies of KV that gave way to others."),
}
_OF_CHECKS: Final[Mapping[str, _Total]] = {
    "runs": _Total("memory_checks", "Checks of the memory's books."),
    "probes": _Total(
        "memory_probes", "Pages whose content was compared with what their tokens give."
    ),
    "rebuilds": _Total("memory_rebuilds", "Times the books began again from zero."),
    "reprefill_tokens": _Total(
        "reprefill_tokens", "Tokens that are computed again because their KV was in doubt."
    ),
}


class EngineTotals:
    """Add the totals of one engine after the other to counters."""

    def __init__(self, namespace: str, registry: CollectorRegistry) -> None:
        self._counters = {
            total.counter: Counter(
                total.counter, total.text, namespace=namespace, registry=registry
            )
            for total in (*_OF_STATS.values(), *_OF_TIERS.values(), *_OF_CHECKS.values())
        }
        self._tier_bytes = Gauge(
            "kv_tier_bytes",
            "KV outside of the pools, in host memory and on disk.",
            ["tier"],
            namespace=namespace,
            registry=registry,
        )
        self._graph_uses = Counter(
            "cuda_graph_forwards",
            "Forwards where CUDA graphs are captured: replayed, or launched kernel by kernel for "
            "their many tokens or rows, or because a graph would compute many tokens more.",
            ["outcome"],
            namespace=namespace,
            registry=registry,
        )
        self._last: dict[str, float] = {}
        self._sizes = SizeHistograms(namespace)
        registry.register(self._sizes)

    def add_stats(self, event: EngineStats) -> None:
        """Add a sample of the engine that runs."""
        self._add(event, _OF_STATS)
        self._add(event.tiers, _OF_TIERS)
        self._tier_bytes.labels("host").set(event.tiers.host_bytes)
        self._tier_bytes.labels("disk").set(event.tiers.disk_bytes)
        self._sizes.add(event.batch_rows, event.prefill_tokens)
        for use, count in event.graph_uses.items():
            self._grow(self._graph_uses.labels(use), f"graph {use}", count)

    def add_checks(self, report: CheckerReport) -> None:
        """Add what the memory checker of the engine that runs has done."""
        self._add(report, _OF_CHECKS)

    def begin_engine(self) -> None:
        """Expect the totals of a new engine, which begin at zero."""
        self._last.clear()
        self._sizes.begin_engine()

    def _add(self, report: object, totals: Mapping[str, _Total]) -> None:
        for name, total in totals.items():
            self._grow(self._counters[total.counter], name, getattr(report, name), total.unit)

    def _grow(self, counter: Counter, name: str, value: float, unit: float = 1.0) -> None:
        """Add by how much a total is more than it was in the sample before."""
        growth = value - self._last.get(name, 0)
        if growth > 0:
            counter.inc(growth * unit)
            self._last[name] = value


class SizeHistograms(Collector):
    """Show the sizes of forwards as histograms, of which the engine counts the buckets."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._before = (SizeCounts(), SizeCounts())
        self._now = (SizeCounts(), SizeCounts())

    def add(self, batch_rows: SizeCounts, prefill_tokens: SizeCounts) -> None:
        """Take the newest counts of the engine that runs."""
        self._now = (batch_rows, prefill_tokens)

    def begin_engine(self) -> None:
        """Keep what the engines so far have counted."""
        before, now = self._before, self._now
        self._before = (_sum(before[0], now[0]), _sum(before[1], now[1]))
        self._now = (SizeCounts(), SizeCounts())

    def collect(self) -> Iterator[Metric]:
        """Yield both histograms."""
        texts = {
            "forward_turns": "Turns, and drafts of the input, in a forward.",
            "forward_prefill_tokens": "Prompt tokens of a forward that computes any.",
        }
        for (name, text), *counts in zip(texts.items(), self._before, self._now, strict=True):
            sizes = _sum(*counts)
            family = HistogramMetricFamily(f"{self._namespace}_{name}", text, labels=())
            buckets = list(zip(_BOUNDS, accumulate(sizes.counts), strict=True))
            family.add_metric((), buckets, sum_value=sizes.total)
            yield family


def _sum(one: SizeCounts, other: SizeCounts) -> SizeCounts:
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return SizeCounts(counts, one.total + other.total)
