"""`GroupCommits`: write to a store on a thread of its own, many writes with one commit.

A commit waits for the disk, some milliseconds. All that is asked for meanwhile is committed
together next, so a hundred turns that end at once cost as much as one. While several come at a
time, a commit also waits a little for more of them, as PostgreSQL's `commit_delay` does: turns that
go on together keep the engine's batches full. Whoever writes alone never waits for that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import sqlite3
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from session_server.sessions.backlog import SLICE
from session_server.sessions.store.backend import StoreDatabase, StoreVerbs
from session_server.sessions.store.ownership import LeaseLost

_logger: Final = logging.getLogger("session_server.store")

MAX_GROUP: Final = 512
"""Writes that one commit takes, so that none waits for more than that."""

LATER_AT_ONCE: Final = 64
"""Writes for which nobody waits that one commit takes besides."""

MAX_TRIES: Final = 4
"""How often a transaction is tried that the database has undone for another one."""

GATHER_S: Final = 0.004
"""How long a commit waits for more to write where the one before had several writes."""

ERASED_EVERY_S: Final = 10.0
"""How often a log is emptied that has what was deleted, which is gone from it by then."""

Write = Callable[[StoreVerbs], None]
"""Calls verbs of the database, and raises what they raise."""

Told = Callable[[Exception | None], None]
"""Called once with None when a write is on disk, or with why it is not."""


def tell_nobody(_error: Exception | None) -> None:
    """Do nothing: nobody waits for this write."""


class Beside(NamedTuple):
    """Hold a write that is on disk with another one, or not at all, and its bytes."""

    write: Write
    told: Told
    num_bytes: int


def together(writes: Sequence[Beside]) -> Beside:
    """Return all of these as one: on disk together, or not at all."""

    def write(database: StoreVerbs) -> None:
        for each in writes:
            each.write(database)

    told = partial(tell_each, [each.told for each in writes])
    return Beside(write, told, sum(each.num_bytes for each in writes))


def tell_each(told: Iterable[Told], error: Exception | None) -> None:
    """Tell each of what came of a write: one that cannot be told keeps no other from it."""
    for each in told:
        try:
            each(error)
        except Exception:
            _logger.exception("a write could not be told of")


class _Asked(NamedTuple):
    """Hold a write; None writes nothing, and is told when all before it is written. `place`: how
    many were asked for before one for which nobody waits."""

    write: Write | None
    told: Told
    place: int = 0


COMMIT_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Upper bounds of the classes that commits are counted in, by how long they took."""


@dataclass(slots=True)
class CommitCounts:
    """Count commits by how long they took (the last class has no bound), their seconds in all, and
    what they wrote and could not write."""

    num_commits: list[int] = field(default_factory=lambda: [0] * (len(COMMIT_BOUNDS_S) + 1))
    num_writes: int = 0
    num_failed: int = 0
    commit_s: float = 0.0

    def add(self, errors: Sequence[Exception | None], commit_s: float) -> None:
        """Count a commit."""
        num_failed = sum(error is not None for error in errors)
        self.num_commits[bisect_left(COMMIT_BOUNDS_S, commit_s)] += 1
        self.num_writes += len(errors) - num_failed
        self.num_failed += num_failed
        self.commit_s += commit_s


