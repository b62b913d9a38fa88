"""`Prober`: have the device check now and then that a page holds the KV of its tokens (level 3)."""

from __future__ import annotations

import logging
from typing import Final

from cache.content import PageContent, PageScrubber
from cache.session_cache import SessionAwareCache
from session_server.core.batch import Probe, StepResult
from session_server.engine.config import MemoryCheck
from session_server.engine.memory import MemoryWatch

_LOG: Final = logging.getLogger(__name__)


class Prober:
    """Decide when a probe is launched, and handle its result.

    A probe is a batch of its own: one forward over at most a page of tokens. One follows every
    `probe_interval_s` of work, and one every audit of an engine at rest; pages that an earlier
    probe put in doubt are probed at once. Two probes never follow each other while turns run, and
    none is launched while a turn of a failed forward is retried alone.

    A session may be probed while others run, and used again at once, because the device executes in
    launch order: the probe sees exactly what the host knew when it was launched (docs/memory.md).

    `num_probes`: probes answered. `probed_s`: time of the last answer. `forward_s`: seconds that
    probes took.
    """

    def __init__(self, cache: SessionAwareCache, watch: MemoryWatch) -> None:
        self._cache = cache
        self._watch = watch
        self._scrubber = PageScrubber()
        self._probed: PageContent | None = None
        self._worked_s = 0.0
        self._working_since_s: float | None = None
        self._is_requested = False
        self._num_forwards = 0
        self.num_probes = 0
        self.probed_s: float | None = None
        self.forward_s = 0.0

    def request(self) -> None:
        """Ask for one probe although the engine is at rest."""
        self._is_requested = self._watch.mode is not MemoryCheck.OFF

    def choose(self, now_s: float, *, is_working: bool, num_forwards: int) -> Probe | None:
        """Return the probe to launch next, if one is due; ask before every launch.

        `num_forwards`: how many forwards were launched before.
        """
        if not self._is_due(now_s, is_working=is_working, num_forwards=num_forwards):
            return None
        self._worked_s, self._is_requested = 0.0, False
        self._num_forwards = num_forwards + 1
        content = self._probed = self._scrubber.next(self._cache)
        if content is None:
            return None
        return Probe(content.row, content.start, content.tokens, content.states)

    def settle(self, result: StepResult, now_s: float) -> None:
        """Record the result of the probe in flight."""
        content, self._probed = self._probed, None
        assert content is not None, "a verdict follows a probe"
        self.forward_s += result.forward_s
        if result.error is not None:
            # The page was not checked. If the device is broken, the forwards of turns show it.
            _LOG.warning("memory check: the device refused a probe: %s", result.error)
            return
        self.num_probes += 1
        self.probed_s = now_s
        self._watch.note_content(
            [] if result.probe_holds else self._scrubber.attribute(self._cache, content)
        )

    def _is_due(self, now_s: float, *, is_working: bool, num_forwards: int) -> bool:
        if self._working_since_s is not None:
            self._worked_s += now_s - self._working_since_s
        self._working_since_s = now_s if is_working else None
        if self._watch.mode is MemoryCheck.OFF or self._probed is not None:
            return False
        if not is_working:
            return self._is_requested or self._scrubber.has_rechecks
        if num_forwards == self._num_forwards:
            return False  # the forward before this one was a probe
        interval_s = self._watch.probe_interval_s
        return self._worked_s >= interval_s or self._scrubber.has_rechecks
