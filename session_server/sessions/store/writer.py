"""`GroupCommits`: write to a store on a thread of its own, many writes with one commit.

A commit waits for the disk, some milliseconds. All that is asked for meanwhile is committed
together next, so a hundred turns that end at once cost as much as one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from session_server.sessions.store.database import Database

MAX_GROUP: Final = 512
"""Writes that one commit takes, so that none waits for more than that."""

Write = Callable[[Database], None]
"""Calls verbs of the database, and raises what they raise."""

Told = Callable[[Exception | None], None]
"""Called once with None when a write is on disk, or with why it is not."""


class _Asked(NamedTuple):
    write: Write
    told: Told


@dataclass(slots=True)
class CommitCounts:
    """Count commits, what they wrote, what failed, and the seconds that commits took."""

    num_commits: int = 0
    num_writes: int = 0
    num_failed: int = 0
    commit_s: float = 0.0
    last_commit_s: float = 0.0


class GroupCommits:
    """Commit writes in the order in which they are asked for.

    `deliver` is called on the writing thread with what is to run where the writes came from, once
    for each commit.
    """

    def __init__(self, database: Database, deliver: Callable[[Callable[[], None]], None]) -> None:
        self._database = database
        self._deliver = deliver
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self.counts = CommitCounts()

    def start(self) -> None:
        """Start the thread. Writes may be asked for before."""
        self._thread.start()

    def ask(self, write: Write, told: Told) -> None:
        """Have something written. Never blocks."""
        self._asked.put(_Asked(write, told))

    def stop(self) -> None:
        """Commit all that was asked for, and end the thread."""
        self._asked.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            group: list[_Asked] = []
            while len(group) < MAX_GROUP and not (group and self._asked.empty()):
                asked = self._asked.get()
                if asked is None:
                    is_over = True
                    break
                group.append(asked)
            if group:
                self._deliver(partial(_tell, group, self._commit(group)))

    def _commit(self, group: Sequence[_Asked]) -> list[Exception | None]:
        begun_s = time.perf_counter()
        errors: list[Exception | None] = [None] * len(group)
        error = self._try(group)
        if error is not None and len(group) == 1:
            errors = [error]
        elif error is not None:
            # One of them may be at fault: none of the others shall fail with it.
            errors = [self._try([asked]) for asked in group]
        counts = self.counts
        counts.num_commits += 1
        counts.num_writes += len(group)
        counts.num_failed += sum(error is not None for error in errors)
        counts.last_commit_s = time.perf_counter() - begun_s
        counts.commit_s += counts.last_commit_s
        return errors

    def _try(self, group: Sequence[_Asked]) -> Exception | None:
        try:
            with self._database.transaction():
                for asked in group:
                    asked.write(self._database)
        except Exception as error:  # noqa: BLE001 - told to whoever asked: nobody waits for ever
            return error
        return None


def _tell(group: Sequence[_Asked], errors: Sequence[Exception | None]) -> None:
    for asked, error in zip(group, errors, strict=True):
        asked.told(error)
