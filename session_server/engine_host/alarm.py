"""`Alarm`: wake the one thread that sleeps, when another needs it or something is due."""

from __future__ import annotations

import threading


class Alarm:
    """Hold what wakes the sleeper. `due_s`: when it wakes by itself at the latest, by the clock
    that it sleeps by; None for never."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.due_s: float | None = None

    def set(self) -> None:
        """Wake the sleeper, or keep it from falling asleep. Any thread may call it."""
        self._event.set()

    def set_before(self, due_s: float | None) -> None:
        """Wake the sleeper if it does not wake by itself in time for something else."""
        if due_s is not None and (self.due_s is None or due_s < self.due_s):
            self._event.set()

    def sleep(self, wait_s: float | None, now_s: float) -> None:
        """Sleep until the alarm is set, or something is due, or for so long."""
        waits = [wait_s, None if self.due_s is None else max(0.0, self.due_s - now_s)]
        self._event.wait(min((each for each in waits if each is not None), default=None))
        self._event.clear()
