"""Translate the items of OpenAI's Responses to messages, and messages back to items.

A client sends messages, calls of functions with their outputs, what the model thought before,
compactions, and references to items that the server keeps.
The ids of items that the server names are made of the response's, so that they are the same
whenever a response is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, assert_never, get_args

import msgspec
from msgspec import Meta, structs

from session_server.core.errors import InvalidRequest, ItemNotFound, UnsupportedOperation
from session_server.core.session_events import Message, Role, ToolCall
from session_server.protocol.compaction import decode_window
from session_server.protocol.errors import sanitize
from session_server.protocol.messages import Content

MAX_ITEMS: Final = 4096
MAX_ITEM_PARTS: Final = 1024
MAX_CALL_CHARS: Final = 64
MAX_REFERENCED_CHARS: Final = 1 << 20
"""Of all items of one input that are given by their ids."""

_ROLES: Final = frozenset(get_args(Role)) - {"tool"}
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "summary_text"})

ItemStatus = Literal["in_progress", "completed", "incomplete"]
CallName = Annotated[str, Meta(min_length=1, max_length=MAX_CALL_CHARS)]
FindItem = Callable[[str], Message | None]
"""Return what an item says that the server keeps, by its id; None if there is no such item."""


class InputPartBody(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an item's content; parts are joined without a separator."""

    type: str
    text: Content | None = None
    refusal: Content | None = None


Parts = Annotated[list[InputPartBody], Meta(max_length=MAX_ITEM_PARTS)]


