"""Cut what a peer sends into records of TLS, and count those that say nothing.

OpenSSL reads on until something was said. A record that changes a key says nothing, costs the
server two keys and an answer, and 27 bytes.
"""

from __future__ import annotations

from typing import Final

MAX_SILENT_RECORDS: Final = 64
"""Maximum records of one connection that say nothing, behind its handshake. A client may change
its key after millions of records."""

RECORD_MEMORY_BYTES: Final = 24_576
"""Bytes that a record counts, beside those that are here, while it is not whole: OpenSSL makes room
for all of it."""

UNDECRYPTED: Final = "session_server.undecrypted_bytes"
"""What a transport is asked for: the bytes that have arrived and that its protocol has not seen."""

_HEAD_BYTES: Final = 5


class Records:
    """Follow the records of one direction, and hold back those that wait."""

    __slots__ = ("_at", "_head", "_held_back", "_missing", "num_bytes", "num_silent")

    def __init__(self) -> None:
        self._held_back, self._at = b"", 0
        self._head, self._missing = b"", 0
        self.num_bytes = self.num_silent = 0

    @property
    def is_between(self) -> bool:
        """Return whether the last piece was the end of a record."""
        return not self._head

    @property
    def num_held_back(self) -> int:
        """Return the bytes that are in no piece yet."""
        return len(self._held_back) - self._at

    @property
    def num_undecrypted(self) -> int:
        """Return what the bytes take that say nothing yet: those held back, and a record that is
        not whole."""
        if self.is_between:
            return self.num_held_back
        is_head_whole = len(self._head) == _HEAD_BYTES
        size = int.from_bytes(self._head[3:], "big") if is_head_whole else 0
        num_begun = len(self._head) + size - self._missing
        return self.num_held_back + RECORD_MEMORY_BYTES + num_begun

    def hold(self, data: bytes) -> None:
        """Put these bytes behind those that are held back."""
        self._held_back, self._at = self._held_back[self._at :] + data, 0

    def drop(self) -> None:
        """Forget what is held back."""
        self._held_back, self._at = b"", 0

    def next_piece(self) -> bytes:
        """Return the bytes up to the end of a record, or what is here of one; b"" if there are
        none."""
        data, start, end = self._held_back, self._at, self._at
        while end < len(data):
            head = data[end : end + _HEAD_BYTES - len(self._head)]
            self._head, end = self._head + head, end + len(head)
            if head and len(self._head) == _HEAD_BYTES:
                self._missing = int.from_bytes(self._head[3:], "big")
            part = min(self._missing, len(data) - end)
            self._missing, end = self._missing - part, end + part
            if len(self._head) == _HEAD_BYTES and not self._missing:
                self._head = b""
                break
        self._at = end
        if not self.num_held_back:
            self.drop()
        self.num_bytes += end - start
        return data[start:end]
