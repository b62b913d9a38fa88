"""Gather what a scrape of the metrics shows of this moment."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from session_server.metrics.live import LiveState, PrefillState, StoreState
from session_server.sessions.roles.asking import SentCounts
from session_server.sessions.roles.joining import Roles
from session_server.sessions.roles.serving import ServedCounts
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
        role=services.roles.role,
        prefills=_prefill_states(services.roles),
    )


def _prefill_states(roles: Roles) -> dict[str, PrefillState]:
    states = {}
    if (sent := roles.prefills) is not None:
        states["sent"] = PrefillState(
            outcomes=_counted(sent.counts, "done refused failed cancelled no_peer"),
            num_under_way=sent.num_sent,
            num_tokens=sent.counts.done_tokens,
            num_bytes=sent.counts.done_bytes,
            seconds=sent.counts.done_s,
        )
    if (served := roles.service) is not None:
        states["served"] = PrefillState(
            outcomes=_counted(served.counts, "done refused failed cancelled"),
            num_under_way=served.num_prefills,
            num_tokens=served.counts.done_tokens,
            num_bytes=served.counts.done_bytes,
            seconds=served.counts.done_s,
        )
    return states


def _counted(counts: SentCounts | ServedCounts, names: str) -> dict[str, int]:
    return {name: getattr(counts, name) for name in names.split()}


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
