"""`SharedDirectory`: a directory of KV that servers of several machines write, within its bytes.

Below it each layout has a directory of files, and each server a file that says what it has written
so far. That is raised before a file is begun; so whoever has walked the directory knows of no less
than what is there, without a lock and whoever is killed when. Files go that were used longest ago,
of whichever layout; one that no server has used for a while goes as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from session_server.core.kv_place import KV_REFUSED
from session_server.runner.kv_directory import SEGMENT, UNFINISHED, made_directory, room_left
from session_server.runner.shared_writers import Counts, Writers

UNUSED_S: Final = 3600.0
"""After which what says nothing more is taken to be dead: a server, its layout if no other uses
that, or a file that somebody has begun to write."""

HEARTBEAT_S: Final = 60.0
"""How often a server says that it lives."""

WALK_S: Final = 30.0
"""How often the whole directory is looked at."""

SLICE_S: Final = 0.02
"""How long what walks the directory keeps reads and writes waiting."""

SPARE_DIVISOR: Final = 16
"""Part of the bytes that is free once files had to go, so that not every write walks."""

MAX_OLDEST: Final = 1 << 16
"""Files that are remembered of a walk, those used longest ago."""

_LAYOUT: Final = re.compile("[0-9a-f]{32}", re.ASCII)
_TRIES: Final = 8
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class _Old(NamedTuple):
    """Name a file of a walk."""

    used_ns: int
    layout: str
    name: str
    num_bytes: int


class _Walked:
    """Hold what a walk has found: bytes, less what is gone since, and the files to go first."""

    def __init__(self, counts: Mapping[str, Counts]) -> None:
        self.counts = counts
        self.num_bytes = 0
        self._oldest: list[tuple[int, _Old]] = []
        self.in_order: list[_Old] = []

    def add(self, file: _Old) -> None:
        """Take note of a file."""
        self.num_bytes += file.num_bytes
        heapq.heappush(self._oldest, (-file.used_ns, file))
        if len(self._oldest) > MAX_OLDEST:
            heapq.heappop(self._oldest)

    def end(self) -> None:
        """Put in order what was found, the file to go first last."""
        self.in_order = sorted((old for _, old in self._oldest), reverse=True)
        self._oldest = []


class SharedDirectory:
    """Take part in a directory. One thread at a time; `layout`: 32 digits; `max_bytes`: of all
    files of all layouts."""

    def __init__(
        self,
        path: Path,
        layout: str,
        max_bytes: int,
        *,
        statvfs: Callable[[int], os.statvfs_result] = os.fstatvfs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the directory if there is none. `statvfs`: of its descriptor.

        Raises:
            OSError: it cannot be used.
        """
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._layout, self._max_bytes = layout, max_bytes
        self._statvfs, self._clock = statvfs, clock
        self._writers = Writers(self._root, layout)
        self._opened: tuple[int, int] | None = None
        self._walked: _Walked | None = None
        self._walk: Iterator[_Walked | None] | None = None
        self._heartbeat_due_s = self._walk_due_s = clock()

    def open(self) -> int:
        """Return a descriptor of the directory of this layout, which is in use from now on.

        Raises:
            OSError: it cannot be made.
        """
        for _ in range(_TRIES):
            self._publish()  # before it is made: one that nobody uses is removed
            with contextlib.suppress(FileNotFoundError):  # by somebody who has not seen that
                descriptor = made_directory(self._layout, self._root)
                status = os.fstat(descriptor)
                self._opened = status.st_dev, status.st_ino
                return descriptor
        raise OSError(errno.EBUSY, "the directory is being removed again and again")

    @property
    def is_there(self) -> bool:
        """Return whether what was opened is still the directory of this layout. It is not where
        others took this server for dead, for it was stopped for long: they have removed it, and may
        have made it anew."""
        try:
            status = os.stat(self._layout, dir_fd=self._root, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self._opened

    def now_ns(self) -> int:
        """Return what time it was by the clock of the files when this server said that it lives."""
        return self._writers.now_ns()

    def reserve(self, num_bytes: int) -> None:
        """Make room for a file before it is begun; files that were used longest ago go.

        Raises:
            OSError: there is none.
        """
        if num_bytes > self._max_bytes:
            raise OSError(errno.ENOSPC, "a file is larger than all of them may be")
        if not self._writers.begin(num_bytes):
            self._begin_anew()
        if self._excess(num_bytes) > 0 and not self._make_room(num_bytes):
            self.end_write()
            raise OSError(errno.ENOSPC, "the directory that servers share is full")

    def end_write(self) -> None:
        """Note that what was reserved is there, or nothing of it."""
        with contextlib.suppress(OSError):  # others count it twice meanwhile
            if not self._writers.end():
                self._begin_anew()

    def tick(self) -> None:
        """Do a slice of what is due.

        Raises:
            OSError: the disk does not do it.
        """
        now_s = self._clock()
        if now_s >= self._heartbeat_due_s:
            self._heartbeat_due_s = now_s + HEARTBEAT_S
            self._publish()
        if self._walk is None and now_s >= self._walk_due_s:
            self._walk_due_s = now_s + WALK_S
            self._walk = self._walking()
        until_s = now_s + SLICE_S
        while self._walk is not None and self._clock() < until_s:
            self._advance()
        if self._walked is not None and self._excess(0) > 0:
            self._remove_oldest(until_s, 0)

    def _publish(self) -> None:
        if not self._writers.publish():
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget what is there: others that have come and gone since may have changed it."""
        self._walked = self._walk = None
        self._walk_due_s = self._clock()

    # How much is there

    def _excess(self, num_bytes: int) -> int:
        """Return the bytes that have to go, at most, so that a file of so many is there too, which
        is counted as begun; all of them where that is not known."""
        if self._walked is None:
            return self._max_bytes
        excess = self._walked.num_bytes + self._writers.num_since() - self._max_bytes
        room = room_left(self._statvfs(self._root))
        return excess if room is None else max(excess, num_bytes - room)

    # Walking

    def _walking(self) -> Iterator[_Walked | None]:
        """Look at every file; yield None after each, and what was found at the end."""
        self._publish()
        dead_ns = self._writers.now_ns() - int(UNUSED_S * 1e9)
        layouts = self._layouts()  # first: a server says that it lives before it makes its own
        counts, used = yield from self._writers.read_all(dead_ns)
        walked = _Walked(counts)
        for layout in layouts:
            try:
                directory = os.open(layout, _FLAGS, dir_fd=self._root)
            except FileNotFoundError:
                continue
            except OSError:
                self._writers.ignore(layout)
                continue
            try:
                if layout in used:
                    yield from self._look(directory, layout, walked, dead_ns)
                else:
                    yield from self._clear(directory)
            finally:
                os.close(directory)
            if layout not in used:
                with contextlib.suppress(OSError):  # somebody may use it again
                    os.rmdir(f"{layout}/{KV_REFUSED}", dir_fd=self._root)
                with contextlib.suppress(OSError):
                    os.rmdir(layout, dir_fd=self._root)
        walked.end()
        yield walked

    def _layouts(self) -> list[str]:
        with os.scandir(self._root) as entries:
            return [entry.name for entry in entries if _LAYOUT.fullmatch(entry.name)]

    def _look(
        self, directory: int, layout: str, walked: _Walked, dead_ns: int
    ) -> Iterator[_Walked | None]:
        for status, name in _files(directory):
            if UNFINISHED.fullmatch(name) and status.st_ctime_ns < dead_ns:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=directory)
            elif SEGMENT.fullmatch(name):
                walked.add(_Old(status.st_mtime_ns, layout, name, status.st_size))
            else:
                walked.num_bytes += status.st_size  # one that is being written
            yield None

    def _clear(self, directory: int) -> Iterator[_Walked | None]:
        """Remove the files of a layout that nobody uses."""
        for _, name in _files(directory):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
            yield None
        try:
            refused = os.open(KV_REFUSED, _FLAGS, dir_fd=directory)
        except OSError:
            return
        try:
            yield from self._clear(refused)
        finally:
            os.close(refused)

    def _advance(self) -> None:
        assert self._walk is not None, "a walk was begun"
        try:
            walked = next(self._walk)
        except BaseException:
            self._walk = None
            raise
        if walked is not None:
            self._walked, self._walk = walked, None
            self._writers.count_from(walked.counts)

    # Making room

    def _make_room(self, num_bytes: int) -> bool:
        """Have files go, after another walk if need be; return whether there is room."""
        if self._walked is None or not self._remove_oldest(None, num_bytes):
            self._walk = self._walking()
            while self._walk is not None:
                self._advance()
            self._remove_oldest(None, num_bytes)
        return self._excess(num_bytes) <= 0

    def _remove_oldest(self, until_s: float | None, num_bytes: int) -> bool:
        """Remove files in order until there is room to spare; return whether there is room."""
        walked = self._walked
        assert walked is not None, "what is there is known"
        excess = self._excess(num_bytes)
        if excess <= 0:
            return True
        excess += self._max_bytes // SPARE_DIVISOR
        while excess > 0 and walked.in_order:
            num_gone = self._remove(walked.in_order.pop())
            walked.num_bytes -= num_gone
            excess -= num_gone
            if until_s is not None and self._clock() >= until_s:
                break
        return self._excess(num_bytes) <= 0

    def _remove(self, old: _Old) -> int:
        """Remove a file unless somebody has used it since; return the bytes that are gone."""
        path = f"{old.layout}/{old.name}"
        try:
            status = os.stat(path, dir_fd=self._root, follow_symlinks=False)
            if status.st_mtime_ns > old.used_ns:
                return 0
            os.unlink(path, dir_fd=self._root)
        except FileNotFoundError:
            return old.num_bytes
        except OSError:
            return 0
        return old.num_bytes


def _files(directory: int) -> Iterator[tuple[os.stat_result, str]]:
    """Yield the files of ours in a directory."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if SEGMENT.fullmatch(entry.name) or UNFINISHED.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield status, entry.name
