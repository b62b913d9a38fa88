"""Cut what a peer sends into records of TLS, and count those that say nothing.

OpenSSL reads on until something was said. A record that changes a key says nothing, costs the
server two keys and an answer, and 27 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

MAX_SILENT_RECORDS: Final = 64
"""Maximum records of one connection that say nothing, behind its handshake. A client may change
its key after millions of records."""

_HEAD_BYTES: Final = 5


class Records:
    """Follow the records of one direction."""

    __slots__ = ("_head", "_missing", "num_bytes", "num_silent")

    def __init__(self) -> None:
        self._head, self._missing = b"", 0
        self.num_bytes = self.num_silent = 0

    @property
    def is_between(self) -> bool:
        """Return whether the last piece was the end of a record."""
        return not self._head

    def cut(self, data: bytes) -> Iterator[bytes]:
        """Yield the bytes in pieces that end with a record; the last may be a part of one."""
        start = end = 0
        while end < len(data):
            head = data[end : end + _HEAD_BYTES - len(self._head)]
            self._head, end = self._head + head, end + len(head)
            if head and len(self._head) == _HEAD_BYTES:
                self._missing = int.from_bytes(self._head[3:], "big")
            part = min(self._missing, len(data) - end)
            self._missing, end = self._missing - part, end + part
            if len(self._head) == _HEAD_BYTES and not self._missing:
                self._head = b""
            if self.is_between or end == len(data):
                self.num_bytes += end - start
                yield data[start:end]
                start = end
