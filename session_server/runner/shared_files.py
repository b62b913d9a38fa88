"""`SharedFiles`: segments of KV in a directory that several servers read and write at once.

What this server knows of it is never all of it: what is asked for is looked up by its name, and
may be gone, or another segment of the same name, by the time it is read.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from session_server.core.tier_orders import DroppedPath, FoundFile
from session_server.runner.own_files import OwnFiles
from session_server.runner.segment_files import (
    OtherFile,
    Payload,
    SegmentFiles,
    file_name,
    opened,
)
from session_server.runner.segment_format import Layout
from session_server.runner.shared_deletion import deleting
from session_server.runner.shared_directory import SLICE_S, SharedDirectory

_LOG: Final = logging.getLogger("session_server.engine")


class SharedFiles(SegmentFiles):
    """Write, find and read the files of a layout, of a key that only those who share have."""

    def __init__(self, path: Path, layout: Layout, max_bytes: int) -> None:
        """Take part in a directory, which is made if there is none. `max_bytes`: of all files in
        it, whoever has written them.

        Raises:
            OSError: it cannot be used.
        """
        assert layout.key, "whoever can write to a shared directory has no KV used without a key"
        self._shared = SharedDirectory(path, layout.name, max_bytes)
        self._paths: list[DroppedPath] = []
        """Histories whose files are being removed."""

        self._work: Iterator[None] | None = None
        """What removes files a little at a time."""

        super().__init__(self._shared.open(), layout)
        self._own = OwnFiles(self._shared.now_ns())
        self._is_claimed = True

    def write(self, segment: FoundFile, payload: Payload, used_ns: int) -> None:
        """Write a file as `SegmentFiles.write` does, within what all servers may have."""
        try:
            super().write(segment, payload, used_ns)
        finally:
            self._shared.end_write()
        self._own.add(segment.file.file_id)

    def room(self) -> int | None:
        """Do a slice of what keeps the directory within its bytes. What room there is changes with
        what others do, so nothing is said."""
        try:
            self._shared.tick()
            self._follow()
            self._go_on()
        except OSError as error:
            _LOG.warning("the directory that servers share cannot be looked at: %s", error)
        return None

    def _take_room(self, num_bytes: int) -> None:
        self._shared.reserve(num_bytes)
        self._follow()

    def _follow(self) -> None:
        """Use the directory of the layout that is there, and no other."""
        if not self._shared.is_there:
            self._open_again()

    def _open_again(self) -> None:
        self._work = None
        before = self._directory, self._refused
        self._directory, self._refused = opened(self._shared.open())
        for descriptor in before:
            os.close(descriptor)

    def remove_all(self) -> None:
        """Have all go that this server has written, which may be wrong, and use none of it any
        more; see `drop`."""
        self._own.doom()
        self._work = None

    def drop(self, paths: Sequence[DroppedPath]) -> bool:
        """Remove the files of some histories, behind their first tokens and behind where another
        one leaves them that has files: a slice of that, and of what was not done before. Returns
        whether all is done.

        Raises:
            OSError: the disk does not do it. These histories are not tried again.
        """
        if paths:
            self._paths += paths
            self._work = None
        try:
            self._follow()
            self._go_on()
        except OSError:
            self._paths = []
            raise
        return self._work is None

    def _go_on(self) -> None:
        """Remove a slice of what is to be removed."""
        if self._work is None and (self._paths or self._own.has_doomed):
            self._work = self._removing()
        until_s = time.monotonic() + SLICE_S
        try:
            while self._work is not None:
                next(self._work)
                if time.monotonic() >= until_s:
                    return
        except StopIteration:
            self._work = None
        except OSError:
            self._work = None
            raise

    def _removing(self) -> Iterator[None]:
        if self._paths:
            page_size = self._layout.page_size
            yield from deleting(self._directory, self._paths, page_size, self._remove_one)
            self._paths = []
        if self._own.has_doomed:
            yield from self._own.removing(self._directory, self._unlink_file)

    def _unlink_file(self, file_id: bytes) -> None:
        self._unlink_now(file_name(file_id))

    def _remove_one(self, file_id: bytes) -> None:
        self.remove((file_id,))

    def _is_left_out(self, file_id: bytes, descriptor: int) -> bool:
        return self._own.is_doomed(file_id, descriptor)

    def _refuse(self, file_id: bytes, why: Exception) -> None:
        if not isinstance(why, OtherFile):  # somebody else has written it anew
            super()._refuse(file_id, why)
