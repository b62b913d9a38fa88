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
from session_server.runner.segment_files import OtherFile, Payload, SegmentFiles, opened
from session_server.runner.segment_format import Layout
from session_server.runner.shared_deletion import deleting
from session_server.runner.shared_directory import SLICE_S, SharedDirectory

MAX_WRITTEN: Final = 1 << 16
"""Files of this server that it remembers, for when what it has written may be wrong."""

_OVER: Final = object()
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
        self._written: dict[bytes, None] = {}
        self._paths: list[DroppedPath] = []
        """Histories whose files are being removed."""

        self._deletion: Iterator[None] | None = None

        super().__init__(self._shared.open(), layout)
        self._is_claimed = True

    def write(self, segment: FoundFile, payload: Payload, used_ns: int) -> None:
        """See `SegmentFiles.write`."""
        try:
            super().write(segment, payload, used_ns)
        finally:
            self._shared.end_write()
        self._written[segment.file.file_id] = None
        if len(self._written) > MAX_WRITTEN:
            del self._written[next(iter(self._written))]

    def room(self) -> int | None:
        """Do a slice of what keeps the directory within its bytes. What room there is changes with
        what others do, so nothing is said."""
        try:
            self._shared.tick()
            self._follow()
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
        self._deletion = None
        before = self._directory, self._refused
        self._directory, self._refused = opened(self._shared.open())
        for descriptor in before:
            os.close(descriptor)

    def remove_all(self) -> None:
        """Remove what this server has written, which may be wrong; what others have is not."""
        self.remove(tuple(self._written))
        self._written.clear()

    def drop(self, paths: Sequence[DroppedPath]) -> bool:
        """Remove the files of some histories, behind their first tokens and behind where another
        one leaves them that has files: a slice of that, and of what was not done before. Returns
        whether all is done.

        Raises:
            OSError: the directory cannot be read. It is not tried again.
        """
        try:
            self._follow()
            if paths:
                self._paths += paths
                self._deletion = None
            until_s = time.monotonic() + SLICE_S
            while self._advance() and time.monotonic() < until_s:
                pass
        except OSError:
            self._paths, self._deletion = [], None
            raise
        return not self._paths

    def _advance(self) -> bool:
        """Do a little of a deletion; return whether there is more."""
        if self._paths and self._deletion is None:
            page_size = self._layout.page_size
            self._deletion = deleting(self._directory, self._paths, page_size, self._remove_one)
        if self._deletion is not None and next(self._deletion, _OVER) is _OVER:
            self._paths, self._deletion = [], None
        return bool(self._paths)

    def _remove_one(self, file_id: bytes) -> None:
        self.remove((file_id,))

    def _refuse(self, file_id: bytes, why: Exception) -> None:
        if not isinstance(why, OtherFile):  # somebody else has written it anew
            super()._refuse(file_id, why)
