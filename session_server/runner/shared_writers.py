"""`Writers`: what each server says of the bytes that it has written to a shared directory.

Each has a file beside the directories of layouts. It is raised before a file of KV is begun, and
removed by others once the server has said nothing for long: one that comes back has to notice.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
from collections.abc import Generator, Mapping
from typing import Final, NamedTuple

LOOKED_AT: Final = 64
"""Files of other servers that one look reads, those read longest ago."""

_SETTLED_NS: Final = 2_000_000_000
_NONE_OF_OURS: Final = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO)
_NAME: Final = re.compile("writer-([0-9a-f]{32})-[0-9a-f]{16}", re.ASCII)
_COUNTS: Final = re.compile(rb"(\d{20}) (\d{20})\n")

_LOG: Final = logging.getLogger("session_server.engine")


class Counts(NamedTuple):
    """Count the bytes that a server has begun to write, and those of them that it has ended."""

    begun: int = 0
    ended: int = 0


class Writers:
    """Say what this server writes, and know what the others do."""

    def __init__(self, root: int, layout: str) -> None:
        """Begin as a server that has written nothing. `root`: the directory, open."""
        self._root, self._layout = root, layout
        self._own, self._counts, self._told = "", Counts(), Counts()
        self._known: dict[str, Counts] = {}
        """What each has said, those that were read longest ago first."""

        self._before: Mapping[str, Counts] = {}
        self._num_since = 0
        self._has_warned = False
        self._listed_ns = -1
        """When something was last added to the directory before it was listed."""

    # This server

    def begin(self, num_bytes: int) -> bool:
        """Say that so much is begun; see `publish`."""
        self._counts = Counts(self._counts.begun + num_bytes, self._counts.ended)
        return self.publish()

    def end(self) -> bool:
        """Say that all of it has ended; see `publish`."""
        self._counts = Counts(self._counts.begun, self._counts.begun)
        return self.publish()

    def publish(self) -> bool:
        """Say what was written, and that this server lives. Returns False if others took it for
        dead: it is a new one from now on, of which they know what they may not have counted.

        Raises:
            OSError: the disk does not do it.
        """
        flags, is_known = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, bool(self._own)
        try:
            if is_known:
                self._tell(flags)
                return True
        except FileNotFoundError:
            pass
        ended = self._told.ended
        self._counts = Counts(self._counts.begun - ended, self._counts.ended - ended)
        self._own, self._told = f"writer-{self._layout}-{secrets.token_hex(8)}", Counts()
        self._tell(flags | os.O_CREAT | os.O_EXCL)
        return not is_known

    def _tell(self, flags: int) -> None:
        descriptor = os.open(self._own, flags, 0o600, dir_fd=self._root)
        try:
            os.pwrite(descriptor, b"%020d %020d\n" % self._counts, 0)
        finally:
            os.close(descriptor)
        self._told = self._counts

    def now_ns(self) -> int:
        """Return what time it is by the clock of the files, as of the last `publish`."""
        return os.stat(self._own, dir_fd=self._root, follow_symlinks=False).st_mtime_ns

    # All servers

    def ignore(self, name: str) -> None:
        """Warn, once, that something only has the name of a server or of a layout."""
        if not self._has_warned:
            _LOG.warning("%s in the directory that servers share is none of ours", name)
        self._has_warned = True

    def num_since(self) -> int:
        """Return the bytes that were begun by all, and had not ended when `count_from` was told of
        it. Few of the others are read again for that, in turns."""
        self._list()
        for name in [*self._known][:LOOKED_AT]:
            self._read(name)
        self._note(self._own, self._counts)
        return self._num_since

    def count_from(self, before: Mapping[str, Counts]) -> None:
        """Count what is begun after that was said."""
        self._before = before
        self._num_since = sum(self._since(*each) for each in self._known.items())

    def read_all(
        self, dead_ns: int
    ) -> Generator[None, None, tuple[Mapping[str, Counts], frozenset[str]]]:
        """Read what all say, yielding after each; remove those that said nothing since `dead_ns`.
        Returns what they say, and the layouts that they use."""
        self._listed_ns = -1
        self._list()
        said, used = {}, {self._layout}
        for name in [*self._known]:
            if self._remove_dead(name, dead_ns):
                self._forget(name)
            elif self._read(name):
                said[name] = self._known[name]
                used.add(name.split("-")[1])
            yield
        said[self._own] = self._counts
        return said, frozenset(used)

    def _list(self) -> None:
        """Take note of servers that have come since, the first to be read, or have gone."""
        changed_ns = os.fstat(self._root).st_mtime_ns
        if changed_ns == self._listed_ns:
            return
        # What is added within one tick of the clock of the files shows no other time.
        is_settled = changed_ns < self.now_ns() - _SETTLED_NS
        self._listed_ns = changed_ns if is_settled else -1
        names = set()
        with os.scandir(self._root) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    if entry.is_file(follow_symlinks=False):
                        names.add(entry.name)
                    else:
                        self.ignore(entry.name)
        for name in self._known.keys() - names:
            self._forget(name)
        come = names - self._known.keys()
        if come:
            self._known = dict.fromkeys(come, Counts()) | self._known

    def _remove_dead(self, name: str, dead_ns: int) -> bool:
        """Remove the file of a server that is dead; return whether it is gone."""
        try:
            status = os.stat(name, dir_fd=self._root, follow_symlinks=False)
            if status.st_mtime_ns > dead_ns or name == self._own:
                return False
            os.unlink(name, dir_fd=self._root)
        except FileNotFoundError:
            pass
        except OSError:
            self.ignore(name)
        return True

    def _read(self, name: str) -> bool:
        """Read what a server says, the last to be read again; return whether it is there."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(name, flags, dir_fd=self._root)
        except FileNotFoundError:
            self._forget(name)
            return False
        except OSError as error:
            if error.errno not in _NONE_OF_OURS:
                raise
            self.ignore(name)
            self._note(name, Counts())
            return False
        try:
            match = _COUNTS.fullmatch(os.read(descriptor, 64))
        finally:
            os.close(descriptor)
        self._note(name, Counts(int(match[1]), int(match[2])) if match else Counts())
        return True

    def _note(self, name: str, counts: Counts) -> None:
        self._forget(name)
        self._known[name] = counts
        self._num_since += self._since(name, counts)

    def _forget(self, name: str) -> None:
        self._num_since -= self._since(name, self._known.pop(name, Counts()))

    def _since(self, name: str, counts: Counts) -> int:
        return max(0, counts.begun - self._before.get(name, Counts()).ended)
