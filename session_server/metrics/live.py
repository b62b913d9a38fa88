"""Show what the server holds at the moment of a scrape: gauges, and counts that others keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from session_server.core.session_events import CheckOutcome, CloseReason, StateReason

_REASONS: Final = tuple(reason for reason in get_args(StateReason) if reason != "turn")
_CLOSES: Final = get_args(CloseReason)


@dataclass(frozen=True, slots=True)
class StoreState:
    """Hold what a scrape reads of a store. `commits`: the upper bound of each class, in seconds, as
    Prometheus writes it, and how many commits took no longer. `num_unread`: sessions that are on
    disk alone; `moves`: how often one was "loaded" from there, or "unloaded"."""

    commits: Sequence[tuple[str, float]]
    commit_s: float
    writes: Mapping[str, int]
    num_unread: int
    moves: Mapping[str, int]
    num_behind: int
    is_failing: bool


@dataclass(frozen=True, slots=True)
class PrefillState:
    """Hold what a scrape reads of prompts that one replica computes for another, at either side.
    `outcomes`: of those that are over."""

    outcomes: Mapping[str, int]
    num_under_way: int
    num_tokens: int
    num_bytes: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LiveState:
    """Hold what a scrape reads. `budgets` maps a name to what is held and what may be; `stalled_s`
    is 0 for an engine that works; `store` is None where no session is stored. `prefills`: by side,
    "sent" or "served"."""

    sessions: int
    resident_sessions: int
    opened_sessions: int
    closed_sessions: Mapping[CloseReason, int]
    evictions: Mapping[StateReason, int]
    turns: Mapping[str, int]
    grammar_checks: Mapping[CheckOutcome, int]
    budgets: Mapping[str, tuple[int, int]]
    tasks: int
    is_engine_up: bool
    stalled_s: float
    store: StoreState | None = None
    role: str = "both"
    prefills: Mapping[str, PrefillState] = field(default_factory=dict)


class LiveCollector(Collector):
    """Collect from `read`, which a server sets when it serves; no samples before."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self.read: Callable[[], LiveState] | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        state = None if self.read is None else self.read()
        yield from self._of_sessions(state)
        yield from self._of_server(state)
        yield from self._of_store(None if state is None else state.store)
        yield from self._of_roles(state)

    def _of_sessions(self, state: LiveState | None) -> Iterator[Metric]:
        sessions = self._gauge("sessions", "Open sessions in memory.")
        resident = self._gauge("resident_sessions", "Open sessions that have KV.")
        opened = self._counter("sessions_opened", "Sessions opened.")
        closed = self._counter("sessions_closed", "Sessions closed, by reason.", "reason")
        evictions = self._counter(
            "session_evictions",
            "Times a session lost its KV, by reason; its next turn computes it again.",
            "reason",
        )
        turns = self._gauge("unfinished_turns", "Turns of all sessions that run or wait.", "state")
        if state is not None:
            sessions.add_metric((), state.sessions)
            resident.add_metric((), state.resident_sessions)
            opened.add_metric((), state.opened_sessions)
            _fill(closed, {name: state.closed_sessions.get(name, 0) for name in _CLOSES})
            _fill(evictions, {name: state.evictions.get(name, 0) for name in _REASONS})
            _fill(turns, state.turns)
        yield from (sessions, resident, opened, closed, evictions, turns)

    def _of_server(self, state: LiveState | None) -> Iterator[Metric]:
        checks = self._counter(
            "grammar_checks", "Grammars of turns that were checked before they ran.", "outcome"
        )
        held = self._gauge(
            "budget_used",
            "What all clients hold of a budget: sessions, turns, connections or bytes.",
            "budget",
        )
        limit = self._gauge("budget_limit", "What all clients may hold of it.", "budget")
        tasks = self._gauge("event_loop_tasks", "Tasks of the event loop.")
        is_up = self._gauge("engine_up", "1 while there is an engine that takes turns, else 0.")
        stalled = self._gauge(
            "engine_stalled_seconds", "Seconds since the last step of an engine that stalls, or 0."
        )
        if state is not None:
            _fill(checks, state.grammar_checks)
            _fill(held, {name: use[0] for name, use in state.budgets.items()})
            _fill(limit, {name: use[1] for name, use in state.budgets.items()})
            tasks.add_metric((), state.tasks)
            is_up.add_metric((), state.is_engine_up)
            stalled.add_metric((), state.stalled_s)
        yield from (checks, held, limit, tasks, is_up, stalled)

    def _of_store(self, store: StoreState | None) -> Iterator[Metric]:
        commits = HistogramMetricFamily(
            f"{self._namespace}_store_commit_seconds", "Time of commits of the store."
        )
        writes = self._counter("store_writes", "Writes to the store, by outcome.", "outcome")
        unread = self._gauge("store_sessions_unread", "Open sessions that are on disk alone.")
        moves = self._counter(
            "store_session_moves",
            "Times a session was loaded from the store, or left the memory to make room, by kind.",
            "kind",
        )
        behind = self._gauge(
            "store_sessions_behind",
            "Sessions, responses and conversations of which something is not on disk.",
        )
        failing = self._gauge("store_failing", "1 while the store cannot be written to, else 0.")
        if store is not None:
            commits.add_metric((), buckets=store.commits, sum_value=store.commit_s)
            _fill(writes, store.writes)
            unread.add_metric((), store.num_unread)
            _fill(moves, store.moves)
            behind.add_metric((), store.num_behind)
            failing.add_metric((), store.is_failing)
        yield from (commits, writes, unread, moves, behind, failing)

    def _of_roles(self, state: LiveState | None) -> Iterator[Metric]:
        role = self._gauge("role", "1, with the role of the server.", "role")
        prefills = self._counter(
            "prefills",
            "Prompts that other replicas were to compute (sent) or have asked for (served), by "
            "outcome.",
            *("side", "outcome"),
        )
        under_way = self._gauge("prefills_under_way", "Those that are not over.", "side")
        tokens = self._counter("prefill_tokens", "Tokens of prompts that were computed.", "side")
        moved = self._counter("prefill_bytes", "Bytes of files that hold their KV.", "side")
        seconds = self._counter("prefill_seconds", "Seconds until they were there.", "side")
        if state is not None:
            role.add_metric((state.role,), 1)
            for side, each in state.prefills.items():
                for outcome, count in each.outcomes.items():
                    prefills.add_metric((side, outcome), count)
                under_way.add_metric((side,), each.num_under_way)
                tokens.add_metric((side,), each.num_tokens)
                moved.add_metric((side,), each.num_bytes)
                seconds.add_metric((side,), each.seconds)
        yield from (role, prefills, under_way, tokens, moved, seconds)

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._namespace}_{name}", text, labels=labels)

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"{self._namespace}_{name}", text, labels=labels)


def _fill(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Any, float]) -> None:
    for label, value in values.items():
        family.add_metric((label,), value)
