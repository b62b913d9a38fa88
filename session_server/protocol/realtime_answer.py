"""Tell one response of a Realtime conversation, event by event, again after a lost connection."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Literal

from msgspec import structs

from session_server.core.session_events import (
    ToolCallDelta,
    TurnCancelled,
    TurnCompleted,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
)
from session_server.protocol.frames import failure_body
from session_server.protocol.realtime_conversation import UNTOLD, RealtimeConversation, text_bytes
from session_server.protocol.realtime_frames import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    RealtimeCall,
    RealtimeFailure,
    RealtimeMessage,
    RealtimePart,
    RealtimeResponseBody,
    RealtimeResponseCreated,
    RealtimeResponseDone,
    RealtimeStatusDetails,
    ResponseStatus,
    realtime_usage,
)
from session_server.protocol.realtime_outbox import EventMark, RealtimeOutbox
from session_server.protocol.told import Told

NOTHING_SEEN: Final = EventMark()

_Event = tuple[type[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """Describe a response as it was asked for.

    `event_id`: of the client's event. `conversation_id`: None for one that becomes no item.
    `item_id`: of its first item; those of others begin with it.
    """

    response_id: str
    event_id: str | None
    conversation_id: str | None
    item_id: str
    max_output_tokens: int | Literal["inf"]
    metadata: dict[str, str] | None


@dataclass(slots=True)
class _Output:
    """Hold one item of an answer, a text or a call. `pieces`: of its text or arguments, until it is
    as it stays. `opened` and `closed` are the numbers of the first events that told of its
    beginning and its end."""

    index: int
    item: RealtimeMessage | RealtimeCall
    pieces: list[str] = field(default_factory=list)
    opened: int = UNTOLD
    closed: int = UNTOLD

    @property
    def is_open(self) -> bool:
        return self.closed == UNTOLD

    @property
    def said(self) -> str:
        """Return its text, or its arguments."""
        if self.is_open:
            return "".join(self.pieces)
        return self.item.text if isinstance(self.item, RealtimeMessage) else self.item.arguments

    def finished(self, said: str, *, is_complete: bool) -> RealtimeMessage | RealtimeCall:
        """Return the item as it stays."""
        status: Literal["completed", "incomplete"] = "completed" if is_complete else "incomplete"
        if isinstance(self.item, RealtimeCall):
            return structs.replace(self.item, status=status, arguments=said)
        content = (RealtimePart(type="output_text", text=said),)
        return structs.replace(self.item, status=status, content=content)

    def begun(self) -> RealtimeMessage | RealtimeCall:
        """Return the item as it was when it began."""
        if isinstance(self.item, RealtimeCall):
            return structs.replace(self.item, status="in_progress", arguments="")
        return structs.replace(self.item, status="in_progress", content=())


class RealtimeAnswer:
    """Hold what a response has said so far. `conversation` None: it becomes no item there."""

    def __init__(
        self,
        asked: AskedResponse,
        outbox: RealtimeOutbox,
        conversation: RealtimeConversation | None,
    ) -> None:
        self.asked = asked
        self._outbox = outbox
        self._conversation = conversation
        self._outputs: list[_Output] = []
        self._told = Told()
        self._has_gap = False
        self._created = UNTOLD
        self._done: RealtimeResponseBody | None = None
        self._done_told = UNTOLD
        self.num_bytes = 0
        self.is_cancelled = False
        self.after_id: str | None = None
        """The last item that it answers, and then the last of its own."""

    @property
    def is_created(self) -> bool:
        """Return whether the response was accepted."""
        return self._created != UNTOLD

    @property
    def item_ids(self) -> tuple[str, ...]:
        """Return the ids of its items."""
        return tuple(output.item.id for output in self._outputs)

    def begin(self) -> None:
        """Tell that the response was accepted."""
        body = self._body("in_progress")
        self._created = self._outbox.emit(RealtimeResponseCreated, response=body)

    def add(self, delta: TurnDelta) -> None:
        """Tell a piece of the answer."""
        if self._has_gap:
            delta = structs.replace(delta, tool_calls=())  # told at the end
        self._told.note(delta)
        if delta.text:
            output = self._outputs[-1] if self._outputs else None
            if output is None or not output.is_open or isinstance(output.item, RealtimeCall):
                output = self._open_text()
            self._say(output, delta.text)
        for piece in delta.tool_calls:
            output = self._open_call(piece) if piece.id else self._outputs[-1]
            if piece.arguments:
                self._say(output, piece.arguments)

    def catch_up(self, text: str) -> None:
        """Tell what is new in the whole text so far, where pieces are lost."""
        self._has_gap = True
        num_chars = sum(
            len(output.said) for output in self._outputs if isinstance(output.item, RealtimeMessage)
        )
        self.add(TurnDelta(self.asked.response_id, "", text[num_chars:], ()))

    def end(self, end: TurnEnd) -> None:
        """Tell the end. An answer that leaves nothing in the history is no item either."""
        is_kept = not isinstance(end, TurnFailedEntry)
        if isinstance(end, TurnCancelled):
            is_kept = end.kept_partial
        self._has_gap = False
        if is_kept:
            self.add(self._told.unsent(end))
        if not self._outputs and isinstance(end, TurnCompleted):
            self._open_text()
        self._close(is_complete=isinstance(end, TurnCompleted) and end.reason == "stop")
        self.num_bytes = 0
        status, details = _status_of(end)
        usage = realtime_usage(end.outcome.usage)
        self._done = self._body(status, status_details=details, usage=usage)
        self._tell_done()
        if not is_kept and self._conversation is not None:
            for output in self._outputs:
                self._conversation.remove(output.item.id)
                self._outbox.emit(ItemDeleted, item_id=output.item.id)
            self._outputs = []

    def replay(self, seen: EventMark) -> None:
        """Tell again what a client has not seen."""
        begins = [output.opened for output in self._outputs]
        num_seen = seen.num_chars if begins and begins[0] <= seen.number else 0
        self._set_told(num_seen)
        if self._created > seen.number:
            self.begin()
        start = 0
        for output in self._outputs:
            self._tell_opening(output, seen)
            said = output.said
            if output.closed > seen.number and (new := said[max(0, num_seen - start) :]):
                self._tell_delta(output, new)
            if not output.is_open:
                self._tell_closing(output, seen)
            start += len(said)
        if self._done is not None and self._done_told > seen.number:
            self._tell_done()

    def is_told(self, seen: EventMark) -> bool:
        """Return whether a client has seen the end."""
        return self._done_told <= seen.number

    # -- the parts of an answer

    def _open_text(self) -> _Output:
        item_id = self._next_item_id()
        return self._open(RealtimeMessage(id=item_id, role="assistant", content=()))

    def _open_call(self, piece: ToolCallDelta) -> _Output:
        item_id = self._next_item_id()
        return self._open(RealtimeCall(id=item_id, call_id=piece.id, name=piece.name, arguments=""))

    def _next_item_id(self) -> str:
        """Return an id that no item has: a client may have given its own the one that is due."""
        item_id, conversation = self.asked.item_id, self._conversation
        for number in count(len(self._outputs)):
            made = f"{item_id}_{number}" if number else item_id
            if conversation is None or conversation.find(made) is None:
                return made
        raise AssertionError("numbers do not end")

    def _open(self, item: RealtimeMessage | RealtimeCall) -> _Output:
        """Begin an item, which ends the one before."""
        self._close(is_complete=True)
        output = _Output(len(self._outputs), structs.replace(item, status="in_progress"))
        self._outputs.append(output)
        if self._conversation is not None:
            if self.after_id is not None and self._conversation.find(self.after_id) is None:
                self.after_id = self._conversation.last_id
            self._conversation.insert(output.item, after_id=self.after_id)
            self.after_id = item.id
        self._tell_opening(output)
        return output

    def _say(self, output: _Output, text: str) -> None:
        output.pieces.append(text)
        self.num_bytes += text_bytes(text)
        self._tell_delta(output, text)

    def _close(self, *, is_complete: bool) -> None:
        """End the last item, if it has not ended."""
        if not self._outputs or not self._outputs[-1].is_open:
            return
        output = self._outputs[-1]
        output.item = output.finished(output.said, is_complete=is_complete)
        output.pieces = []
        if self._conversation is not None:
            self._conversation.replace(output.item)
        self._tell_closing(output)

    def _tell_opening(self, output: _Output, seen: EventMark = NOTHING_SEEN) -> None:
        item = output.begun()
        events: list[_Event] = [(OutputItemAdded, {"item": item}), (ItemAdded, {"item": item})]
        if isinstance(item, RealtimeMessage):
            part = RealtimePart(type="text", text="")
            events.append((ContentPartAdded, {"item_id": item.id, "part": part}))
        output.opened = self._tell(events, output, output.opened, seen)

    def _tell_delta(self, output: _Output, text: str) -> None:
        self._set_told(self._outbox.num_chars + len(text))
        item = output.item
        if isinstance(item, RealtimeCall):
            self._emit(output, ArgumentsDelta, item_id=item.id, call_id=item.call_id, delta=text)
        else:
            self._emit(output, OutputTextDelta, item_id=item.id, delta=text)

    def _tell_closing(self, output: _Output, seen: EventMark = NOTHING_SEEN) -> None:
        item = output.item
        events: list[_Event]
        if isinstance(item, RealtimeCall):
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            events = [(ArgumentsDone, {"item_id": item.id, **call})]
        else:
            part = RealtimePart(type="text", text=item.text)
            events = [
                (OutputTextDone, {"item_id": item.id, "text": item.text}),
                (ContentPartDone, {"item_id": item.id, "part": part}),
            ]
        events += [(OutputItemDone, {"item": item}), (ItemDone, {"item": item})]
        output.closed = self._tell(events, output, output.closed, seen)
        if self._conversation is not None:
            self._conversation.note_told(item.id, output.closed + len(events) - 1)

    def _tell(self, events: list[_Event], output: _Output, first: int, seen: EventMark) -> int:
        """Send events that follow each other, but for those that a client has seen. Return the
        number of the first, which was `first` when they were sent before."""
        if self._conversation is None:
            events = [event for event in events if event[0] not in (ItemAdded, ItemDone)]
        num_seen = 0 if first == UNTOLD else max(0, seen.number - first + 1)
        for index, (kind, fields) in enumerate(events[num_seen:], num_seen):
            if kind in (ItemAdded, ItemDone):
                assert self._conversation is not None, "left out without one"
                previous_id = self._conversation.previous_id(fields["item"].id)
                number = self._outbox.emit(kind, previous_item_id=previous_id, **fields)
            else:
                number = self._emit(output, kind, **fields)
            first = number - index
        return first

    def _tell_done(self) -> None:
        assert self._done is not None, "told at its end"
        self._set_told(0)
        self._done_told = self._outbox.emit(RealtimeResponseDone, response=self._done)

    def _emit(self, output: _Output, kind: type[Any], **fields: Any) -> int:
        response_id = self.asked.response_id
        return self._outbox.emit(kind, response_id=response_id, output_index=output.index, **fields)

    def _set_told(self, num_chars: int) -> None:
        if self._conversation is not None:
            self._outbox.num_chars = num_chars

    def _body(self, status: ResponseStatus, **fields: Any) -> RealtimeResponseBody:
        items = () if status == "in_progress" else tuple(each.item for each in self._outputs)
        return RealtimeResponseBody(
            id=self.asked.response_id,
            status=status,
            conversation_id=self.asked.conversation_id,
            max_output_tokens=self.asked.max_output_tokens,
            metadata=self.asked.metadata,
            output=items,
            **fields,
        )


def _status_of(end: TurnEnd) -> tuple[ResponseStatus, RealtimeStatusDetails | None]:
    match end:
        case TurnCompleted(reason="stop"):
            return "completed", None
        case TurnCompleted():
            details = RealtimeStatusDetails(type="incomplete", reason="max_output_tokens")
            return "incomplete", details
        case TurnCancelled(reason="client_cancelled"):
            return "cancelled", RealtimeStatusDetails(type="cancelled", reason="client_cancelled")
        case TurnCancelled():
            return "cancelled", RealtimeStatusDetails(type="cancelled")
        case TurnFailedEntry():
            body = failure_body(end)
            error = RealtimeFailure(type=body.type, code=body.code, message=body.message)
            return "failed", RealtimeStatusDetails(type="failed", error=error)
