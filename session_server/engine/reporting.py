"""Report the engine's counters and accounts to the server."""

from __future__ import annotations

import math
from typing import Final

from cache.ledger import Accounts
from cache.spec import CacheSpec
from cache.views import SlotView
from session_server.core.events import ACCOUNTS, EngineStats, PoolReport, SessionPages
from session_server.engine.context import Counters, EngineContext
from session_server.engine.scheduler import Scheduler

STATS_INTERVAL_S: Final = 1.0
"""Seconds between two samples of the counters, while there is work."""

_TOTALS: Final = sorted({*EngineStats.__struct_fields__} & {*Counters.__slots__})
"""What both count under one name."""


class Reporter:
    """Emit samples of counters and gauges, about once a second of work.

    Four things do not wait for the second: the end of the last turn, after which no step comes
    that would correct the gauges, a violation, because health depends on it, what the disk is
    found to have at the start, before which its gauge says nothing, and whether it has room.
    """

    def __init__(self, context: EngineContext, scheduler: Scheduler) -> None:
        self._cache, self._watch = context.cache, context.watch
        self._outbox, self._counters = context.outbox, context.counters
        self._tallies, self._tiers = context.tallies, context.tiers
        self._scheduler = scheduler
        self._sampled_s = -math.inf
        self._is_shown_busy = False
        self._num_shown_violations = 0
        self._is_shown_listed = context.tiers.store.is_listed
        self._is_shown_short = False

    def report(self, now_s: float, *, has_worked: bool, is_asked: bool = False) -> None:
        """Emit a sample if one is due at the end of a step, or asked for."""
        is_due = has_worked and now_s - self._sampled_s >= STATS_INTERVAL_S
        has_emptied = self._is_shown_busy and not self._scheduler
        has_violation = self._watch.num_violations > self._num_shown_violations
        has_list = not self._is_shown_listed and self._tiers.store.is_listed
        is_short = self._tiers.store.disk.is_short
        has_news = has_violation or has_list or is_short != self._is_shown_short
        if not (is_due or has_emptied or has_news or is_asked):
            return
        self._sampled_s = now_s
        self._is_shown_busy = bool(self._scheduler)
        self._num_shown_violations = self._watch.num_violations
        self._is_shown_listed |= has_list
        self._is_shown_short = is_short
        self._outbox.emit(self._sample())

    def _sample(self) -> EngineStats:
        counters, tallies = self._counters, self._tallies
        return EngineStats(
            **{name: getattr(counters, name) for name in _TOTALS},
            forward_ms=counters.forward_s * 1e3,
            host_ms=counters.host_s * 1e3,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler) - len(self._scheduler.running),
            sessions=len(self._cache),
            check_runs=sum(self._watch.runs),
            check_violations=self._watch.num_violations,
            input_draft_tokens=tallies.input_draft_tokens,
            used_draft_tokens=tallies.used_draft_tokens,
            batch_rows=tallies.batch_rows.report(),
            prefill_tokens=tallies.prefill_tokens.report(),
            tiers=self._tiers.store.report(),
            graph_uses={use.value: count for use, count in tallies.graph_uses.items()},
        )


def pool_report(accounts: Accounts, spec: CacheSpec) -> PoolReport:
    """Return one pool's accounts as the server reports them."""
    return PoolReport(
        pages=accounts.pages,
        page_size=spec.page_size,
        page_bytes=spec.pool_bytes_per_page[accounts.pool],
        **{name: getattr(accounts, name) for name in ACCOUNTS},
    )


def session_pages(slot: SlotView) -> SessionPages:
    """Return one session's pages as the server reports them."""
    return SessionPages(
        session_id=slot.session_id,
        state=slot.state.name.lower(),
        tokens=slot.num_tokens,
        committed_len=slot.committed_len,
        protected_pages={str(pool): num for pool, num in slot.protected_pages.items()},
        private_pages={str(pool): num for pool, num in slot.private_pages.items()},
    )
