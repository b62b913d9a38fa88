"""`TurnReport`: one ended turn as operators see it: ids, counts and times, never what was said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from session_server.core.events import TurnTimings
from session_server.core.origin import Origin
from session_server.core.session_events import TokenUsage


@dataclass(frozen=True, slots=True)
class TurnReport:
    """Describe a turn that was accepted and has ended. Times are monotonic seconds of the server.

    `reason`: what ended it, or the code of its failure. `is_chat`: its input was messages. None:
    what it did not come to. `received_s`: its request had arrived; `asked_s`: it was submitted;
    `checked_s`: its grammar was checked; `begun_s`: it had waited for the turns before it;
    `sent_s`: it was tokenized and sent to the engine; `first_token_s`: the engine's first token had
    arrived; `ended_s`: its end was journaled. `timings`: of the engine.
    """

    session_id: str
    turn_id: str
    status: Literal["completed", "cancelled", "failed"]
    reason: str
    is_chat: bool
    max_tokens: int
    usage: TokenUsage
    num_retractions: int
    timings: TurnTimings | None
    origin: Origin | None
    received_s: float
    asked_s: float
    checked_s: float | None
    begun_s: float | None
    sent_s: float | None
    first_token_s: float | None
    ended_s: float

    @property
    def ttft_s(self) -> float | None:
        """Return the seconds from the request to the first token; None if there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.received_s


TurnListener = Callable[[TurnReport], None]
