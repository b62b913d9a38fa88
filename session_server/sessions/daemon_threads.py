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
        self._threads: list[threading.Thread] = []

    @property
    def num_alive(self) -> int:
        """Return the number of threads whose work has not ended, whether or not a caller waits for
        it."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return len(self._threads)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Start `fn` at once. Started work cannot be canceled, only abandoned."""
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the waiter gets it
                future.set_exception(error)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return future
