"""Start a child process that is spoken to over one inherited socket."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PYTHON_MODULE: Final = (sys.executable, "-P", "-m")
"""Runs a module in a process of its own. Modules are not looked for in the working directory, where
a file may have the name of one of ours: `cache.py`."""

PROGRAM: Final = (*PYTHON_MODULE, "session_server")
"""Runs a command of this package."""


def called_as() -> str:
    """Return how this program was called, for commands that are printed to be copied."""
    called = Path(sys.argv[0])
    return shlex.join([str(called)] if called.name == "session-server" else PROGRAM)


def start_child(argv: Sequence[str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return our end of a socket and a child that alone holds the other end.

    The number of the child's socket is appended to `argv`. The child has a process group of its
    own: Ctrl-C at the terminal is for the server, which decides when to stop. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            return ours, subprocess.Popen(  # noqa: S603
                [*argv, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
    except OSError:
        ours.close()
        raise
