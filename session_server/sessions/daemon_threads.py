"""Run work that may hang on daemon threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DaemonThreads(Executor):
    """Run each piece of work on a daemon thread of its own.

    There is no pool: a thread that hangs can be abandoned, and does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: set[threading.Thread] = set()

    @property
    def num_alive(self) -> int:
        """Return the number of threads whose work has not ended, whether or not a caller waits for
        it."""
        return len(self._threads)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Start `fn` at once. Started work cannot be canceled, only abandoned."""
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the waiter gets it
                self._threads.discard(thread)
                future.set_exception(error)
            else:
                self._threads.discard(thread)
                future.set_result(result)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:  # there can be no more
            self._threads.discard(thread)
            raise
        return future