class InputItemBody(msgspec.Struct, frozen=True, kw_only=True):
    """One item of an input: a message unless its `type` says otherwise."""

    type: str = "message"
    id: Annotated[str, Meta(max_length=256)] | None = None
    role: str | None = None
    content: Content | Parts | None = None
    call_id: CallName | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    arguments: Content | None = None
    output: Content | Parts | None = None
    encrypted_content: Content | None = None


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of an answer; `logprobs` may be encoded already."""

    text: str
    annotations: tuple[()] = ()
    logprobs: Any = ()


class InputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """The text of a client's message."""

    text: str


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    """What the model thought."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the client or the model."""

    id: str
    role: str
    status: ItemStatus
    content: tuple[OutputText | InputText, ...]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before it answered."""

    id: str
    status: ItemStatus
    content: tuple[ReasoningText, ...]
    summary: tuple[()] = ()


class FunctionCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """A call of a function that the client is to run."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    """What the function gave."""

    id: str
    status: ItemStatus
    call_id: str
    output: str


class CompactionItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="compaction"):
    """What stands for a conversation that was compacted; opaque, but no secret."""

    id: str
    encrypted_content: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem
AnyItem = OutputItem | FunctionOutputItem


def messages_of(
    items: str | Sequence[InputItemBody] | None, find: FindItem = lambda _: None
) -> tuple[Message, ...]:
    """Return the messages that an input says: adjacent thoughts, calls and text of the model are
    one message. Raises InvalidRequest, UnsupportedOperation, ItemNotFound with the name of the
    item."""
    if items is None or isinstance(items, str):
        return (Message("user", items),) if items else ()
    return joined(_parts_said(items, find))


def _parts_said(items: Sequence[InputItemBody], find: FindItem) -> Iterator[Message]:
    room = MAX_REFERENCED_CHARS
    for index, item in enumerate(items):
        param = f"input[{index}]"
        if item.type == "item_reference":
            part = find(item.id or "")
            if part is None:
                text = f"Item with id '{sanitize(item.id or '')}' is not kept here: send it whole."
                raise ItemNotFound(text, param=f"{param}.id")
            room -= part.num_chars
            if room < 0:
                text = f"References are to more than {MAX_REFERENCED_CHARS} characters."
                raise InvalidRequest(text, param=param)
            yield part
        elif item.type == "compaction":
            yield from decode_window(item.encrypted_content or "", f"{param}.encrypted_content")
        else:
            yield _message_of(item, param)


def joined(parts: Iterable[Message]) -> tuple[Message, ...]:
    """Return messages in which adjacent thoughts, calls and text of the model are one."""
    messages: list[Message] = []
    same: list[Message] = []
    for part in parts:
        if same and not _continues(same[-1], part):
            messages.append(_one_of(same))
            same = []
        same.append(part)
    if same:
        messages.append(_one_of(same))
    return tuple(messages)


def _one_of(parts: list[Message]) -> Message:
    """Return the message that these parts make. The work is linear in what they say."""
    if len(parts) == 1:
        return parts[0]
    return Message(
        "assistant",
        "".join(part.content for part in parts),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
        reasoning="".join(part.reasoning for part in parts),
    )


def _continues(before: Message, message: Message) -> bool:
    """Return whether a part goes on with the answer of the one before: text ends it, unless calls
    follow."""
    if before.role != "assistant" or message.role != "assistant":
        return False
    if before.tool_calls:
        return bool(message.tool_calls)
    return not before.content or bool(message.tool_calls)


def _message_of(item: InputItemBody, param: str) -> Message:
    match item.type:
        case "message":
            role = item.role or ""
            if role not in _ROLES:
                roles = ", ".join(sorted(_ROLES))
                raise InvalidRequest(f"role must be one of {roles}.", param=f"{param}.role")
            if item.content is None:
                raise InvalidRequest("A message needs content.", param=f"{param}.content")
            return Message(role, _text_of(item.content, f"{param}.content"))
        case "reasoning":
            return Message("assistant", "", reasoning=_text_of(item.content, f"{param}.content"))
        case "function_call":
            if item.call_id is None or item.name is None:
                raise InvalidRequest("A call needs call_id and name.", param=param)
            call = ToolCall(item.call_id, item.name, item.arguments or "")
            return Message("assistant", "", tool_calls=(call,))
        case "function_call_output":
            if item.call_id is None or item.output is None:
                raise InvalidRequest("A function's output needs call_id and output.", param=param)
            text = _text_of(item.output, f"{param}.output")
            return Message("tool", text, tool_call_id=item.call_id)
        case _:
            kind = sanitize(item.type)[:64]
            raise UnsupportedOperation(
                f"Items of type {kind} are not supported here.", param=f"{param}.type"
            )


def _text_of(content: str | list[InputPartBody] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type in _TEXT_PARTS or part.type == "reasoning_text":
            texts.append(part.text or "")
        else:
            kind = sanitize(part.type)[:64]
            raise UnsupportedOperation(
                f"Content of type {kind} is not supported here.", param=f"{param}[{index}].type"
            )
    return "".join(texts)


def check_calls(messages: Iterable[Message], open_calls: Iterable[str]) -> tuple[str, ...]:
    """Return the calls that no output answers yet, behind these messages.

    `open_calls`: those before them. Raises InvalidRequest for the output of a call that nobody has
    asked for, or that was answered before.
    """
    waiting = dict.fromkeys(open_calls)
    for message in messages:
        waiting.update(dict.fromkeys(call.id for call in message.tool_calls))
        if message.role == "tool":
            if message.tool_call_id not in waiting:
                name = sanitize(message.tool_call_id)
                raise InvalidRequest(
                    f"No tool call found for function call output with call_id {name}.",
                    param="input",
                )
            del waiting[message.tool_call_id]
    return tuple(waiting)


def open_calls_of(messages: Iterable[Message]) -> tuple[str, ...]:
    """Return the calls in these messages that no output answers."""
    waiting: dict[str, None] = {}
    for message in messages:
        waiting.update(dict.fromkeys(call.id for call in message.tool_calls))
        waiting.pop(message.tool_call_id, None)
    return tuple(waiting)


def message_items(message: Message, prefix: str, number: int) -> Sequence[AnyItem]:
    """Return the items of a client's message; their ids begin with the name of their kind, then
    come `prefix` and the message's number."""
    suffix = f"{prefix}_{number}"
    if message.role == "assistant":
        return answer_items(message, suffix, status="completed")
    if message.role == "tool":
        call_id, output = message.tool_call_id, message.content
        item_id = f"fco_{suffix}"
        return [FunctionOutputItem(id=item_id, status="completed", call_id=call_id, output=output)]
    content = (InputText(text=message.content),)
    item_id, role = f"msg_{suffix}", message.role
    return [MessageItem(id=item_id, role=role, status="completed", content=content)]


