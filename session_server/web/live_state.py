"""Gather what a scrape of the metrics shows of this moment."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from session_server.metrics.live import LiveState, StoreState
from session_server.sessions.store.writer import COMMIT_BOUNDS_S
from session_server.sessions.views import ManagerStats, StoreUse
from session_server.web.connection_table import ConnectionTable
from session_server.web.services import AppServices


def live_state(
    services: AppServices, connections: ConnectionTable, num_tasks: Callable[[], int]
) -> LiveState:
    """Return what the server holds now."""
    stats, limits = services.sessions.stats(), connections.limits
    budgets: dict[str, tuple[int, int]] = {
        **stats.budgets,
        "connections": (connections.num_connections, limits.connections),
        "unfinished_input_bytes": (connections.num_input_bytes, limits.input_bytes),
        "unread_output_bytes": (connections.num_unread_bytes, limits.output_bytes),
    }
    return LiveState(
        sessions=stats.sessions,
        resident_sessions=stats.resident_sessions,
        opened_sessions=stats.opened_sessions,
        closed_sessions=stats.closed_sessions,
        evictions=stats.evictions,
        turns={"live": stats.live_turns, "queued": stats.queued_turns},
        grammar_checks=stats.grammar_checks,
        budgets=budgets,
        tasks=num_tasks(),
        is_engine_up=stats.ready is not None,
        stalled_s=services.sessions.engine_stalled_s or 0.0,
        store=None if stats.store is None else _store_state(stats.store, stats),
    )


def _store_state(use: StoreUse, stats: ManagerStats) -> StoreState:
    bounds = (*map(str, COMMIT_BOUNDS_S), "+Inf")
    return StoreState(
        commits=tuple(zip(bounds, accumulate(use.num_commits), strict=True)),
        commit_s=use.commit_s,
        writes={"written": use.num_writes, "failed": use.num_failed},
        num_unread=stats.unread_sessions,
        moves={"loaded": stats.loaded_sessions, "unloaded": stats.unloaded_sessions},
        num_behind=use.num_behind,
        is_failing=use.is_failing,
    )
