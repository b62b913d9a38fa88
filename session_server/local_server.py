"""Start a server process on this machine, for the demo, the chat and the benchmarks.

It is the ordinary `session-server serve` on a free port: a separate process, real sockets, and the
same shutdown as in production.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from session_server.core.child_process import PROGRAM

_READY: Final = re.compile(r"listening on (https?://\S+)")
_TAIL_LINES: Final = 40
_PREFIX: Final = "SESSION_SERVER_"

SERVE: Final = (*PROGRAM, "serve")


class ServerFailed(Exception):
    """Report that the server process did not start; the message ends with its last lines."""


class LocalServer:
    """Run `session-server serve --port 0` with further flags, as a context manager.

    It keeps no session on disk unless a flag says so. `url` is where it listens, without a trailing
    slash. On exit it gets SIGTERM, drains, and is killed only if it does not exit; `returncode` is
    its exit status.
    """

    def __init__(
        self,
        flags: Sequence[str] = (),
        *,
        program: Sequence[str] = SERVE,
        start_timeout_s: float = 180.0,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self._argv = (*program, "--port", "0", "--store", "none", *flags)
        self._start_timeout_s = start_timeout_s
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        """Return the process id of the server."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit status; None while the process runs."""
        return None if self._process is None else self._process.poll()

    @property
    def last_lines(self) -> str:
        """Return the last lines that the server wrote."""
        return "\n".join(self._tail)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # noqa: S603 - our own argv, no shell
            self._argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            # Keys and settings in the environment are meant for another server.
            env={name: at for name, at in os.environ.items() if not name.startswith(_PREFIX)},
        )
        threading.Thread(target=self._read_lines, daemon=True).start()
        deadline = time.monotonic() + self._start_timeout_s
        try:
            url = self._ready.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            url = None
        if url is None:
            self.stop()
            raise ServerFailed(f"the server did not start; its last lines:\n{self.last_lines}")
        self.url = url
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self, *, timeout_s: float = 30.0) -> int:
        """Send SIGTERM, wait, then SIGKILL. Return the exit status; idempotent."""
        assert self._process is not None, "the server was not started"
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s=timeout_s)

    def wait(self, *, timeout_s: float = 30.0) -> int:
        """Wait for the process to exit, then SIGKILL. Return the exit status."""
        assert self._process is not None, "the server was not started"
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _read_lines(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line.rstrip())
            if self._on_line is not None:
                self._on_line(line.rstrip())
            found = _READY.search(line)
            if found:
                self._ready.put(found.group(1))
        self._process.stdout.close()
        self._ready.put(None)
