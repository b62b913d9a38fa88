"""An event loop in virtual time: nobody waits for a clock, and one can see that nothing is ready.

asyncio's own loop, with a selector that has no files to wait for. Time moves only when it is told
to (`advance`), or, while a coroutine is run to its end, to the next timer. Nothing scheduled while
somebody waits is a `Deadlock`, not a hang.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


class Deadlock(Exception):
    """A coroutine waits, and nothing that could wake it is scheduled."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """One thread, no sockets, no clock.

    `work_s`: how long a piece of work given to an executor takes; it is done on this thread, at
    the end of that time. `errors` collects what tasks and callbacks raised and nobody heard.
    """

    def __init__(self, work_s: Callable[[], float]) -> None:
        self._now_s = 0.0
        self._is_draining = False
        self._work_s = work_s
        self.errors: list[BaseException] = []
        super().__init__(_Waits(self._wait))
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def drain(self) -> None:
        """Run what is ready and what that makes ready, at this moment."""
        self._is_draining = True
        try:
            self.run_forever()
        finally:
            self._is_draining = False

    def advance(self, seconds: float) -> None:
        """Let time pass, then drain. Timers that fall due in between fire late."""
        self._now_s += seconds
        self.drain()

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """Do the work on this thread, later."""
        del executor
        future: asyncio.Future[_T] = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the future
                future.set_exception(error)

        self.call_later(self._work_s(), work)
        return future

    def _wait(self, timeout_s: float | None) -> None:
        """Nothing is ready until `timeout_s` from now, or ever (None)."""
        if timeout_s is not None and timeout_s <= 0:
            return
        if self._is_draining:
            self.stop()
        elif timeout_s is None:
            raise Deadlock("somebody waits and nothing is scheduled")
        else:
            self._now_s += timeout_s

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        del loop
        self.errors.append(context.get("exception") or RuntimeError(context["message"]))


class _Waits(selectors.SelectSelector):
    """Waits for nobody: tells the loop that it would."""

    def __init__(self, wait: Callable[[float | None], None]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> list[Any]:
        """See `selectors.BaseSelector`."""
        self._wait(timeout)
        return []
