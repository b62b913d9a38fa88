"""Bind the listening socket, and derive connection limits from the descriptor limit."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket
import time
from typing import Any, Final

from session_server.web.connection_table import ConnectionLimits

BACKLOG: Final = 4096
"""Connections that the kernel queues until they are accepted."""

ACCEPTS_AT_ONCE: Final = 32
"""Connections accepted in one iteration of the event loop: so many may be open before the
connection table counts them."""

UNSENT_BYTES: Final = 1 << 17
"""Bytes that the kernel queues for a peer beyond those on their way to it."""

RESERVED_DESCRIPTORS: Final = 128
"""Descriptors for everything but connections, and for connections that are closing."""

REQUEST_CONNECTIONS: Final = 256
"""Connections beyond those of readers, so that plain requests are answered while all readers are
connected."""

EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of `accept` when the process or the system has no descriptor or memory left."""

_QUIET_S: Final = 0.5
"""Seconds without calling `accept` after a failure; asyncio itself tries again after one second."""


def why_not(host: str, port: int, error: OSError, advice: str) -> str:
    """Return why nothing listens at an address, with what to do where somebody else does."""
    said = f"; {advice}" if error.errno == errno.EADDRINUSE else ""
    return f"cannot listen on {host}:{port}: {error.strerror or error}{said}"


def is_loopback(host: str) -> bool:
    """Return whether a host or address to bind is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Listener(socket.socket):
    """Fail `accept` once, not thousands of times, while the process has no descriptors left.

    asyncio calls `accept` once per backlog entry for every new connection, and logs a stack trace
    for each failure.
    """

    _exhausted_s = -1.0

    def listen(self, backlog: int = BACKLOG) -> None:
        """Listen with a long queue, however few connections are accepted at once."""
        super().listen(max(backlog, BACKLOG))

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept one connection.

        Raises:
            BlockingIOError: no connection waits, or the last failure is too recent to try again.
            OSError: the system has no descriptor or memory left.
        """
        if time.monotonic() - self._exhausted_s < _QUIET_S:
            raise BlockingIOError(errno.EAGAIN, "no descriptors were left a moment ago")
        try:
            return super().accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._exhausted_s = time.monotonic()
            raise


def bind(host: str, port: int) -> Listener:
    """Return a bound socket that does not listen yet; port 0 takes a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets whose protocol is IPPROTO_TCP. With it
    # on, a frame waits for the client's delayed acknowledgment of the previous one: 40 ms a turn.
    listener = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit this. Otherwise the kernel queues megabytes and takes the next
        # ones in one go, and a peer that reads slowly looks like one that reads nothing.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def raise_descriptor_limit(max_connections: int) -> int:
    """Raise the soft limit of descriptors to what the readers need, if allowed.

    Returns the soft limit in force.
    """
    wanted = max_connections + REQUEST_CONNECTIONS + RESERVED_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(soft, wanted) if soft == resource.RLIM_INFINITY else soft


def max_readers_for(max_connections: int, *, descriptors: int) -> int:
    """Return how many readers there may be, leaving room for plain requests."""
    room = max(4, descriptors - RESERVED_DESCRIPTORS)
    return min(max_connections, max(room - REQUEST_CONNECTIONS, room * 3 // 4))


def connection_limits_for(
    max_readers: int,
    *,
    descriptors: int,
    max_per_address: int | None,
    input_bytes: int,
    max_message_bytes: int,
) -> ConnectionLimits:
    """Return the limits of all connections.

    One address gets half of each by default, and always room for one message.
    """
    room = max(4, descriptors - RESERVED_DESCRIPTORS)
    connections = min(max_readers + REQUEST_CONNECTIONS, room)
    # Frame headers and request heads count in addition to the largest message.
    least_bytes = 2 * max_message_bytes
    return ConnectionLimits(
        connections=connections,
        connections_per_address=min(connections, max_per_address or max(1, connections // 2)),
        input_bytes=max(least_bytes, input_bytes),
        input_bytes_per_address=max(least_bytes, input_bytes // 2),
    )
