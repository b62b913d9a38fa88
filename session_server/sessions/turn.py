"""Define one turn between `submit` and its terminal entry."""

from __future__ import annotations

import asyncio
import enum
import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from session_server.core.errors import SessionServerError, TurnConflict
from session_server.core.ids import TurnId, new_turn_id
from session_server.core.origin import Origin
from session_server.core.owner import Owner
from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import (
    CancelReason,
    CheckOutcome,
    TokenInput,
    TurnEnd,
    TurnRequest,
)
from session_server.core.turn_report import TurnListener
from session_server.sessions.answer import Answer
from session_server.sessions.prompt import Prompt
from session_server.sessions.store.writer import Beside


class TurnPhase(enum.Enum):
    """Define the phases of a turn: CHECKING -> WAITING -> PREPARING -> RUNNING -> ENDING -> ENDED;
    each may also change directly to ENDED.

    CHECKING: its grammar may still be refused. PREPARING: the input is being tokenized. ENDING: the
    server has decided the outcome (a stop string, a cancel) and waits for the engine's terminal
    event.
    """

    CHECKING = enum.auto()
    WAITING = enum.auto()
    PREPARING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class StopFound:
    """Record that the answer has all that is wanted: its text completed a stop string, or None
    where a call too many began."""

    stop: str | None


@dataclass(frozen=True, slots=True)
class CancelAccepted:
    """Record an accepted cancel; with `keep_partial` the output processed until then stays."""

    keep_partial: bool
    reason: CancelReason


@dataclass(frozen=True, slots=True)
class BugFound:
    """Record that this server failed in the middle of the turn, of which nothing stays."""


Verdict = StopFound | CancelAccepted | BugFound


@dataclass(frozen=True, slots=True)
class TurnHooks:
    """Hold what a surface does when a turn of its own ends.

    `on_end` is called with the terminal entry once readers are told. `beside` is called before it
    goes to the disk, if it does, and returns what is to be on disk with it; `on_end` follows.
    """

    on_end: Callable[[TurnEnd], None] | None = None
    beside: Callable[[TurnEnd], Beside | None] | None = None


@dataclass(slots=True, eq=False)
class TurnCourse:
    """Follow a turn for those who watch it: where it comes from, when it came to each stage
    (`TurnReport` has them), and what is called at its end."""

    asked_s: float
    origin: Origin | None = None
    checked_s: float | None = None
    begun_s: float | None = None
    sent_s: float | None = None
    first_token_s: float | None = None
    num_retractions: int = 0
    received_s: float = field(init=False)
    hooks: TurnHooks = TurnHooks()

    def __post_init__(self) -> None:
        self.received_s = self.asked_s
        if self.origin is not None:  # that of a socket goes on to the next message
            self.received_s = min(self.origin.received_s, self.asked_s)


@dataclass(slots=True, eq=False)
class SubmittedTurn:
    """Hold the state of a turn that was sent to the engine. `base_len` is that of `SubmitTurn`."""

    prompt: Prompt
    answer: Answer
    base_len: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    is_started: bool = False
    verdict: Verdict | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SessionTurn:
    """Hold a turn that has not ended. `engine_id` is the id that the engine uses.

    `accepted` resolves to None once the turn is certain to get a terminal entry, or to an error if
    the turn was rejected and leaves no trace. `Quotas` counts `held_bytes` as the turn's own and
    `reserved_bytes` as growth of the conversation.
    """

    request: TurnRequest
    fingerprint: bytes
    item_id: str
    accepted: asyncio.Future[SessionServerError | None]
    course: TurnCourse
    engine_id: TurnId = field(default_factory=new_turn_id)
    phase: TurnPhase = TurnPhase.WAITING
    created_seq: int = 0
    is_charged: bool = False
    held_bytes: int = 0
    reserved_bytes: int = 0
    submitted: SubmittedTurn | None = None

    @property
    def is_accepted(self) -> bool:
        """Return whether `TurnCreated` was written."""
        return self.created_seq > 0

    async def refusal(self) -> SessionServerError | None:
        """Return why the turn was rejected; None once it is accepted.

        Canceling the caller does not cancel the turn. A caller that is canceled while it is told of
        a rejection is told all the same: no end follows, with which it could give back what it took
        for the turn.
        """
        try:
            return await asyncio.shield(self.accepted)
        except asyncio.CancelledError:
            error = self.accepted.result() if self.accepted.done() else None
            if error is None:
                raise
            return error


@dataclass(slots=True)
class TurnCounts:
    """Count the live turns of all sessions, and the turns that wait for one of these or for an
    engine. `checks`: the grammars that were checked, by outcome; `ended`: accepted turns, by
    status. `on_ended` is told of every turn that has ended."""

    live: int = 0
    queued: int = 0
    checks: Counter[CheckOutcome] = field(default_factory=Counter)
    on_ended: TurnListener | None = None
    ended: Counter[str] = field(default_factory=Counter)


def with_allowed_priority(request: TurnRequest, owner: Owner) -> TurnRequest:
    """Return the request with its priority lowered to what its owner may ask for."""
    if request.priority <= owner.max_priority:
        return request
    return replace(request, priority=owner.max_priority)


def fingerprint(request: TurnRequest) -> bytes:
    """Return a digest that is equal for equal requests, kept instead of a body that may be large.

    `on_disconnect` is left out: it depends on the surface that the request came through.
    """
    ids: Sequence[int] = ()
    if isinstance(request.input, TokenInput):
        # As numbers: to write many ids as text would hold up the event loop.
        ids, request = request.input.token_ids, replace(request, input=TokenInput(()))
    return digest_of(replace(request, on_disconnect="detach"), ids)


def digest_of(request: object, ids: Sequence[int] = ()) -> bytes:
    """Return a digest that is equal for equal dataclasses and equal `ids`."""
    canonical = repr(request).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(canonical + array("q", ids).tobytes(), digest_size=16).digest()


def check_same_request(known: bytes, digest: bytes) -> None:
    """Reject a turn id that was used with another request. Raises TurnConflict."""
    if known != digest:
        raise TurnConflict("the turn id was used with another request", param="turn_id")
