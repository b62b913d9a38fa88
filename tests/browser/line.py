"""The line between a browser and a server, which a test can cut and mend."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
CHUNK_BYTES = 65_536


class Line:
    """Context manager: carries connections to a port of this machine until it is cut.

    `cut` resets those that are open and all that come until `mend`.
    """

    def __init__(self, url: str) -> None:
        self._target = int(url.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_cut = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Reset every connection, and those to come."""
        with self._lock:
            self._is_cut = True
            for end in self._ends:
                _reset(end)
            self._ends.clear()

    def mend(self) -> None:
        """Carry connections again."""
        with self._lock:
            self._is_cut = False

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                self._join(client)

    def _join(self, client: socket.socket) -> None:
        with self._lock:
            try:
                if self._is_cut:
                    raise ConnectionError
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                _reset(client)
                return
            self._ends |= {client, server}
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(CHUNK_BYTES):
                sink.sendall(chunk)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        end.shutdown(socket.SHUT_RD)  # wakes the thread that reads
    end.close()
