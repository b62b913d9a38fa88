"""Run OpenAI's Realtime without a socket: events of the client to commands, journal to events.

A `RealtimeProtocol` is one conversation over one session; connections come and go. It never raises
because of what the peer sends and never blocks. Each response is a turn whose input is the whole
conversation: what the session's history agrees with stays, and the rest is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, Literal, assert_never

import msgspec
from msgspec import UNSET

from session_server.core.errors import InvalidRequest, SessionServerError
from session_server.core.sampling import MAX_OUTPUT_TOKENS, SamplingParams
from session_server.core.session_events import (
    ChatInput,
    ConversationItem,
    Message,
    SessionClosed,
    SessionEntry,
    TurnEnd,
    TurnRequest,
)
from session_server.protocol.errors import to_invalid_request
from session_server.protocol.frames import coalesce
from session_server.protocol.messages import MAX_CONTENT_CHARS
from session_server.protocol.realtime_answer import AskedResponse
from session_server.protocol.realtime_conversation import (
    WIDE_CHAR_BYTES,
    RealtimeConversation,
    item_bytes,
    items_of,
    messages_of,
    text_bytes,
)
from session_server.protocol.realtime_frames import (
    ConversationCreated,
    InputTextDrafted,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemRetrieved,
    RealtimeAnyItem,
    RealtimeCall,
    RealtimeCallOutput,
    RealtimeConversationBody,
    RealtimeMessage,
    RealtimePart,
    RealtimeSessionBody,
    RealtimeSessionCreated,
    RealtimeSessionUpdated,
)
from session_server.protocol.realtime_messages import (
    MAX_ITEMS,
    AudioAppend,
    AudioClear,
    AudioCommit,
    AudioOutputClear,
    CallItemBody,
    CallOutputItemBody,
    InputTextAppend,
    InputTextClear,
    InputTextCommit,
    ItemPartBody,
    ItemReferenceBody,
    MessageItemBody,
    NewItemBody,
    RealtimeClientEvent,
    RealtimeItemCreate,
    RealtimeItemDelete,
    RealtimeItemRetrieve,
    RealtimeItemTruncate,
    RealtimeResponseCancel,
    RealtimeResponseCreate,
    RealtimeSessionUpdate,
    RealtimeSettings,
    ResponseSettingsBody,
    check_modalities,
)
from session_server.protocol.realtime_outbox import RealtimeOutbox, RealtimeRefusal
from session_server.protocol.realtime_responses import (
    DraftNextInput,
    PreparedResponse,
    ReadRates,
    RealtimeCommand,
    RealtimeResponses,
)
from session_server.protocol.session_protocol import CloseCode
from session_server.protocol.tools import tools_written

REALTIME: Final = "realtime"
CONVERSATION_PREFIX: Final = "conv_"

ITEMS_AT_ONCE: Final = 64
"""Items of a session that a conversation takes over in one step."""

CheckRoom = Callable[[int], None]
"""Rejects bytes that the session has no room for. Raises QuotaExceeded, ServerBusy."""


@dataclass(frozen=True, slots=True)
class RealtimeModel:
    """Describe the model that answers. `defaults`: its sampling; `takes_tools`: whether its chat
    template writes tools."""

    name: str
    defaults: SamplingParams
    takes_tools: bool = True


@dataclass(slots=True)
class RealtimeNames:
    """Name the session, and everything else that needs a name."""

    session_id: str
    num_made: int = 0

    def make(self, kind: str) -> str:
        """Return a name that was never made before."""
        self.num_made += 1
        return f"{kind}_{self.session_id[-12:]}_{self.num_made}"

    @property
    def conversation_id(self) -> str:
        """Return the id of the session's one conversation, the key of a later connection."""
        return CONVERSATION_PREFIX + self.session_id


@dataclass(slots=True)
class TypedText:
    """Hold what the user is about to say. `is_due`: it is to be computed ahead, when no response
    runs; `event_id` is that of the client's event that says so."""

    text: str = ""
    event_id: str | None = None
    is_due: bool = False


