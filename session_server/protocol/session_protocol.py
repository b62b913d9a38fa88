"""Run `kvsession.v1` without a socket: frames to requests, journal entries to frames.

One `SessionProtocol` serves one connection. It never raises because of what the peer sends and
never blocks: an invalid frame is answered with an error frame, and every received frame adds at
most one frame and one request.

```
AWAITING_AUTH --session.auth--> OPENING --on_opened()--> READY --session.close, closed--> CLOSED
```
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, assert_never

import msgspec

from session_server.core.errors import InvalidRequest, SessionServerError
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import (
    SessionClosed,
    SessionEntry,
    TurnDelta,
    TurnEnd,
    TurnRequest,
)
from session_server.protocol.errors import error_body, sanitize, to_invalid_request
from session_server.protocol.frame_queue import MAX_OUTBOX_FRAMES, FrameQueue
from session_server.protocol.frames import (
    CreatedFrame,
    DraftedFrame,
    ErrorFrame,
    OpenedFrame,
    PongFrame,
    ResumeFailedFrame,
    SnapshotFrame,
    coalesce,
    end_frame,
    frame_of,
)
from session_server.protocol.messages import (
    Ack,
    ClientMessage,
    ItemEdit,
    Ping,
    SessionAuth,
    SessionClose,
    SessionCool,
    SessionFork,
    SessionRewind,
    SessionUpdate,
    SessionWarm,
    TurnCancel,
    TurnCreate,
    TurnDraft,
    draft_request,
    turn_request,
)
from session_server.protocol.schema import kind_of
from session_server.protocol.scores import EncodedScores

SUBPROTOCOL: Final = "kvsession.v1"


class CloseCode(enum.IntEnum):
    """Define why a connection ends. 1012 and 1013 invite the client to connect again and resume."""

    UNSUPPORTED_DATA = 1003
    NOT_TEXT = 1007
    POLICY = 1008
    TOO_BIG = 1009
    INTERNAL = 1011
    RESTART = 1012
    OVERLOADED = 1013
    BAD_FIRST_MESSAGE = 4400
    UNAUTHORIZED = 4401
    NO_SUCH_SESSION = 4404
    IDLE = 4408
    SUPERSEDED = 4409
    SESSION_CLOSED = 4410
    LIMITS = 4429


class ProtocolState(enum.Enum):
    """Define the states of a connection."""

    AWAITING_AUTH = "awaiting_auth"
    OPENING = "opening"
    READY = "ready"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class StartTurn:
    """Request to submit this turn."""

    request: TurnRequest


@dataclass(frozen=True, slots=True)
class StartDraft:
    """Request to compute this ahead; None drops the draft."""

    request: TurnRequest | None


ClientRequest = (
    SessionAuth
    | StartTurn
    | StartDraft
    | TurnCancel
    | SessionUpdate
    | SessionRewind
    | SessionFork
    | SessionCool
    | SessionWarm
    | ItemEdit
    | SessionClose
)
"""What a client asks for: its message itself, except that a turn is validated."""


class SessionProtocol(FrameQueue):
    """Hold the protocol state of one connection, and the frames to send on it."""

    def __init__(
        self,
        *,
        defaults: SamplingParams,
        needs_auth: bool = False,
        max_message_bytes: int,
    ) -> None:
        super().__init__()
        self._defaults = defaults
        self._max_message_bytes = max_message_bytes
        self.state = ProtocolState.AWAITING_AUTH if needs_auth else ProtocolState.OPENING
        self.close_code: CloseCode | None = None
        """Set once the connection must end; send the frames of `take_frame` first."""

    def receive_frame(self, frame: str, *, now_s: float) -> ClientRequest | None:
        """Process one text frame; never raises. `now_s`: wall clock, used for `pong` only.

        Returns:
            What the client requests, if anything. `take_frame` returns the frames to send in reply.
        """
        if self.close_code is not None or self.state is ProtocolState.CLOSED:
            return None
        if len(self._outbox) >= MAX_OUTBOX_FRAMES:
            # Each request may queue a reply: stop accepting from a peer that reads none.
            self.close_code = CloseCode.OVERLOADED
            return None
        message = self._decode(frame)
        if self.state is ProtocolState.AWAITING_AUTH:
            return self._first_message(message)
        if message is None:
            return None
        return self._command(message, now_s=now_s)

    def on_authenticated(self) -> None:
        """Change to OPENING, after the token was accepted."""
        assert self.state is ProtocolState.AWAITING_AUTH, "authenticated once"
        self.state = ProtocolState.OPENING

    def on_opened(self, hello: OpenedFrame) -> None:
        """Change to READY, after the session was attached, and queue the hello."""
        assert self.state is ProtocolState.OPENING, "opened once, after authentication"
        self.state = ProtocolState.READY
        self._send(hello)

    def on_resume_failed(self, reason: ResumeFailedFrame, snapshot: SnapshotFrame | None) -> None:
        """Queue the reason why missed entries are lost, and the whole state if the session is
        open."""
        self._send(reason)
        if snapshot is not None:
            self._send(snapshot)

    def send_entries(
        self,
        entries: Iterable[tuple[int, SessionEntry]],
        *,
        scores: Mapping[int, EncodedScores] = MappingProxyType({}),
    ) -> None:
        """Queue the frames of journal entries, adjacent deltas merged.

        `scores`: the logprobs of turns' ends that are already encoded, by sequence number.
        """
        for seq, entry in coalesce(entries):
            self._send(frame_of(seq, entry, scores=scores.get(seq)))
            if isinstance(entry, SessionClosed):
                self.state = ProtocolState.CLOSED
                is_restart = entry.reason == "draining"
                self.close_code = CloseCode.RESTART if is_restart else CloseCode.SESSION_CLOSED

    def send_delta(self, seq: int, delta: TurnDelta) -> None:
        """Queue the frame of one journal entry that is a delta."""
        self._send(frame_of(seq, delta))

    def send_repeat(
        self,
        turn_id: str,
        *,
        position: int,
        end: TurnEnd | None,
        scores: EncodedScores | None = None,
    ) -> None:
        """Queue the answer to a turn submitted twice: `turn.created`, or its end if it has
        ended."""
        if end is None:
            self._send(CreatedFrame(turn_id=turn_id, position=position))
        else:
            self._send(end_frame(None, end, scores=scores))

    def send_drafted(self, draft_id: str, *, processed: int, kept: int, total: int) -> None:
        """Queue the answer to a draft."""
        frame = DraftedFrame(draft_id=draft_id, processed=processed, kept=kept, total=total)
        self._send(frame)

    def send_error(self, error: SessionServerError, *, turn_id: str | None = None) -> None:
        """Queue an error frame; the connection stays open."""
        body = error_body(error, turn_id=turn_id)
        self._note_refusal(body.code)
        self._send(ErrorFrame(error=body))

    def _decode(self, frame: str) -> ClientMessage | None:
        # A character takes at least one byte: reject a frame of too many before decoding it.
        if len(frame) > self._max_message_bytes:
            self.send_error(InvalidRequest("The message is too big."))
            return None
        try:
            message: ClientMessage = msgspec.json.decode(frame, type=ClientMessage)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            wrong = to_invalid_request(error, kind_of(ClientMessage, frame))
            self.send_error(wrong, turn_id=_turn_id_in(frame))
            return None
        return message

    def _first_message(self, message: ClientMessage | None) -> ClientRequest | None:
        if isinstance(message, SessionAuth):
            return message
        if message is not None:
            self.send_error(InvalidRequest("The first message must be session.auth.", param="type"))
        self.close_code = CloseCode.BAD_FIRST_MESSAGE
        return None

    def _command(self, message: ClientMessage, *, now_s: float) -> ClientRequest | None:
        match message:
            case TurnCreate():
                return self._start_turn(message)
            case TurnDraft():
                return self._start_draft(message)
            case (
                TurnCancel()
                | SessionUpdate()
                | SessionRewind()
                | SessionFork()
                | SessionCool()
                | SessionWarm()
                | ItemEdit()
                | SessionClose()
            ):
                return message
            case Ping():
                self._send(PongFrame(t=message.t, server_time=now_s))
            case SessionAuth() | Ack():
                # Harmless: the connection was authenticated before, or needs no key.
                pass
            case _:
                assert_never(message)
        return None

    def _start_turn(self, message: TurnCreate) -> ClientRequest | None:
        try:
            request = turn_request(message, defaults=self._defaults, on_disconnect="detach")
        except InvalidRequest as error:
            self.send_error(error, turn_id=message.turn_id)
            return None
        return StartTurn(request)

    def _start_draft(self, message: TurnDraft) -> ClientRequest | None:
        try:
            return StartDraft(draft_request(message, defaults=self._defaults))
        except InvalidRequest as error:
            self.send_error(error, turn_id=message.draft_id)
            return None


class _IdsOnly(msgspec.Struct):
    turn_id: str | None = None
    draft_id: str | None = None


def _turn_id_in(frame: str) -> str | None:
    """Return the turn id of a rejected frame, or that of its draft, if it can be read."""
    try:
        ids = msgspec.json.decode(frame, type=_IdsOnly)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    turn_id = ids.turn_id or ids.draft_id
    return sanitize(turn_id)[:128] if turn_id else None
