"""`Progress`: for how long an engine has completed no step, and whether that is too long.

Whichever thread steps notes what it does; another thread asks several times a second and reports it
to the server. No clock is read here: callers pass the time.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from session_server.core.batch import Batch, StepResult
from session_server.core.events import EnginePulse

STEP_LIMIT_S: Final = 1.5
"""Seconds that any step may take, whatever others took."""

STALL_RATIO: Final = 4.0
"""How many times as long as recent steps of its size a step may take."""

FIRST_FORWARD_LIMIT_S: Final = 60.0
"""Seconds that the first forward may take: there is nothing to compare it with."""

RECOUNT_LIMIT_S: Final = 60.0
"""Seconds that a step may take if it recounts all memory on demand."""

_DECAY: Final = 0.9
"""Each later step of its size multiplies the remembered time of a slow one by this."""


class ForwardSize(NamedTuple):
    """Measure what the time of a forward depends on: positions computed, and positions read."""

    num_computed: int
    num_read: int

    @classmethod
    def of(cls, batch: Batch) -> ForwardSize:
        """Measure a batch. O(rows)."""
        if (decoding := batch.decoding) is not None:
            return cls(len(decoding), int(decoding.starts.sum()) + len(decoding))
        spans = [(row.start, row.num_tokens) for row in batch.listed]
        if batch.probe is not None:
            spans.append((batch.probe.start, len(batch.probe.tokens)))
        num_read = sum(num_tokens * (start + num_tokens) for start, num_tokens in spans)
        return cls(max(1, sum(num_tokens for _, num_tokens in spans)), max(1, num_read))


class ForwardTimes:
    """Remember how long forwards of each order of magnitude took."""

    def __init__(self) -> None:
        self._slowest: dict[tuple[int, int], tuple[ForwardSize, float]] = {}

    def note(self, size: ForwardSize, took_s: float) -> None:
        """Remember one forward."""
        magnitude = (size.num_computed.bit_length(), size.num_read.bit_length())
        before = self._slowest.get(magnitude)
        if before is not None and before[1] * _DECAY > took_s:
            size, took_s = before[0], before[1] * _DECAY
        self._slowest[magnitude] = (size, took_s)

    def expected_s(self, size: ForwardSize) -> float | None:
        """Return the seconds that a forward takes at most if time grows no faster than its size.

        Returns None before the first forward.
        """
        seen = list(self._slowest.values())  # one atomic copy: another thread may write
        ratios = (
            (took_s, max(1.0, size.num_computed / of.num_computed, size.num_read / of.num_read))
            for of, took_s in seen
        )
        return min((took_s * ratio for took_s, ratio in ratios), default=None)


class Progress:
    """Follow the steps of one loop. Whichever thread steps calls everything but `pulse`.

    `ended_s`: when the last step ended.
    """

    def __init__(self) -> None:
        self._times = ForwardTimes()
        self._in_flight: deque[tuple[ForwardSize, float]] = deque()
        self._oldest: tuple[ForwardSize, float] | None = None
        self._step: tuple[float, float] | None = None
        self._slowest_step_s = 0.0
        self.ended_s = 0.0

    def begin_step(self, now_s: float, *, is_recount: bool) -> None:
        """Start the clock of a step. `is_recount`: it recounts all memory, on demand."""
        limit_s = max(STEP_LIMIT_S, STALL_RATIO * self._slowest_step_s)
        self._step = (now_s, RECOUNT_LIMIT_S if is_recount else limit_s)

    def begin_forward(self, batch: Batch, now_s: float) -> None:
        """Add a forward to those in flight."""
        self._in_flight.append((ForwardSize.of(batch), now_s))
        self._oldest = self._in_flight[0]

    def end_forward(self, result: StepResult, now_s: float) -> None:
        """Take the oldest forward out of those in flight."""
        size, _ = self._in_flight.popleft()
        if result.error is None:
            self._times.note(size, result.forward_s)
        if self._in_flight:
            # The device could not begin the next forward before this one ended.
            self._in_flight[0] = (self._in_flight[0][0], now_s)
        self._oldest = self._in_flight[0] if self._in_flight else None

    def end_step(self, now_s: float) -> None:
        """Note how long the step took, its events sent."""
        assert self._step is not None, "a step ends that began"
        self.ended_s = now_s
        self._slowest_step_s = max(now_s - self._step[0], self._slowest_step_s * _DECAY)

    def wait(self, *, has_work: bool) -> None:
        """Stop the clock of the last step until a command or a result comes.

        The clock runs on when the engine has turns (`has_work`) and nothing is in flight: no
        result will bring the next step, so a wait that does not end is a stall.
        """
        if self._in_flight or not has_work:
            self._step = None

    def pulse(self, now_s: float) -> EnginePulse:
        """Return for how long no step was completed, if that is too long. For any thread."""
        stalled_s = 0.0
        if (step := self._step) is not None and now_s - step[0] > step[1]:
            stalled_s = now_s - step[0]
        if (oldest := self._oldest) is not None:
            size, since_s = oldest
            if now_s - since_s > self._limit_s(size):
                stalled_s = max(stalled_s, now_s - since_s)
        return EnginePulse(stalled_s=stalled_s)

    def _limit_s(self, size: ForwardSize) -> float:
        expected_s = self._times.expected_s(size)
        if expected_s is None:
            return FIRST_FORWARD_LIMIT_S
        return max(STEP_LIMIT_S, STALL_RATIO * expected_s)
