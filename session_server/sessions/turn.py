"""One turn between `submit` and its terminal entry."""

from __future__ import annotations

import asyncio
import enum
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from session_server.core.errors import SessionServerError, TurnConflict
from session_server.core.ids import TurnId, new_turn_id
from session_server.core.owner import Owner
from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import TurnEnd, TurnRequest
from session_server.sessions.answer import Answer
from session_server.sessions.prompt import Prompt

CancelReason = Literal["client_cancelled", "disconnected", "session_closed", "draining"]


class TurnPhase(enum.Enum):
    """WAITING -> PREPARING -> RUNNING -> ENDING -> ENDED; any may go straight to ENDED.

    PREPARING: being tokenised. ENDING: the outcome is decided here (a stop string, a cancel), the
    engine's terminal event is awaited.
    """

    WAITING = enum.auto()
    PREPARING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class StopFound:
    """The text completed a stop string."""

    stop: str


@dataclass(frozen=True, slots=True)
class CancelAccepted:
    """A cancel was accepted; with `keep_partial` what was processed until then stays."""

    keep_partial: bool
    reason: CancelReason


@dataclass(slots=True, eq=False)
class SubmittedTurn:
    """What a turn has once it was sent to the engine. `base_len`: see `SubmitTurn`."""

    prompt: Prompt
    answer: Answer
    base_len: int
    cached_tokens: int = 0
    is_started: bool = False
    verdict: StopFound | CancelAccepted | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SessionTurn:
    """A turn that has not ended. `engine_id` is what the engine knows it by.

    `accepted` resolves once the turn is certain to get a terminal entry (None), or was refused
    and leaves no trace (the error). `held_bytes` and `reserved_bytes` are counted for it by
    `Quotas`, as its own and as growth of the conversation. `on_end` is told its terminal entry.
    """

    request: TurnRequest
    fingerprint: bytes
    item_id: str
    accepted: asyncio.Future[SessionServerError | None]
    engine_id: TurnId = field(default_factory=new_turn_id)
    phase: TurnPhase = TurnPhase.WAITING
    created_seq: int = 0
    is_charged: bool = False
    held_bytes: int = 0
    reserved_bytes: int = 0
    on_end: Callable[[TurnEnd], None] | None = None
    submitted: SubmittedTurn | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether `TurnCreated` was written."""
        return self.created_seq > 0


def with_allowed_priority(request: TurnRequest, owner: Owner) -> TurnRequest:
    """Return the request with its priority lowered to what its owner may ask for."""
    return replace(request, priority=min(request.priority, owner.max_priority))


def fingerprint(request: TurnRequest) -> bytes:
    """Equal for equal requests; what an ended turn keeps of a body that may be large.

    What happens when the asker goes is about the asker and differs by surface: it does not count.
    """
    asked = repr(replace(request, on_disconnect="detach"))
    return hashlib.blake2b(asked.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def check_same_request(known: bytes, digest: bytes) -> None:
    """Reject a turn id that was used with another request. Raises TurnConflict."""
    if known != digest:
        raise TurnConflict("the turn id was used with another request", param="turn_id")
