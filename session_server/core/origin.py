"""`Origin`: where a turn comes from, known to all that runs for one request or connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

MAX_UNDELIVERED: Final = 64
"""Ended turns of one origin whose delivery is awaited; the oldest is forgotten."""

Delivered = Callable[[float], None]
"""Called with the time at which the end of a turn was written to the socket; monotonic."""


@dataclass(slots=True)
class Origin:
    """Describe one request, or one WebSocket from its handshake on.

    `received_s`: when it, or the newest message of the socket, had arrived; monotonic.
    `request_id`: of the client's choice or the server's. `trace`: its `traceparent` and
    `tracestate` (W3C Trace Context), if it has them. `refusal`: the code of its last refusal.
    """

    received_s: float
    request_id: str
    trace: Mapping[str, str] | None = None
    refusal: str = ""
    _undelivered: list[Delivered] | None = None

    def on_delivery(self, delivered: Delivered) -> None:
        """Have somebody told when what has ended is written to the socket."""
        waiting = self._undelivered = self._undelivered or []
        if len(waiting) == MAX_UNDELIVERED:
            del waiting[0]
        waiting.append(delivered)

    def take_undelivered(self) -> Sequence[Delivered]:
        """Return who is to be told of the next delivery, and forget them."""
        taken, self._undelivered = self._undelivered or (), None
        return taken


ORIGIN: Final[ContextVar[Origin | None]] = ContextVar("origin", default=None)
"""Set by the outermost middleware; the tasks that a request starts inherit it."""
