"""Start, cancel and tell the responses of a Realtime conversation.

One response at a time answers the conversation. One that is asked for behind a cancel waits until
the canceled one has been told to its end. Responses that become no item run beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from session_server.core.errors import SessionServerError, wire_error
from session_server.core.session_events import (
    Outcome,
    SessionEntry,
    TokenUsage,
    TurnCancelled,
    TurnCompleted,
    TurnCreated,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
    TurnRequest,
)
from session_server.protocol.realtime_answer import AskedResponse, RealtimeAnswer
from session_server.protocol.realtime_conversation import RealtimeConversation
from session_server.protocol.realtime_frames import RateLimitsUpdated, RealtimeRateLimit
from session_server.protocol.realtime_outbox import EventMark, RealtimeOutbox, RealtimeRefusal

MAX_ASIDES: Final = 4
"""Responses beside the one that the conversation waits for."""

MAX_WAITING_RESPONSES: Final = 16
"""Responses that wait behind one that is canceled."""


@dataclass(frozen=True, slots=True)
class StartResponse:
    """Request to run a response as a turn; `is_alone`: in a session of its own."""

    response_id: str
    request: TurnRequest
    is_alone: bool


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """Request to end a response early."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """Hold a response that may have to wait. `make` builds its turn from the conversation as it is
    when it starts, or raises RealtimeRefusal; `num_bytes`: of what it holds until then."""

    asked: AskedResponse
    make: Callable[[], TurnRequest]
    is_alone: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DraftNextInput:
    """Request to compute a turn ahead that may come; None drops what was. `event_id`: of the
    client's event that asked for it. `version`: another number whenever messages before the last
    are others."""

    request: TurnRequest | None
    event_id: str | None
    version: int


ReadRates = Callable[[], tuple[RealtimeRateLimit, ...]]
"""Returns what is left of the rates of whoever asks; nothing where there are none."""

RealtimeCommand = StartResponse | CancelResponse | DraftNextInput


class RealtimeResponses:
    """Hold the responses of a conversation that have not ended, and the last that has."""

    def __init__(
        self, outbox: RealtimeOutbox, conversation: RealtimeConversation, rates: ReadRates
    ) -> None:
        self._outbox = outbox
        self._read_rates = rates
        self._conversation = conversation
        self._commands: list[RealtimeCommand] = []
        self._active: RealtimeAnswer | None = None
        self._waiting: list[tuple[RealtimeAnswer, PreparedResponse]] = []
        self._asides: dict[str, RealtimeAnswer] = {}
        self._last: RealtimeAnswer | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of answers so far, and of responses that wait."""
        running = [*self._asides.values(), *([self._active] if self._active else [])]
        num_bytes = sum(answer.num_bytes for answer in running)
        return num_bytes + sum(prepared.num_bytes for _, prepared in self._waiting)

    def take_command(self) -> RealtimeCommand | None:
        """Remove and return the next thing to do; None if there is nothing."""
        return self._commands.pop(0) if self._commands else None

    def is_open_item(self, item_id: str) -> bool:
        """Return whether an item is an answer that has not ended."""
        return self._active is not None and item_id in self._active.item_ids

    def check_room(self, *, is_aside: bool) -> None:
        """Refuse a response that can neither run nor wait. Raises RealtimeRefusal."""
        if is_aside:
            if len(self._asides) >= MAX_ASIDES:
                raise RealtimeRefusal(
                    "too_many_responses", f"{MAX_ASIDES} responses run beside the conversation."
                )
            return
        newest = self._waiting[-1][0] if self._waiting else self._active
        if newest is None:
            return
        if not newest.is_cancelled or len(self._waiting) >= MAX_WAITING_RESPONSES:
            raise RealtimeRefusal(
                "conversation_already_has_active_response",
                "Conversation already has an active response in progress: "
                f"{newest.asked.response_id}. Wait until the response is finished before creating "
                "a new one.",
            )

    def start(self, prepared: PreparedResponse) -> None:
        """Run a response that `check_room` allows, or let it wait. Raises RealtimeRefusal."""
        is_aside = prepared.asked.conversation_id is None
        conversation = None if is_aside else self._conversation
        answer = RealtimeAnswer(prepared.asked, self._outbox, conversation)
        if not is_aside and self._active is not None:
            self._waiting.append((answer, prepared))
        else:
            self._launch(answer, prepared)

    def _launch(self, answer: RealtimeAnswer, prepared: PreparedResponse) -> None:
        response_id = answer.asked.response_id
        request = prepared.make()
        if answer.asked.conversation_id is None:
            self._asides[response_id] = answer
        else:
            self._active, answer.after_id = answer, self._conversation.last_id
        self._commands.append(StartResponse(response_id, request, prepared.is_alone))

    def cancel(self, response_id: str | None) -> None:
        """End a response early: of this id, or the newest that the conversation waits for.

        Raises:
            RealtimeRefusal: there is none.
        """
        in_line = [answer for answer, _ in reversed(self._waiting)]
        if self._active is not None:
            in_line.append(self._active)
        found = in_line[0] if response_id is None and in_line else None
        if response_id is not None:
            named = (*in_line, *self._asides.values())
            found = next((each for each in named if each.asked.response_id == response_id), None)
        if found is None:
            raise RealtimeRefusal(
                "response_cancel_not_active", "Cancellation failed: no active response found"
            )
        is_running = found is self._active or found.asked.response_id in self._asides
        if is_running and not found.is_cancelled:
            self._commands.append(CancelResponse(found.asked.response_id))
        found.is_cancelled = True

    def on_refused(self, response_id: str, error: SessionServerError) -> None:
        """Tell that a response could not start."""
        answer = self._find(response_id)
        if answer is not None:
            self._outbox.refuse(error, answer.asked.event_id)
            self._forget(answer)

    def on_lost(self, response_id: str, error: SessionServerError) -> None:
        """Tell that nobody knows any more how a response has ended."""
        code, nothing = wire_error(error).code, Outcome("", "", (), TokenUsage(), None)
        self._end(TurnFailedEntry(response_id, code, error.message, True, nothing))

    def forget_asides(self) -> None:
        """Forget the responses beside the conversation, because their connection has ended."""
        self._commands = [
            each
            for each in self._commands
            if isinstance(each, DraftNextInput) or each.response_id not in self._asides
        ]
        self._asides.clear()

    def is_open(self, response_id: str) -> bool:
        """Return whether a response has started and not ended."""
        return self._find(response_id) is not None

    def add(self, entry: SessionEntry) -> None:
        """Tell what has happened to a response; nothing for other turns."""
        match entry:
            case TurnCreated(turn_id=turn_id):
                if answer := self._find(turn_id):
                    answer.begin()
                    if rates := self._read_rates():
                        self._outbox.emit(RateLimitsUpdated, rate_limits=rates)
            case TurnDelta(turn_id=turn_id):
                if answer := self._find(turn_id):
                    answer.add(entry)
            case TurnCompleted() | TurnCancelled() | TurnFailedEntry():
                self._end(entry)
            case _:
                pass

    def catch_up(self, response_id: str, text: str, end: TurnEnd | None) -> None:
        """Tell what entries that are lost have said of a response: its text so far, and its end."""
        answer = self._find(response_id)
        if answer is None:
            return
        if not answer.is_created:
            answer.begin()
        if end is None:
            answer.catch_up(text)
        else:
            self._end(end)

    @property
    def active_id(self) -> str | None:
        """Return the id of the response that the conversation waits for."""
        return None if self._active is None else self._active.asked.response_id

    def replayed(self, seen: EventMark) -> Iterator[RealtimeAnswer]:
        """Yield those of the last two responses in the conversation of which a client has not seen
        all."""
        if self._last is not None and not self._is_history(self._last, seen):
            yield self._last
        if self._active is not None and self._active.is_created:
            yield self._active

    def _is_history(self, answer: RealtimeAnswer, seen: EventMark) -> bool:
        """Return whether a client does not wait for the end of an answer."""
        return seen.number < 0 or answer.is_told(seen)

    def _find(self, response_id: str) -> RealtimeAnswer | None:
        if self._active is not None and self._active.asked.response_id == response_id:
            return self._active
        return self._asides.get(response_id)

    def _end(self, end: TurnEnd) -> None:
        answer = self._find(end.turn_id)
        if answer is not None:
            if not answer.is_created:
                answer.begin()
            answer.end(end)
            self._forget(answer)

    def _forget(self, answer: RealtimeAnswer) -> None:
        """Forget a response that is over, and start the one that waits behind it."""
        if self._asides.pop(answer.asked.response_id, None) is not None:
            return
        self._last, self._active = answer if answer.is_created else self._last, None
        while self._waiting and self._active is None:
            answer, prepared = self._waiting.pop(0)
            if answer.is_cancelled:
                response_id = answer.asked.response_id
                nothing = Outcome("", "", (), TokenUsage(), None)
                answer.begin()
                answer.end(TurnCancelled(response_id, False, "client_cancelled", nothing))
                self._last = answer
                continue
            try:
                self._launch(answer, prepared)
            except RealtimeRefusal as error:
                self._outbox.refuse(error, answer.asked.event_id)
