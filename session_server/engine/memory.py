"""`MemoryWatch`: when the books are checked, and what is remembered of violations.

The checks themselves are in `cache.checker` and `cache.content`. The policy is here: the sums at
every step, a pair check of every session that changed hands, a full recount in moments of rest or
on demand, content as the device reports it. `engine.guard` repairs violations.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

import msgspec

from cache.checker import Recount, Violation, find_violations
from cache.errors import AuditFailed
from cache.session_cache import SessionAwareCache
from cache.types import SessionId
from session_server.engine.config import MemoryCheck, MemoryPolicy
from session_server.engine.trace import StepTrace

MAX_REMEMBERED: Final = 32
"""Texts of violations kept for reports. All are counted."""

NUM_LOGGED_STEPS: Final = 8
"""Steps before the first violation that are logged; a report has all that are kept."""

NUM_LEVELS: Final = 4

SLICE_UNITS: Final = 16
"""Sessions, edges of the tree or rows that one slice of a recount visits, besides those that
changed since the slice before. A slice takes 0.2 to 0.5 ms, less than a step with a forward."""

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Damage:
    """Describe what violations have put in doubt.

    `session_ids`: sessions whose KV may be wrong. `has_unattributed`: whether a violation names no
    session. `must_rebuild`: whether the books must be rebuilt even if a recount finds nothing.
    """

    session_ids: tuple[SessionId, ...] = ()
    has_unattributed: bool = False
    must_rebuild: bool = False

    def __bool__(self) -> bool:
        return bool(self.session_ids) or self.has_unattributed


class SlicedAudit:
    """Recount everything, a slice at a time.

    `has_changed`: whether sessions changed hands since the last recount began. `has_violations`:
    whether the last slice found a violation, which also ended its recount.
    """

    def __init__(self, cache: SessionAwareCache) -> None:
        self._cache = cache
        self._recount: Recount | None = None
        self.has_changed = False
        self.has_violations = False

    @property
    def is_due(self) -> bool:
        """Return whether a recount is under way or should begin."""
        return self.has_changed or self._recount is not None

    def advance(self) -> bool:
        """Visit `SLICE_UNITS` more, and return whether the recount is complete."""
        if self._recount is None:
            self.has_changed = False
            self._recount = Recount(self._cache)
        recount = self._recount
        is_complete = recount.advance(SLICE_UNITS)
        self.has_violations = bool(recount.violations)
        if self.has_violations:
            _LOG.warning("memory check: unconfirmed: %s", recount.violations[0].text)
        if is_complete:
            self._stop()
        return is_complete

    def drop(self) -> None:
        """Stop the recount under way, because everything is recounted at once."""
        self._stop()
        self.has_changed = False

    def _stop(self) -> None:
        if self._recount is not None:
            self._recount.stop()
            self._recount = None


class MemoryWatch:
    """Run the checker at its levels, and count and remember violations.

    `runs`: checks by level. `num_violations`: in all. `MemoryCheck.STRICT` recounts everything at
    every step and raises `AuditFailed`; WARN counts, logs and keeps the `damage`; OFF checks on
    demand only. `spent_s`: seconds spent on everything but probes, by `stopwatch`; no decision
    depends on it.
    """

    def __init__(
        self, cache: SessionAwareCache, policy: MemoryPolicy, stopwatch: Callable[[], float]
    ) -> None:
        self._cache = cache
        self.mode = policy.check
        self.probe_interval_s = policy.probe_interval_s
        self.stopwatch = stopwatch
        self.spent_s = 0.0
        self.trace = StepTrace()
        self.texts: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self.runs = [0] * NUM_LEVELS
        self.num_violations = 0
        self.damage = Damage()
        self._touched: dict[SessionId, None] = {}
        self._audit = SlicedAudit(cache)

    @property
    def is_audit_due(self) -> bool:
        """Return whether a full recount is under way, or sessions changed hands since it began."""
        return self._audit.is_due and self.mode is not MemoryCheck.OFF

    def touch(self, session_id: SessionId) -> None:
        """Have a session checked at the end of the step: its KV changed hands."""
        if self.mode is not MemoryCheck.OFF:  # else no step clears it
            self._touched[session_id] = None
        self._audit.has_changed = True

    def check_step(self) -> None:
        """Check the sums (level 0) and the sessions touched (level 1); with STRICT everything."""
        match self.mode:
            case MemoryCheck.WARN:
                self._check_sums()
                for session_id in self._touched:
                    if session_id in self._cache:
                        self._run(1, session_id)
            case MemoryCheck.STRICT:
                self._run(2)
            case MemoryCheck.OFF:
                pass
            case _:
                assert_never(self.mode)
        self._touched.clear()

    def audit_all(self) -> None:
        """Recount every page from the structures that hold it (level 2).

        O(pages + sessions), so only on demand, after a violation and with STRICT.
        """
        self._audit.drop()
        self._run(2)

    def audit_slice(self) -> bool:
        """Recount in slices (level 2); begin again after a complete recount.

        A violation is confirmed by `audit_all` before anything is repaired.

        Returns:
            Whether the recount is complete.
        """
        is_complete = self._audit.advance()
        if self._audit.has_violations:
            self.audit_all()
            return True
        self.runs[2] += is_complete
        return is_complete

    def note_content(self, violations: Sequence[Violation]) -> None:
        """Record what the device found when it checked a page (level 3)."""
        self.runs[3] += 1
        self._note(violations)
        if any(violation.session_id is None for violation in violations):
            # The page is in the tree; a recount counts pages and does not see their content.
            self._require_rebuild()

    def note_outside(self, texts: Sequence[str]) -> None:
        """Record that what is kept outside of the pools is not as its books say. The pools are not
        in doubt."""
        self._remember([Violation(text) for text in texts])
        if self.mode is MemoryCheck.STRICT:
            raise AuditFailed("; ".join(texts))

    def note_failure(self, error: AuditFailed) -> None:
        """Record that a verb of the cache raised in its middle.

        A recount does not show what the verb left half done, so the books must be rebuilt.
        """
        self._note([Violation(str(error))])
        self._require_rebuild()

    def take_damage(self) -> Damage:
        """Return the damage since the last call, and clear it."""
        damage, self.damage = self.damage, Damage()
        return damage

    def _require_rebuild(self) -> None:
        self.damage = Damage(self.damage.session_ids, has_unattributed=True, must_rebuild=True)

    def _check_sums(self) -> None:
        """Check the sums (level 0). Nearly every step does only this, so it makes few calls."""
        self.runs[0] += 1
        if not self._cache.is_balanced():
            self._note(find_violations(self._cache, 0))

    def _run(self, level: int, session_id: SessionId | None = None) -> None:
        self.runs[level] += 1
        self._note(find_violations(self._cache, level, session_id))

    def _note(self, violations: Sequence[Violation]) -> None:
        if not violations:
            return
        self._remember(violations)
        if self.mode is MemoryCheck.STRICT:
            raise AuditFailed("; ".join(violation.text for violation in violations))
        named = [v.session_id for v in violations if v.session_id is not None]
        self.damage = Damage(
            tuple(dict.fromkeys((*self.damage.session_ids, *named))),
            has_unattributed=self.damage.has_unattributed or len(named) < len(violations),
            must_rebuild=self.damage.must_rebuild,
        )

    def _remember(self, violations: Sequence[Violation]) -> None:
        if self.num_violations == 0:
            self.trace.freeze()
            for step in self.trace.frozen(NUM_LOGGED_STEPS):
                _LOG.error("memory check: before it %s", msgspec.json.encode(step).decode())
        self.num_violations += len(violations)
        for violation in violations:
            self.texts.append(violation.text)
            _LOG.error("memory check: %s", violation.text)
