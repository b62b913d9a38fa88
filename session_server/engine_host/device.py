"""`DeviceThreads`: run forwards off the threads that bring commands, which never wait for one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from session_server.core.batch import Batch, PendingStep, Runner, StepResult


class DeviceThreads:
    """Launch batches on one thread, strictly in order, and wait for results on another.

    There are two because a thread that waits for forward n cannot launch forward n+1. A runner that
    computes inside `launch` (a CPU) never needs the second. `deliver` is called on either thread,
    with results in launch order, and may launch the next batch: it goes on without a change of
    threads. `fail` is called once with what the runner or `deliver` raises; no batch is launched
    afterwards. The queues hold no more than the engine keeps in flight.
    """

    def __init__(
        self,
        runner: Runner,
        deliver: Callable[[StepResult], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._runner = runner
        self._deliver = deliver
        self._fail = fail
        self._launches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._pending: queue.SimpleQueue[PendingStep | None] = queue.SimpleQueue()
        self._num_pending = 0
        self._lock = threading.Lock()
        self._threads = (
            threading.Thread(target=self._guard, args=(self._launch_all,), name="engine-launch"),
            threading.Thread(target=self._guard, args=(self._wait_all,), name="engine-wait"),
        )

    def start(self) -> None:
        """Start the threads. Batches may be queued before."""
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def launch(self, batch: Batch) -> None:
        """Queue one batch. Never blocks."""
        self._launches.put(batch)

    def stop(self) -> None:
        """Finish what was queued, and end the threads."""
        self._launches.put(None)
        self._threads[0].join()
        self._pending.put(None)
        self._threads[1].join()

    def _launch_all(self) -> None:
        while (batch := self._launches.get()) is not None:
            pending = self._runner.launch(batch)
            with self._lock:
                # A finished step may not overtake one that is still waited for.
                is_next = self._num_pending == 0 and pending.is_done()
                self._num_pending += not is_next
            if is_next:
                self._deliver(pending.wait())
            else:
                self._pending.put(pending)

    def _wait_all(self) -> None:
        while (pending := self._pending.get()) is not None:
            result = pending.wait()
            self._deliver(result)
            with self._lock:
                self._num_pending -= 1

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again on the engine's thread
            self._fail(error)
