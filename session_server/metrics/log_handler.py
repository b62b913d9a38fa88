"""Write log lines from a thread, so that a blocked log reader never blocks the server.

The reader of the log may stop reading. A write to a full pipe then blocks the thread that writes,
which must not be the event loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Final, TextIO

MAX_WAITING_BYTES: Final = 1 << 20
"""Maximum bytes of lines that wait to be written; further lines are dropped and counted."""

MAX_REPEATS_PER_S: Final = 10
"""Maximum warnings and errors with the same text in a second; further ones are counted."""

FLUSH_TIMEOUT_S: Final = 1.0
"""Seconds that the process waits at its end for lines that are not written yet."""

_KINDS_KEPT: Final = 256


class NonBlockingHandler(logging.Handler):
    """Write formatted lines to a stream from a separate thread."""

    def __init__(self, stream: TextIO, *, max_bytes: int = MAX_WAITING_BYTES) -> None:
        super().__init__()
        self._stream = stream
        self._max_bytes = max_bytes
        self._lines: deque[str] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one line, or count it as dropped."""
        try:
            line = self.format(record) + "\n"
        except Exception:  # noqa: BLE001 - a line that cannot be formatted must not fail its caller
            self.handleError(record)
            return
        with self._changed:
            if self._num_bytes + len(line) > self._max_bytes:
                self._num_dropped += 1
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="log", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait up to `FLUSH_TIMEOUT_S` for the queued lines to be written."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes == 0, FLUSH_TIMEOUT_S)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                lines, self._lines = self._lines, deque()
                num_dropped, self._num_dropped = self._num_dropped, 0
            text = "".join(lines)
            if num_dropped:
                text += f"{num_dropped} log lines were dropped: they could not be written in time\n"
            num_lost = 0
            try:
                self._stream.write(text)
                self._stream.flush()
            except ValueError:
                return  # the stream is closed
            except OSError:
                num_lost = num_dropped + len(lines)  # a full disk has room again one day
            with self._changed:
                self._num_dropped += num_lost
                self._num_bytes -= sum(map(len, lines))
                self._changed.notify_all()


class RepeatFilter(logging.Filter):
    """Limit warnings and errors with the same text to a few per second.

    The next line that passes says how many were hidden.
    """

    def __init__(self, *, max_per_s: int = MAX_REPEATS_PER_S) -> None:
        super().__init__()
        self._max_per_s = max_per_s
        self._seen: dict[tuple[str, str], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show this record."""
        if record.levelno < logging.WARNING:
            return True
        if len(self._seen) > _KINDS_KEPT:
            self._seen.clear()
        kind = self._seen.setdefault((record.name, str(record.msg)), _Kind())
        now_s = time.monotonic()
        if now_s - kind.since_s >= 1.0:
            kind.since_s, kind.num_shown = now_s, 0
        if kind.num_shown >= self._max_per_s:
            kind.num_hidden += 1
            return False
        kind.num_shown += 1
        if kind.num_hidden:
            record.msg = f"{record.msg} ({kind.num_hidden} more like this were not shown)"
            kind.num_hidden = 0
        return True


class _Kind:
    """Count the shown and hidden records of one text in the second that began at `since_s`."""

    __slots__ = ("num_hidden", "num_shown", "since_s")

    def __init__(self) -> None:
        self.since_s = float("-inf")
        self.num_shown = self.num_hidden = 0