class GroupCommits:
    """Commit writes in the order in which they are asked for.

    `deliver` is called on the writing thread with what is to run where the writes came from: what
    tells of a commit, a slice at a time.
    """

    def __init__(
        self, database: StoreDatabase, deliver: Callable[[Callable[[], None]], None]
    ) -> None:
        self._database = database
        self._deliver = deliver
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._num_asked = 0
        self._later: deque[_Asked] = deque()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._erased_s = -math.inf
        self.counts = CommitCounts()

    def start(self) -> None:
        """Start the thread. Writes may be asked for before."""
        self._thread.start()

    def ask(self, write: Write | None, told: Told) -> None:
        """Have something written; None only tells, after all that was asked for before. Never
        blocks."""
        self._num_asked += 1
        self._asked.put(_Asked(write, told))

    def ask_later(self, write: Write, told: Told) -> None:
        """Have something written for which nobody waits, and which can be left undone when the
        thread ends: behind all that was asked for before, a few such writes with each commit."""
        self._later.append(_Asked(write, told, self._num_asked))
        self.ask(None, tell_nobody)  # the thread may wait for something to do

    def stop(self, wait_s: float) -> bool:
        """Commit all that was asked for, and end the thread; return whether that took no longer."""
        self._asked.put(None)
        if self._thread.ident is not None:
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        num_taken, gathers, is_over = 0, False, False
        while not is_over:
            group, is_over = self._take(gathers=gathers)
            num_taken += len(group)
            gathers = sum(asked.write is not None for asked in group) > 1
            group += self._take_later(num_taken)
            errors = self._commit(group)
            for start in range(0, len(group), SLICE):
                part = slice(start, start + SLICE)
                self._deliver(partial(_tell, group[part], errors[part]))
            self._shorten_log()

    def _take(self, *, gathers: bool) -> tuple[list[_Asked], bool]:
        """Return what was asked for, once there is something to do, and whether that is the end.
        `gathers`: more of it is worth waiting for."""
        group: list[_Asked] = []
        while len(group) < MAX_GROUP and not (self._asked.empty() and (group or self._later)):
            try:
                asked = self._asked.get(timeout=self._wait_s)
            except queue.Empty:
                break  # what was deleted is still in the log
            if asked is None:
                return group, True
            if gathers and not group:
                time.sleep(GATHER_S)
            group.append(asked)
        return group, False

    @property
    def _wait_s(self) -> float | None:
        """Return how long nothing has to be done but what is asked for; None: for ever."""
        if not self._database.has_deleted:
            return None
        return max(0.0, self._erased_s + ERASED_EVERY_S - time.monotonic())

    def _shorten_log(self) -> None:
        erases = self._wait_s == 0.0
        if erases:
            self._erased_s = time.monotonic()
        with contextlib.suppress(OSError, sqlite3.Error):  # the next commit fails with it too
            self._database.shorten_log(erases=erases)

    def _take_later(self, num_taken: int) -> list[_Asked]:
        """Return some of what nobody waits for, of which nothing was asked for before it that is
        not taken."""
        taken: list[_Asked] = []
        while len(taken) < LATER_AT_ONCE and self._later and self._later[0].place <= num_taken:
            taken.append(self._later.popleft())
        return taken

    def _commit(self, group: Sequence[_Asked]) -> list[Exception | None]:
        writes = [asked for asked in group if asked.write is not None]
        if not writes:
            return [None] * len(group)
        begun_s = time.perf_counter()
        error = self._try(writes)
        errors: list[Exception | None] = [error] * len(writes)
        if error is not None and len(writes) > 1 and not self._is_of_all(error):
            # One of them is at fault, and not the disk: none of the others shall fail with it.
            errors = [self._try([asked]) for asked in writes]
        self.counts.add(errors, time.perf_counter() - begun_s)
        of_writes = iter(errors)
        return [None if asked.write is None else next(of_writes) for asked in group]

    def _is_of_all(self, error: Exception) -> bool:
        """Return whether each write of a group would fail with an error by itself."""
        return isinstance(error, LeaseLost) or self._database.fails_all(error)

    def _try(self, group: Sequence[_Asked]) -> Exception | None:
        error = self._try_once(group)
        for _ in range(MAX_TRIES - 1):
            if error is None or not self._database.is_passing(error):
                break
            error = self._try_once(group)
        return error

    def _try_once(self, group: Sequence[_Asked]) -> Exception | None:
        try:
            with self._database.transaction():
                for asked in group:
                    assert asked.write is not None, "nothing to write"
                    asked.write(self._database)
        except Exception as error:  # noqa: BLE001 - told to whoever asked: nobody waits for ever
            return error
        return None


def _tell(group: Sequence[_Asked], errors: Sequence[Exception | None]) -> None:
    for asked, error in zip(group, errors, strict=True):
        tell_each((asked.told,), error)
