"""`TierThreads`: carry out the orders of the tiers beside the forwards."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

from session_server.core.tier_orders import (
    Forget,
    Refusal,
    TierCarrier,
    TierOrder,
    TierResult,
    TierThread,
    TierWork,
)


class NoTiers:
    """Keep nothing: for an engine that has pools alone."""

    def prepare(self, order: TierOrder) -> TierWork:
        """Fail every order."""

        def run() -> TierResult | None:
            match order:
                case Forget():
                    return None
                case _:
                    return TierResult(order.number, 0.0, Refusal.FAILED)

        return TierWork(TierThread.COPY, run)


class TierThreads:
    """Run the work of each `TierThread` on a thread of its own, in the order of the orders, and
    call `deliver` with each result. A thread starts with its first order. What a copy raises is a
    bug: `fail` is called with it."""

    def __init__(
        self,
        carrier: TierCarrier,
        deliver: Callable[[TierResult], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._carrier, self._deliver, self._fail = carrier, deliver, fail
        self._queues: dict[TierThread, queue.SimpleQueue[TierWork]] = {}

    def submit(self, orders: Iterable[TierOrder]) -> None:
        """Queue orders. Never blocks."""
        for order in orders:
            work = self._carrier.prepare(order)
            waiting = self._queues.get(work.thread)
            if waiting is None:
                waiting = self._queues[work.thread] = queue.SimpleQueue()
                name = work.thread.value
                threading.Thread(target=self._run, args=(waiting,), name=name, daemon=True).start()
            waiting.put(work)

    def _run(self, waiting: queue.SimpleQueue[TierWork]) -> None:
        while True:
            work = waiting.get()
            try:
                result = work.run()
            except BaseException as error:  # noqa: BLE001 - raised again on the loop's thread
                self._fail(error)
                return
            if result is not None:
                self._deliver(result)
