"""Count what a manager holds and has done, for operators."""

from __future__ import annotations

from session_server.sessions.engine_link import EngineLink
from session_server.sessions.quotas import Quotas
from session_server.sessions.registry import SessionRegistry
from session_server.sessions.replay import Replay
from session_server.sessions.turn_flow import TurnFlow
from session_server.sessions.views import BudgetUse, ManagerStats


def manager_stats(
    sessions: SessionRegistry, flow: TurnFlow, link: EngineLink, *, quotas: Quotas, replay: Replay
) -> ManagerStats:
    """Return what the parts of a manager hold now. Costs the same however much they hold."""
    budgets = {
        "sessions": quotas.sessions,
        "turns": quotas.turns,
        "history_bytes": quotas.history_bytes,
        "turn_bytes": quotas.turn_bytes,
    }
    if flow.conclusion.logs.store is not None:
        budgets["store_bytes"] = quotas.stored_bytes
    return ManagerStats(
        sessions=len(sessions),
        unread_sessions=quotas.owned_sessions.total - quotas.sessions.total,
        resident_sessions=len(flow.residents),
        opened_sessions=sessions.counts.opened,
        loaded_sessions=sessions.counts.loaded,
        unloaded_sessions=sessions.counts.unloaded,
        closed_sessions=dict(sessions.counts.closed),
        evictions=dict(flow.residents.evictions),
        live_turns=flow.counts.live,
        queued_turns=flow.counts.queued,
        ended_turns=dict(flow.counts.ended),
        grammar_checks=dict(flow.counts.checks),
        budgets={name: BudgetUse(each.total, each.limit) for name, each in budgets.items()}
        | {"replay_bytes": BudgetUse(replay.num_bytes, replay.max_bytes)},
        store=flow.conclusion.logs.use(),
        engine=link.stats,
        ready=link.ready if link.is_up else None,
    )