def message_number(item_id: str, prefix: str) -> int | None:
    """Return the number of the message whose items may have this id; None if no message has."""
    number = item_id.partition(f"_{prefix}_")[2].partition("_")[0]
    return int(number) if number.isdecimal() and number.isascii() else None


def parts_of(messages: Iterable[Message], prefix: str) -> list[tuple[str, Message]]:
    """Return what each item of these messages says, by its id."""
    numbered = enumerate(messages)
    items = (item for i, message in numbered for item in message_items(message, prefix, i))
    return [(item.id, _part_of(item)) for item in items]


def answer_parts(answer: Message, suffix: str) -> list[tuple[str, Message]]:
    """Return what each item of an answer says, by its id."""
    items = answer_items(answer, suffix, status="completed")
    return [(item.id, _part_of(item)) for item in items]


def part_of_response(
    item_id: str, suffix: str, asked: Sequence[Message], answer: Message | None
) -> Message | None:
    """Return what an item says of a response whose ids end with `suffix`; None if it has no such
    item. The work does not grow with what was asked."""
    said: list[AnyItem] = []
    if answer is not None:
        said += answer_items(answer, suffix, status="completed")
    number = message_number(item_id, suffix)
    if number is not None and number < len(asked):
        said += message_items(asked[number], suffix, number)
    return next((_part_of(item) for item in said if item.id == item_id), None)


def part_item(item_id: str, part: Message) -> AnyItem:
    """Return the item that says this."""
    (item,) = message_items(part, "", 0)
    return structs.replace(item, id=item_id)


def _part_of(item: AnyItem) -> Message:
    match item:
        case MessageItem(role=role, content=content):
            return Message(role, "".join(part.text for part in content))
        case ReasoningItem(content=thoughts):
            text = "".join(part.text for part in thoughts)
            return Message("assistant", "", reasoning=text)
        case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
            return Message("assistant", "", tool_calls=(ToolCall(call_id, name, arguments),))
        case FunctionOutputItem(call_id=call_id, output=output):
            return Message("tool", output, tool_call_id=call_id)
        case _:
            assert_never(item)


def answer_items(
    answer: Message, suffix: str, *, status: ItemStatus, logprobs: Any = ()
) -> list[OutputItem]:
    """Return the items of an answer: thoughts, text, calls. One that says nothing is an empty
    text."""
    items: list[OutputItem] = []
    if answer.reasoning:
        text = ReasoningText(text=answer.reasoning)
        items.append(ReasoningItem(id=f"rs_{suffix}", status=status, content=(text,)))
    if answer.content or not (answer.reasoning or answer.tool_calls):
        part = OutputText(text=answer.content, logprobs=logprobs)
        items.append(
            MessageItem(id=f"msg_{suffix}", role="assistant", status=status, content=(part,))
        )
    for index, call in enumerate(answer.tool_calls):
        items.append(call_item(call, suffix, index, status=status))
    return items


def call_item(call: ToolCall, suffix: str, index: int, *, status: ItemStatus) -> FunctionCallItem:
    """Return the item of one call."""
    return FunctionCallItem(
        id=f"fc_{suffix}_{index}",
        status=status,
        call_id=call.id,
        name=call.name,
        arguments=call.arguments,
    )
