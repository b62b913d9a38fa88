"""Watch the file of keys, and take it over as a whole when it changes.

A file that was renamed to its place (`session-server keys`, most editors) is read at once. One that
is written there, or was a moment ago, is read when it has rested for a tick, so that half of it is
not taken for all. Where it cannot be read, or a line of it is wrong, or it is empty, the keys from
before stay.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from session_server.web.key_file import InvalidKeys, digest_of, read_file
from session_server.web.keys import KeyChange, KeyRing, KeySources

_logger: Final = logging.getLogger("session_server.web")


class KeyWatch:
    """Compare a file with what it was when it was last looked at."""

    def __init__(self, ring: KeyRing, sources: KeySources, path: Path) -> None:
        self._ring = ring
        self._sources = sources
        self._path = path
        self._mark: tuple[int, ...] = ()
        self._is_settled = False
        self._digest = ""
        self._complaint = ""

    async def look(self) -> KeyChange | None:
        """Let the keys of the file in, and return what has changed, if anything has."""
        change = await asyncio.to_thread(self._read)
        if change is None:
            return None
        self._ring.apply(change)
        _logger.info(
            "keys read owners=%d admins=%d gone_keys=%d gone_owners=%d",
            len(change.owners),
            change.num_admins,
            len(change.gone),
            len(change.gone_owners),
        )
        return change

    def _read(self) -> KeyChange | None:
        """Return what the file would change, where it may be read now; it may be slow."""
        try:
            if not self._is_due():
                return None
            text = self._read_text()
            digest = digest_of(text)
            if digest == self._digest:
                return None
            change = self._ring.change_to(self._sources.owners(text, may_be_none=True))
        except InvalidKeys as error:
            self._complain(str(error))
            return None
        self._digest, self._complaint = digest, ""
        return change

    def _read_text(self) -> str:
        """Return the text of the file; what cannot be read is read again. Raises InvalidKeys."""
        try:
            return read_file(self._path)
        except InvalidKeys:
            self._is_settled = False
            raise

    def _is_due(self) -> bool:
        """Return whether the file is new, or has rested since it was written. Raises
        InvalidKeys."""
        try:
            status = self._path.stat()
        except OSError as error:
            self._mark = ()
            raise InvalidKeys(f"the key file {self._path}: {error.strerror}") from None
        mark = (
            *(status.st_dev, status.st_ino, status.st_size),
            *(status.st_mtime_ns, status.st_ctime_ns),
        )
        # A file that has changed since it was written to was renamed: all of it is there.
        is_whole = status.st_ctime_ns > status.st_mtime_ns
        is_new, is_same = is_whole and mark[:2] != self._mark[:2], mark == self._mark
        if is_same and self._is_settled:
            return False
        # Two writes in one moment of the file system's clock look the same: read once more.
        self._mark, self._is_settled = mark, is_same
        return is_new or is_same

    def _complain(self, complaint: str) -> None:
        """Log once why the file is not taken over."""
        if complaint != self._complaint:
            self._complaint = complaint
            _logger.error("%s; the keys from before stay", complaint)
