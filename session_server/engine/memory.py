"""When the books are checked, and what is remembered of it.

The checks themselves are `cache.checker`; here is only policy: the cheap one every step, a pair
check of every session that changed hands, the full recount in moments of rest or on demand.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from cache.checker import Violation, find_violations
from cache.errors import AuditFailed
from cache.session_cache import SessionAwareCache
from cache.types import SessionId
from cache.views import SlotView
from session_server.core.events import MemoryReported, PoolReport, SessionPages
from session_server.engine.settings import MemoryCheck

MAX_REMEMBERED: Final = 32
"""Texts of violations kept for reports; the count goes on."""

_LOG: Final = logging.getLogger(__name__)


class MemoryWatch:
    """Runs the checker at its three levels.

    `num_runs`, `num_violations`: totals. STRICT recounts everything at every step and raises
    `AuditFailed`; WARN counts, logs and names the sessions in doubt; OFF checks on demand only.
    """

    def __init__(self, cache: SessionAwareCache, mode: MemoryCheck) -> None:
        self._cache = cache
        self._mode = mode
        self._texts: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._touched: set[SessionId] = set()
        self._doubtful: dict[SessionId, None] = {}
        self._has_changed = False
        self.num_runs = 0
        self.num_violations = 0

    @property
    def is_audit_due(self) -> bool:
        """Whether sessions changed hands since the last full recount."""
        return self._has_changed and self._mode is not MemoryCheck.OFF

    def touch(self, session_id: SessionId) -> None:
        """A session was lent, given back, cooled or closed: look at it at the end of the step."""
        self._touched.add(session_id)
        self._has_changed = True

    def check_step(self) -> None:
        """Level 0 and the sessions touched, once per step; everything in STRICT mode."""
        touched, self._touched = self._touched, set()
        match self._mode:
            case MemoryCheck.OFF:
                return
            case MemoryCheck.STRICT:
                self._note(find_violations(self._cache, 2))
            case MemoryCheck.WARN:
                self._note(find_violations(self._cache, 0))
                for session_id in touched:
                    if session_id in self._cache:
                        self._note(find_violations(self._cache, 1, session_id))

    def audit_all(self) -> None:
        """Level 2: recount every page from the structures that hold it. O(pages + sessions)."""
        self._has_changed = False
        self._note(find_violations(self._cache, 2))

    def take_doubtful(self) -> list[SessionId]:
        """Sessions named by violations since the last call, each once."""
        doubtful, self._doubtful = list(self._doubtful), {}
        return doubtful

    def report(self, request_id: int) -> MemoryReported:
        """The books as they are. O(sessions)."""
        rows, page_size = self._cache.stores.rows, self._cache.stores.page_size
        return MemoryReported(
            request_id=request_id,
            pools=self._pool_reports(),
            rows=rows.num_rows,
            rows_free=rows.num_free,
            sessions=tuple(_session_pages(slot, page_size) for slot in self._cache.slots()),
            check_runs=self.num_runs,
            check_violations=self.num_violations,
            violations=tuple(self._texts),
        )

    def _pool_reports(self) -> dict[str, PoolReport]:
        page_size = self._cache.stores.page_size
        return {
            str(pool): PoolReport(
                pages=accounts.pages,
                page_size=page_size,
                free=accounts.free,
                reserved=accounts.reserved,
                tree_evictable=accounts.tree_evictable,
                tree_protected=accounts.tree_protected,
                session_held=accounts.session_held,
                active=accounts.active,
                fenced=accounts.fenced,
                spill=accounts.spill,
                quarantine=accounts.quarantine,
            )
            for pool, accounts in self._cache.accounts().items()
        }

    def _note(self, violations: list[Violation]) -> None:
        self.num_runs += 1
        for violation in violations:
            self.num_violations += 1
            self._texts.append(violation.text)
            _LOG.error("memory check: %s", violation.text)
            if violation.session_id is not None:
                self._doubtful[violation.session_id] = None
        if violations and self._mode is MemoryCheck.STRICT:
            raise AuditFailed("; ".join(violation.text for violation in violations))


def _session_pages(slot: SlotView, page_size: int) -> SessionPages:
    private = {str(pool): num_pages for pool, num_pages in slot.private_pages.items()}
    return SessionPages(
        session_id=slot.session_id,
        state=slot.state.name.lower(),
        tokens=slot.num_tokens,
        committed_len=slot.committed_len,
        protected_pages=dict.fromkeys(private, slot.protected_len // page_size),
        private_pages=private,
    )
