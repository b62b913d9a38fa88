"""Count what the engine has done since the server started, over all engines it has had.

An engine counts from its own start. What is added here is the growth from one sample to the next,
so a restart takes nothing back; what a lost engine did since its last sample is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from session_server.core.events import SIZE_BOUNDS, CheckerReport, EngineStats, SizeCounts

_BOUNDS: Final = (*map(str, SIZE_BOUNDS), "+Inf")


class _Total(NamedTuple):
    """Name the counter of one total, and the value of its label if it has one."""

    counter: str
    value: str = ""
    unit: float = 1.0


_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "forwards": ("Forwards of the engine.", ""),
    "forward_seconds": ("Seconds in forwards.", ""),
    "host_seconds": ("Seconds of engine steps outside forwards.", ""),
    "engine_tokens": (
        "Tokens of admitted turns: prompt, cached part of it, and generated so far.",
        "kind",
    ),
    "speculative_tokens": (
        "Draft tokens that forwards verified, and those of them that were accepted.",
        "outcome",
    ),
    "retractions": ("Running turns that had to wait again, because memory was short.", ""),
    "input_draft_tokens": (
        "Tokens of drafts of the input: computed, and those of them that a turn then used.",
        "outcome",
    ),
    "memory_checks": ("Checks of the memory's books.", ""),
    "memory_probes": ("Pages whose content was compared with what their tokens give.", ""),
    "memory_rebuilds": ("Times the books began again from zero.", ""),
    "reprefill_tokens": ("Tokens that are computed again because their KV was in doubt.", ""),
}
"""Help and label of each."""

_OF_STATS: Final[Mapping[str, _Total]] = {
    "steps": _Total("forwards"),
    "forward_ms": _Total("forward_seconds", unit=1e-3),
    "host_ms": _Total("host_seconds", unit=1e-3),
    "prompt_tokens": _Total("engine_tokens", "prompt"),
    "cached_tokens": _Total("engine_tokens", "cached"),
    "generated_tokens": _Total("engine_tokens", "generated"),
    "draft_tokens": _Total("speculative_tokens", "verified"),
    "accepted_tokens": _Total("speculative_tokens", "accepted"),
    "retractions": _Total("retractions"),
    "input_draft_tokens": _Total("input_draft_tokens", "computed"),
    "used_draft_tokens": _Total("input_draft_tokens", "used"),
}
_OF_CHECKS: Final[Mapping[str, _Total]] = {
    "runs": _Total("memory_checks"),
    "probes": _Total("memory_probes"),
    "rebuilds": _Total("memory_rebuilds"),
    "reprefill_tokens": _Total("reprefill_tokens"),
}


class EngineTotals:
    """Add the totals of one engine after the other to counters."""

    def __init__(self, namespace: str, registry: CollectorRegistry) -> None:
        self._counters = {
            name: Counter(
                name, text, [label] if label else [], namespace=namespace, registry=registry
            )
            for name, (text, label) in _COUNTERS.items()
        }
        for total in (*_OF_STATS.values(), *_OF_CHECKS.values()):
            self._counter_of(total).inc(0)
        self._last: dict[str, float] = {}
        self._sizes = SizeHistograms(namespace)
        registry.register(self._sizes)

    def add_stats(self, event: EngineStats) -> None:
        """Add a sample of the engine that runs."""
        self._add(event, _OF_STATS)
        self._sizes.add(event.batch_rows, event.prefill_tokens)

    def add_checks(self, report: CheckerReport) -> None:
        """Add what the memory checker of the engine that runs has done."""
        self._add(report, _OF_CHECKS)

    def begin_engine(self) -> None:
        """Expect the totals of a new engine, which begin at zero."""
        self._last.clear()
        self._sizes.begin_engine()

    def _add(self, report: object, totals: Mapping[str, _Total]) -> None:
        for name, total in totals.items():
            value = getattr(report, name)
            growth = value - self._last.get(name, 0)
            if growth > 0:
                self._counter_of(total).inc(growth * total.unit)
                self._last[name] = value

    def _counter_of(self, total: _Total) -> Counter:
        counter = self._counters[total.counter]
        return counter.labels(total.value) if total.value else counter


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
