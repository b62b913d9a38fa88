"""`OwnFiles`: what this server has written to a shared directory, to be removed if it may be wrong.

That takes a while where it is much. What may be wrong is not read meanwhile, at least not here.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final

from session_server.runner.kv_directory import SEGMENT

MAX_WRITTEN: Final = 1 << 16
"""Files of this server that it remembers. Once it has written more, files go that others have
written or used since it began: any of them may be one of its own."""


class OwnFiles:
    """Remember files by their ids, and remove them. `since_ns`: when this server began, by the
    clock of the files."""

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        self._written: dict[bytes, None] = {}
        self._has_forgotten = False
        self._doomed: dict[bytes, None] = {}
        self._are_all_doomed = False

    @property
    def has_doomed(self) -> bool:
        """Return whether some are to be removed."""
        return self._are_all_doomed or bool(self._doomed)

    def add(self, file_id: bytes) -> None:
        """Remember a file that was written just now."""
        self._doomed.pop(file_id, None)
        self._written[file_id] = None
        if len(self._written) > MAX_WRITTEN:
            del self._written[next(iter(self._written))]
            self._has_forgotten = True

    def doom(self) -> None:
        """Have all that were written so far removed."""
        self._doomed |= self._written
        self._are_all_doomed |= self._has_forgotten or len(self._doomed) > MAX_WRITTEN
        self._written, self._has_forgotten = {}, False
        if self._are_all_doomed:
            self._doomed.clear()

    def is_doomed(self, file_id: bytes, descriptor: int) -> bool:
        """Return whether an open file is to be removed."""
        if self._are_all_doomed:
            return os.fstat(descriptor).st_ctime_ns >= self._since_ns
        return file_id in self._doomed

    def removing(self, directory: int, unlink: Callable[[bytes], object]) -> Iterator[None]:
        """Remove what is doomed, and yield after each file.

        Raises:
            OSError: some could not be removed, and are doomed still.
        """
        failed: OSError | None = None
        for file_id in [*self._doomed]:
            try:
                with contextlib.suppress(FileNotFoundError):
                    if file_id in self._doomed:
                        unlink(file_id)
                self._doomed.pop(file_id, None)
            except OSError as error:
                failed = error
            yield
        if self._are_all_doomed:
            yield from self._removing_all(directory, unlink)
        if failed is not None:
            raise failed

    def _removing_all(self, directory: int, unlink: Callable[[bytes], object]) -> Iterator[None]:
        failed: OSError | None = None
        own = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
        try:
            with os.scandir(own) as entries:
                for entry in entries:
                    try:
                        with contextlib.suppress(FileNotFoundError):
                            if (match := SEGMENT.fullmatch(entry.name)) and self._is_late(entry):
                                unlink(bytes.fromhex(match[1]))
                    except OSError as error:
                        failed = error
                    yield
        finally:
            os.close(own)
        if failed is not None:
            raise failed
        self._are_all_doomed = False

    def _is_late(self, entry: os.DirEntry[str]) -> bool:
        status = entry.stat(follow_symlinks=False)
        return stat.S_ISREG(status.st_mode) and status.st_ctime_ns >= self._since_ns