class RealtimeProtocol:
    """Hold one conversation, and the events to send to its peer.

    `max_message_bytes` bounds one event of the client. `check_room` is asked before anything more
    is kept; `num_bytes` is what is. `read_rates` is asked as a response begins.
    """

    def __init__(
        self,
        names: RealtimeNames,
        *,
        model: RealtimeModel,
        max_message_bytes: int,
        check_room: CheckRoom,
        read_rates: ReadRates = tuple,
    ) -> None:
        self._names = names
        unbounded = msgspec.structs.replace(model.defaults, max_tokens=MAX_OUTPUT_TOKENS)
        self._model = replace(model, defaults=unbounded)
        self._max_message_bytes = max_message_bytes
        self._check_room = check_room
        self._settings = RealtimeSettings()
        self._settings_bytes = 0
        self._conversation = RealtimeConversation()
        self._input = TypedText()
        self.outbox = RealtimeOutbox()
        self.responses = RealtimeResponses(self.outbox, self._conversation, read_rates)
        self.is_resumable = False
        """Whether the session outlives its connection."""
        self.close_code: CloseCode | None = None
        """Set once the connection must end; send what waits first."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of items, settings, answers so far and what is about to be said."""
        typed = text_bytes(self._input.text)
        return (
            typed + self._settings_bytes + self._conversation.num_bytes + self.responses.num_bytes
        )

    def adopt(self, items: Sequence[ConversationItem]) -> Iterator[None]:
        """Take over what was said in the session before, in steps. Raises InvalidRequest,
        QuotaExceeded, ServerBusy."""
        for start in range(0, len(items), ITEMS_AT_ONCE):
            taken = items[start : start + ITEMS_AT_ONCE]
            for made in chain.from_iterable(map(items_of, taken)):
                self._conversation.insert(made, after_id=self._conversation.last_id)
            self._check_room(self.num_bytes)
            yield

    def greet(self, last_event_id: str | None) -> Iterator[None]:
        """Greet a peer, and tell it what is new since an event that it has seen: in steps, between
        which what waits may be sent."""
        seen = self.outbox.mark_of(last_event_id)
        self.outbox.emit(RealtimeSessionCreated, session=self._session_body())
        conversation = RealtimeConversationBody(id=self._names.conversation_id)
        self.outbox.emit(ConversationCreated, conversation=conversation)
        answers = list(self.responses.replayed(seen))
        by_item = {item_id: answer for answer in answers for item_id in answer.item_ids}
        untold = self._conversation.untold_since(seen.number, besides=by_item)
        for previous_id, item, is_added in untold:
            if item.id not in by_item:
                self._tell_item(previous_id, item, is_added=is_added)
            while by_item.get(item.id) in answers:  # what stands behind an answer is told behind it
                answers.pop(0).replay(seen)
            yield
        for answer in answers:
            answer.replay(seen)
        yield

    def receive_frame(self, frame: str) -> None:
        """Process one event of the client; never raises. `responses.take_command` returns what to
        do, the outbox has what to say."""
        if self.close_code is not None:
            return
        event_id: str | None = None
        try:
            if len(frame) > self._max_message_bytes:
                raise InvalidRequest("The event is too big.")
            event_id = _event_id_in(frame)
            self._handle(_decode(frame))
        except (RealtimeRefusal, SessionServerError) as error:
            self.outbox.refuse(error, event_id)

    def take_command(self) -> RealtimeCommand | None:
        """Remove and return the next thing to do; None if there is nothing."""
        command = self.responses.take_command()
        if command is None and self._input.is_due and self.responses.active_id is None:
            self._input.is_due = False
            return self._draft()
        return command

    def add_entries(self, entries: Iterable[tuple[int, SessionEntry]]) -> None:
        """Tell what has happened in the session, or in one that a response has of its own."""
        for _, entry in coalesce(entries):
            self.responses.add(entry)
            if isinstance(entry, TurnEnd) and self._input.text:
                self._input.is_due = True  # it comes behind the answer now

    def on_drafted(self, *, processed: int, kept: int, total: int) -> None:
        """Tell how far what the user is about to say was computed ahead."""
        if self.outbox.has_extensions and total:
            self.outbox.emit(InputTextDrafted, processed=processed, kept=kept, total=total)

    def on_closed(self, entry: SessionClosed) -> None:
        """End the connection: the session is closed."""
        is_restart = entry.reason == "draining"
        if entry.reason == "expired":
            ended = RealtimeRefusal("session_expired", "The session was not used for too long.")
            self.outbox.tell(ended, None)
        self.close_code = CloseCode.RESTART if is_restart else CloseCode.SESSION_CLOSED

    # -- events of the client

    def _handle(self, event: RealtimeClientEvent) -> None:
        match event:
            case RealtimeSessionUpdate():
                self._update(event)
            case RealtimeItemCreate():
                self._create_item(event)
            case RealtimeItemDelete():
                self._delete_item(event)
            case RealtimeItemRetrieve(item_id=item_id):
                found = self._item(item_id, code="item_retrieve_invalid_item_id")
                self.outbox.emit(ItemRetrieved, item=found)
            case RealtimeItemTruncate(item_id=item_id):
                self._item(item_id, code="item_truncate_invalid_item_id")
                raise RealtimeRefusal(
                    "invalid_value", "Only audio can be truncated.", param="item_id"
                )
            case RealtimeResponseCreate():
                self._create_response(event)
            case RealtimeResponseCancel(response_id=response_id):
                self.responses.cancel(response_id)
            case InputTextAppend():
                self._append(event)
            case InputTextClear(event_id=event_id):
                self._input = TypedText(event_id=event_id, is_due=True)
            case InputTextCommit():
                self._commit(event)
            case AudioAppend() | AudioCommit() | AudioClear() | AudioOutputClear():
                raise RealtimeRefusal("invalid_value", "There is no audio here.", param="type")
            case _:
                assert_never(event)

    def _update(self, event: RealtimeSessionUpdate) -> None:
        body = event.session
        check_modalities(body, at="session")
        changed = self._changed_by(body)
        changed.sampling(self._model.defaults)
        num_bytes = WIDE_CHAR_BYTES * len(msgspec.json.encode(changed))
        self._check_room(max(0, num_bytes - self._settings_bytes))
        self._settings, self._settings_bytes = changed, num_bytes
        if event.x_events is not None:
            self.outbox.has_extensions = event.x_events
        if body.resumption is not None:
            self.is_resumable = body.resumption.enabled
        self.outbox.emit(RealtimeSessionUpdated, session=self._session_body())

    def _changed_by(self, body: RealtimeSettings) -> RealtimeSettings:
        settings = self._settings.changed_by(body)
        tools = tools_written(
            settings.tools, settings.tool_choice, takes_tools=self._model.takes_tools
        )
        return msgspec.structs.replace(settings, tools=tools)

    def _create_item(self, event: RealtimeItemCreate) -> None:
        body, previous_id = event.item, event.previous_item_id
        if len(self._conversation) >= MAX_ITEMS:
            raise RealtimeRefusal("invalid_value", f"A conversation has {MAX_ITEMS} items at most.")
        if body.id is not None and self._conversation.find(body.id) is not None:
            raise RealtimeRefusal(
                "invalid_value", f"Item {body.id} is in the conversation.", param="item.id"
            )
        if previous_id is None:
            previous_id = self._conversation.last_id
        elif previous_id == "root":
            previous_id = None
        else:
            self._item(previous_id, code="invalid_value", param="previous_item_id")
        if isinstance(body, CallOutputItemBody) and not self._conversation.has_call(body.call_id):
            raise RealtimeRefusal(
                "invalid_value", f"There is no call {body.call_id}.", param="item.call_id"
            )
        item = self._new_item(body)
        self._check_room(item_bytes(item))
        self._conversation.insert(item, after_id=previous_id)
        self._tell_item(previous_id, item)

    def _delete_item(self, event: RealtimeItemDelete) -> None:
        self._item(event.item_id, code="item_delete_invalid_item_id")
        if self.responses.is_open_item(event.item_id):
            raise RealtimeRefusal(
                "invalid_value", "The item is an answer that has not ended.", param="item_id"
            )
        self._conversation.remove(event.item_id)
        self.outbox.emit(ItemDeleted, item_id=event.item_id)

    def _create_response(self, event: RealtimeResponseCreate) -> None:
        body = event.response or ResponseSettingsBody()
        check_modalities(body, at="response")
        is_aside = body.conversation == "none"
        self.responses.check_room(is_aside=is_aside)
        settings = self._changed_by(body)
        sampling, text = settings.sampling(self._model.defaults)
        given = None if body.input is None else tuple(map(self._given_item, body.input))
        num_bytes = sum(map(item_bytes, given or ()))
        self._check_room(num_bytes)
        response_id = self._new_id("resp")

        def make() -> TurnRequest:
            instructions = settings.instructions or ""
            if given is None:
                messages = self._conversation.messages(instructions)
            else:
                messages = messages_of(given, instructions)
            if not messages:
                raise RealtimeRefusal("invalid_value", "There is nothing to answer.")
            return TurnRequest(
                turn_id=response_id,
                input=ChatInput(messages, is_whole=True, tools=settings.tool_texts),
                sampling=sampling,
                text=text,
                priority=settings.priority or 0,
            )

        asked = AskedResponse(
            response_id=response_id,
            event_id=event.event_id,
            conversation_id=None if is_aside else self._names.conversation_id,
            item_id=self._new_id("item"),
            max_output_tokens=settings.max_output_tokens or "inf",
            metadata=body.metadata,
        )
        is_alone = is_aside or given is not None
        self.responses.start(PreparedResponse(asked, make, is_alone, num_bytes))

    # -- what the user is about to say

    def _append(self, event: InputTextAppend) -> None:
        text = self._input.text + event.text
        if len(text) > MAX_CONTENT_CHARS:
            raise RealtimeRefusal("invalid_value", "The text is too long.", param="text")
        self._check_room(text_bytes(text) - text_bytes(self._input.text))
        self._input = TypedText(text, event_id=event.event_id, is_due=True)

    def _commit(self, event: InputTextCommit) -> None:
        """Make an item of the text. What was computed of it stays for the response."""
        if not self._input.text:
            raise RealtimeRefusal("input_text_commit_empty", "There is no text to commit.")
        part = ItemPartBody(type="input_text", text=self._input.text)
        item = MessageItemBody(id=event.item_id, role="user", content=[part])
        self._create_item(RealtimeItemCreate(item=item))
        self._input = TypedText()

    def _draft(self) -> DraftNextInput:
        settings, typed = self._settings, self._input
        if not typed.text:
            return DraftNextInput(None, typed.event_id, 0)
        before = self._conversation.messages(settings.instructions or "")
        sampling, text = settings.sampling(self._model.defaults)
        messages = (*before, Message("user", typed.text))
        chat = ChatInput(messages, is_whole=True, tools=settings.tool_texts)
        request = TurnRequest(self._names.make("draft"), input=chat, sampling=sampling, text=text)
        return DraftNextInput(request, typed.event_id, self._conversation.version)

    # -- items

    def _item(self, item_id: str, *, code: str, param: str = "item_id") -> RealtimeAnyItem:
        found = self._conversation.find(item_id)
        if found is None:
            raise RealtimeRefusal(code, f"There is no item {item_id}.", param=param)
        return found

    def _given_item(self, body: NewItemBody | ItemReferenceBody) -> RealtimeAnyItem:
        """Return an item that a response is given as its input."""
        if isinstance(body, ItemReferenceBody):
            return self._item(body.id or "", code="invalid_value", param="response.input")
        return self._new_item(body)

    def _new_item(self, body: NewItemBody) -> RealtimeAnyItem:
        item_id = body.id or self._new_id("item")
        match body:
            case CallItemBody(call_id=call_id, name=name, arguments=arguments):
                return RealtimeCall(id=item_id, call_id=call_id, name=name, arguments=arguments)
            case CallOutputItemBody(call_id=call_id, output=output):
                return RealtimeCallOutput(id=item_id, call_id=call_id, output=output)
            case MessageItemBody(role=role):
                kind: Literal["input_text", "output_text"] = "input_text"
                if role == "assistant":
                    kind = "output_text"
                content = tuple(RealtimePart(type=kind, text=part.text) for part in body.content)
                return RealtimeMessage(id=item_id, role=role, content=content)
            case _:
                assert_never(body)

    def _tell_item(
        self, previous_id: str | None, item: RealtimeAnyItem, *, is_added: bool = False
    ) -> None:
        if not is_added:
            self.outbox.emit(ItemAdded, previous_item_id=previous_id, item=item)
        told = self.outbox.emit(ItemDone, previous_item_id=previous_id, item=item)
        self._conversation.note_told(item.id, told)

    def _new_id(self, kind: str) -> str:
        """Return an id that no item has."""
        while self._conversation.find(made := self._names.make(kind)) is not None:
            pass
        return made

    def _session_body(self) -> RealtimeSessionBody:
        settings = self._settings
        extras: dict[str, Any] = {
            name: UNSET if (value := getattr(settings, name)) is None else value
            for name in _SHOWN_EXTRAS
        }
        return RealtimeSessionBody(
            type="realtime",
            object="realtime.session",
            id=self._names.session_id,
            model=self._model.name,
            output_modalities=("text",),
            instructions=settings.instructions or "",
            tools=tuple(settings.tools or ()),
            tool_choice=settings.tool_choice or "auto",
            max_output_tokens=settings.max_output_tokens or "inf",
            truncation="disabled",
            resumption={"enabled": self.is_resumable},
            **extras,
        )


_SHOWN_EXTRAS: Final = tuple(
    field.name for field in msgspec.structs.fields(RealtimeSessionBody) if field.default is UNSET
)


class _EventIdOnly(msgspec.Struct):
    event_id: str | None = None


def _event_id_in(frame: str) -> str | None:
    """Return the id of a client's event, if it can be read."""
    try:
        return msgspec.json.decode(frame, type=_EventIdOnly).event_id
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _decode(frame: str) -> RealtimeClientEvent:
    """Return an event of the client. Raises RealtimeRefusal."""
    try:
        event: RealtimeClientEvent = msgspec.json.decode(frame, type=RealtimeClientEvent)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        wrong = to_invalid_request(error, RealtimeClientEvent)
        code = "invalid_event" if wrong.param in (None, "type") else "invalid_value"
        raise RealtimeRefusal(code, wrong.message, param=wrong.param) from None
    return event
