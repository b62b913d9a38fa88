"""`SharedFiles`: segments of KV in a directory that several servers read and write at once.

What this server knows of it is never all of it: what is asked for is looked up by its name, and
may be gone, or another segment of the same name, by the time it is read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from cache.tiers.segment import NAME_BYTES, chains_after, first_chain
from session_server.core.tier_orders import DroppedPath, FoundFile
from session_server.runner.kv_directory import SEGMENT
from session_server.runner.segment_files import OtherFile, Payload, SegmentFiles, opened
from session_server.runner.segment_format import Layout
from session_server.runner.shared_directory import SharedDirectory

MAX_WRITTEN: Final = 1 << 16
"""Files of this server that it remembers, for when what it has written may be wrong."""

_Boundaries = tuple[dict[bytes, int], int]
"""The chain at each page of a history, in pages, and how many pages of it stay."""

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
        self._left: list[DroppedPath] = []
        """Histories whose files could not be removed yet."""

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
        before = self._directory, self._refused
        self._directory, self._refused = opened(self._shared.open())
        for descriptor in before:
            os.close(descriptor)

    def remove_all(self) -> None:
        """Remove what this server has written, which may be wrong; what others have is not."""
        self.remove(tuple(self._written))
        self._written.clear()

    def drop(self, paths: Sequence[DroppedPath]) -> None:
        """Remove the files of some histories, behind their first tokens and behind where another
        one leaves them that has files; see `erase`.

        Raises:
            OSError: the directory cannot be read.
        """
        self._follow()
        self._left += paths
        waiting = [self._boundaries(path) for path in self._left]
        # Of two servers that drop histories with a beginning in common, whoever looks last sees
        # that nobody else has it.
        while waiting:
            waiting = self._drop_some(waiting)
        self._left.clear()

    def erase(self) -> bool:
        """See `SegmentFiles.erase`."""
        try:
            self.drop(())
        except OSError:
            return False
        return super().erase()

    def _refuse(self, file_id: bytes, why: Exception) -> None:
        if not isinstance(why, OtherFile):  # somebody else has written it anew
            super()._refuse(file_id, why)

    def _boundaries(self, path: DroppedPath) -> _Boundaries:
        page_size, chain = self._layout.page_size, first_chain(path.namespace)
        tokens = path.tokens[: len(path.tokens) // page_size * page_size]
        chains = (chain, *chains_after(chain, tokens, page_size))
        return {each: at for at, each in enumerate(chains)}, path.num_kept // page_size

    def _drop_some(self, waiting: list[_Boundaries]) -> list[_Boundaries]:
        """Remove what can be; return what may be left since others had files behind it."""
        ids = set(self._ids())
        left = []
        for chains, num_kept in waiting:
            own, num_needed = [], 0
            for file_id in ids:
                name, chain = file_id[:NAME_BYTES], file_id[NAME_BYTES : 2 * NAME_BYTES]
                at = chains.get(chain)
                if at is None:
                    continue
                if chains.get(name) == at + 1:
                    own.append((at, file_id))
                else:
                    num_needed = max(num_needed, at)
            gone = [file_id for at, file_id in own if at >= max(num_kept, num_needed)]
            self.remove(gone)
            if gone and any(num_kept <= at < num_needed for at, _ in own):
                left.append((chains, num_kept))
            ids.difference_update(gone)
        return left

    def _ids(self) -> Iterator[bytes]:
        with os.scandir(self._directory) as entries:
            matches = (SEGMENT.fullmatch(entry.name) for entry in entries)
            yield from (bytes.fromhex(match[1]) for match in matches if match is not None)
