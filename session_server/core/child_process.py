"""Start a child process that is spoken to over one inherited socket."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence


def start_child(
    argv: Sequence[str], *, process_group: int | None = None
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return our end of a socket and a child that alone holds the other end.

    The number of the child's socket is appended to `argv`. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            return ours, subprocess.Popen(  # noqa: S603
                [*argv, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=process_group,
            )
    except OSError:
        ours.close()
        raise
