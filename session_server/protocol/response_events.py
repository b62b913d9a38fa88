"""Build the events of a response from the entries of its turn, for a stream and a WebSocket alike.

Events count up from 0. Each of the answer's deltas makes events of its own, so that a reader that
comes back counts as the first one did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, assert_never

import msgspec
from msgspec import structs

from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import (
    ToolCall,
    ToolCallDelta,
    TurnDelta,
    TurnEnd,
)
from session_server.protocol.chat_answer import LEAST_LOGPROB
from session_server.protocol.cumulative_answer import TokenText
from session_server.protocol.response_body import ResponseBody, item_status
from session_server.protocol.response_items import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    call_item,
)

_ENDS: Final = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",  # there is no event of its own
    "failed": "response.failed",
}


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a response; each type has some of the fields."""

    type: str
    sequence_number: int
    response: ResponseBody | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    item: OutputItem | msgspec.UnsetType = msgspec.UNSET
    part: OutputText | ReasoningText | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: Any = msgspec.UNSET
    stream_id: str | msgspec.UnsetType = msgspec.UNSET


class ResponseEvents:
    """Build the events of one response.

    `body`: the response as it begins. `stream_id`: the lane of a WebSocket.
    """

    def __init__(self, body: ResponseBody, *, stream_id: str | None = None) -> None:
        self._body = body
        self._stream_id = msgspec.UNSET if stream_id is None else stream_id
        self._num_events = 0
        self._output: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._pieces: list[str] = []
        self._num_chars = 0
        self._num_thought = 0
        self._call_lengths: list[int] = []

    @property
    def num_events(self) -> int:
        """Return the number of events built so far: that of the next."""
        return self._num_events

    def opening(self) -> Iterator[ResponseEvent]:
        """Yield the first events."""
        yield self._event("response.created", response=self._body)
        yield self._event("response.in_progress", response=self._body)

    def add(self, delta: TurnDelta, *, logprobs: Any = ()) -> Iterator[ResponseEvent]:
        """Yield the events of a piece of the answer. `logprobs`: of its tokens, as bodies."""
        if delta.reasoning:
            yield from self._think(delta.reasoning)
        if delta.text:
            yield from self._say(delta.text, logprobs)
        for piece in delta.tool_calls:
            yield from self._call(piece)

    def closing(self, end: TurnEnd, *, ended_s: int, logprobs: Any = ()) -> Iterator[ResponseEvent]:
        """Yield what was not said yet, and the last events. `ended_s`: wall-clock seconds.
        `logprobs`: of the whole answer."""
        yield from self.add(self._unsaid(end))
        status = item_status(end)
        is_silent = not self._output and self._open is None
        if is_silent and status == "completed" and end.outcome.usage.output_tokens:
            yield from self._open_message()  # an answer that says nothing is an empty text
        yield from self._close_open(status, logprobs=logprobs)
        body = self._body.ended(end, now_s=ended_s, output=tuple(self._output))
        yield self._event(_ENDS[body.status], response=body)

    def replay(self, body: ResponseBody) -> Iterator[ResponseEvent]:
        """Yield the events of a response that has ended, from what is kept of it."""
        yield from self.opening()
        for item in body.output:
            yield from self._whole(item)
        yield self.last(body)

    def last(self, body: ResponseBody, *, after: int = -1) -> ResponseEvent:
        """Return the last event, which comes after number `after`."""
        self._num_events = max(self._num_events, after + 1)
        return self._event(_ENDS[body.status], response=body)

    def _whole(self, item: OutputItem) -> Iterator[ResponseEvent]:
        match item:
            case MessageItem():
                yield from self._say("".join(part.text for part in item.content), ())
            case ReasoningItem():
                yield from self._think("".join(part.text for part in item.content))
            case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
                index = len(self._call_lengths)
                yield from self._call(ToolCallDelta(index, arguments, id=call_id, name=name))
            case _:
                assert_never(item)
        yield from self._close_open(item.status)

    def _unsaid(self, end: TurnEnd) -> TurnDelta:
        """Return what of the answer no event holds, for a reader that missed deltas."""
        outcome, known = end.outcome, len(self._call_lengths)
        pieces = []
        for index, call in enumerate(outcome.tool_calls):
            missing = call.arguments[self._call_lengths[index] if index < known else 0 :]
            if missing or index >= known:
                pieces.append(ToolCallDelta(index, missing, id=call.id, name=call.name))
        return TurnDelta(
            turn_id=end.turn_id,
            item_id=outcome.item_id,
            text=outcome.text[self._num_chars :],
            token_ids=(),
            reasoning=outcome.reasoning[self._num_thought :],
            tool_calls=tuple(pieces),
        )

    def _say(self, text: str, logprobs: Any) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, MessageItem):
            yield from self._open_message()
        self._num_chars += len(text)
        self._pieces.append(text)
        yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _open_message(self) -> Iterator[ResponseEvent]:
        number = f"_{self._num_chars}" if self._num_chars else ""
        item = MessageItem(
            id=f"msg_{self._body.suffix}{number}",
            role="assistant",
            status="in_progress",
            content=(),
        )
        yield from self._open_item(item)
        yield self._part_event("response.content_part.added", part=OutputText(text=""))

    def _think(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, ReasoningItem):
            number = f"_{self._num_thought}" if self._num_thought else ""
            name = f"rs_{self._body.suffix}{number}"
            yield from self._open_item(ReasoningItem(id=name, status="in_progress", content=()))
            yield self._part_event("response.content_part.added", part=ReasoningText(text=""))
        self._num_thought += len(text)
        self._pieces.append(text)
        yield self._part_event("response.reasoning_text.delta", delta=text)

    def _call(self, piece: ToolCallDelta) -> Iterator[ResponseEvent]:
        if piece.index >= len(self._call_lengths):
            self._call_lengths.append(0)
            call = ToolCall(piece.id, piece.name, "")
            item = call_item(call, self._body.suffix, piece.index, status="in_progress")
            yield from self._open_item(item)
        if piece.arguments:
            self._call_lengths[piece.index] += len(piece.arguments)
            self._pieces.append(piece.arguments)
            yield self._item_event("response.function_call_arguments.delta", delta=piece.arguments)

    def _open_item(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self._close_open("completed")
        self._open = item
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _close_open(self, status: ItemStatus, *, logprobs: Any = ()) -> Iterator[ResponseEvent]:
        """Yield the events that end the open item, if there is one."""
        if self._open is None:
            return
        said = "".join(self._pieces)
        match self._open:
            case MessageItem():
                part = OutputText(text=said, logprobs=logprobs)
                yield self._part_event("response.output_text.done", text=said, logprobs=logprobs)
                yield self._part_event("response.content_part.done", part=part)
                item: OutputItem = structs.replace(self._open, status=status, content=(part,))
            case ReasoningItem():
                thought = ReasoningText(text=said)
                yield self._part_event("response.reasoning_text.done", text=said)
                yield self._part_event("response.content_part.done", part=thought)
                item = structs.replace(self._open, status=status, content=(thought,))
            case FunctionCallItem(name=name):
                kind = "response.function_call_arguments.done"
                yield self._item_event(kind, name=name, arguments=said)
                item = structs.replace(self._open, status=status, arguments=said)
            case _:
                assert_never(self._open)
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        self._pieces.clear()

    def _part_event(self, kind: str, **fields: Any) -> ResponseEvent:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> ResponseEvent:
        assert self._open is not None, "about the open item"
        return self._event(kind, item_id=self._open.id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        number = self._num_events
        self._num_events += 1
        return ResponseEvent(type=kind, sequence_number=number, stream_id=self._stream_id, **fields)


def score_body(value: TokenLogprob, token_text: TokenText) -> dict[str, Any]:
    """Return the wire form of one token's logprob."""
    top = [_token(token_text(token_id), logprob) for token_id, logprob in value.top]
    logprob = LEAST_LOGPROB if value.logprob is None else value.logprob
    return {**_token(token_text(value.token_id), logprob), "top_logprobs": top}


def _token(text: str, logprob: float) -> dict[str, Any]:
    # A token may be a piece of a character: its bytes are then not those of its text.
    encoded = [] if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": encoded}
