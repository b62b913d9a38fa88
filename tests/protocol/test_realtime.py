"""Realtime without a socket: whatever a client sends and a session does, the events are valid."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from session_server.core.errors import ContextTooLong, QuotaExceeded, SessionServerError
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import (
    ChatInput,
    ConversationItem,
    Message,
    Outcome,
    Role,
    SessionEntry,
    TokenUsage,
    ToolCall,
    ToolCallDelta,
    TurnCancelled,
    TurnCompleted,
    TurnCreated,
    TurnDelta,
    TurnFailedEntry,
    TurnRequest,
)
from session_server.protocol import realtime_conversation
from session_server.protocol.realtime import (
    ITEMS_AT_ONCE,
    RealtimeModel,
    RealtimeNames,
    RealtimeProtocol,
)
from session_server.protocol.realtime_conversation import messages_of
from session_server.protocol.realtime_frames import (
    RealtimeAnyItem,
    RealtimeCall,
    RealtimeMessage,
)
from session_server.protocol.realtime_messages import MAX_ITEMS
from session_server.protocol.realtime_outbox import RealtimeQueue
from session_server.protocol.realtime_responses import (
    MAX_ASIDES,
    MAX_WAITING_RESPONSES,
    CancelResponse,
    DraftNextInput,
    StartResponse,
)
from tests.web.realtime_client import judged_by_sdk, message

USAGE = TokenUsage(9, 4, 3)


class Conversation:
    """A protocol whose turns end when the test says so. `running`: the responses that were
    started; `asked`: what every one of them was given."""

    def __init__(self, *, room: int = 1 << 30) -> None:
        self.room = room
        self.protocol = RealtimeProtocol(
            RealtimeNames("s_1"),
            model=RealtimeModel("tiny", SamplingParams()),
            max_message_bytes=1 << 20,
            check_room=self.check_room,
        )
        self.queue = RealtimeQueue()
        self.events: list[dict[str, Any]] = []
        self.drafts: list[TurnRequest] = []
        self.running: dict[str, list[TurnDelta]] = {}
        self.asked: dict[str, list[tuple[str, str]]] = {}
        self.attach()

    def check_room(self, num_bytes: int) -> None:
        if num_bytes + self.protocol.num_bytes > self.room:
            raise QuotaExceeded("no room")

    def attach(self, last_event_id: str | None = None) -> list[dict[str, Any]]:
        self.queue = self.protocol.outbox.attach()
        for _ in self.protocol.greet(last_event_id):
            pass
        return self.take()

    def take(self) -> list[dict[str, Any]]:
        taken = [judged_by_sdk(json.loads(frame)) for frame in iter(self.queue.take_frame, None)]
        self.events += taken
        return taken

    def send(self, kind: str, **fields: object) -> list[dict[str, Any]]:
        return self.send_frame(json.dumps({"type": kind, **fields}))

    def send_frame(self, frame: str) -> list[dict[str, Any]]:
        self.protocol.receive_frame(frame)
        self.run_commands()
        return self.take()

    def say(self, text: str = "Hello", **fields: object) -> str:
        item = message(text)
        self.send("conversation.item.create", item=item, **fields)
        told = [e["item"] for e in self.events if e["type"] == "conversation.item.done"]
        item_id: str = next(e["id"] for e in reversed(told) if e["content"] == item["content"])
        return item_id

    def run_commands(self) -> None:
        while (command := self.protocol.take_command()) is not None:
            match command:
                case DraftNextInput(request=request):
                    if request is not None:
                        self.drafts.append(request)
                        self.protocol.on_drafted(processed=3, kept=1, total=3)
                case StartResponse(response_id=response_id, request=request):
                    assert isinstance(request.input, ChatInput)
                    said = [(each.role, each.content) for each in request.input.messages]
                    self.asked[response_id] = said
                    self.running[response_id] = []
                    self.tell(TurnCreated(response_id, 0))
                case CancelResponse(response_id=response_id):
                    if response_id in self.running:
                        self.end(response_id, "cancel")

    def tell(self, entry: SessionEntry) -> None:
        self.protocol.add_entries([(1, entry)])
        self.run_commands()

    def delta(self, response_id: str, text: str) -> None:
        self.running[response_id].append(TurnDelta(response_id, "i_1", text, (1,)))
        self.tell(self.running[response_id][-1])

    def call(self, response_id: str, *pieces: ToolCallDelta) -> None:
        delta = TurnDelta(response_id, "i_1", "", (1,), tool_calls=pieces)
        self.running[response_id].append(delta)
        self.tell(delta)

    def num_calls(self, response_id: str) -> int:
        return sum(
            bool(each.id) for delta in self.running[response_id] for each in delta.tool_calls
        )

    def end(self, response_id: str, how: str = "stop") -> list[dict[str, Any]]:
        deltas = self.running.pop(response_id)
        calls: list[ToolCall] = []
        for piece in (each for delta in deltas for each in delta.tool_calls):
            if piece.id:
                calls.append(ToolCall(piece.id, piece.name, ""))
            held = calls[piece.index]
            calls[piece.index] = structs.replace(held, arguments=held.arguments + piece.arguments)
        text = "".join(delta.text for delta in deltas)
        outcome = Outcome("i_1", text, (1,), USAGE, None, tool_calls=tuple(calls))
        ends: dict[str, SessionEntry] = {
            "stop": TurnCompleted(response_id, "stop", None, outcome),
            "length": TurnCompleted(response_id, "length", None, outcome),
            "cancel": TurnCancelled(response_id, True, "client_cancelled", outcome),
            "drop": TurnCancelled(response_id, False, "disconnected", outcome),
            "fail": TurnFailedEntry(response_id, "engine_restarting", "lost", True, outcome),
        }
        self.tell(ends[how])
        return self.take()

    def ids(self) -> list[str]:
        """The conversation, as somebody hears it who has heard nothing."""
        told = self.attach()
        return [each["item"]["id"] for each in told if each["type"] == "conversation.item.added"]


def test_a_response_that_fails_leaves_no_item() -> None:
    for how in ("fail", "drop"):
        made = Conversation()
        item_id = made.say()
        made.send("response.create")
        (running,) = made.running
        made.delta(running, "Hel")
        told = made.end(running, how)
        assert [each["type"] for each in told[-2:]] == [
            "response.done",
            "conversation.item.deleted",
        ]
        assert told[-2]["response"]["status"] in ("failed", "cancelled")
        assert made.ids() == [item_id]


def test_a_turn_that_is_refused_is_an_error_of_its_event_and_the_next_may_come() -> None:
    made = Conversation()
    made.say()
    made.protocol.receive_frame('{"type":"response.create","event_id":"mine"}')
    command = made.protocol.take_command()
    assert isinstance(command, StartResponse)
    error: SessionServerError = ContextTooLong("too long")
    made.protocol.responses.on_refused(command.response_id, error)
    (told,) = made.take()
    assert (told["error"]["code"], told["error"]["event_id"]) == ("context_length_exceeded", "mine")
    made.send("response.create")
    assert len(made.running) == 1


def test_a_response_that_waited_answers_what_stands_there_when_it_starts() -> None:
    made = Conversation()
    made.say("One")
    made.send("response.create")
    (first,) = made.running
    made.delta(first, "Hel")
    made.protocol.receive_frame('{"type":"response.cancel"}')
    made.say("Two")
    made.protocol.receive_frame('{"type":"response.create"}')
    made.run_commands()
    (second,) = made.running
    assert made.asked[second] == [("user", "One"), ("assistant", "Hel"), ("user", "Two")]
    made.end(second)
    assert len(made.ids()) == 4


TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
PIECES = (
    ToolCallDelta(0, '{"city":', "call_0", "weather"),
    ToolCallDelta(0, '"Oslo"}'),
    ToolCallDelta(1, "{}", "call_1", "weather"),
)


def test_calls_are_items_of_the_answer_and_their_outputs_are_read() -> None:
    made = Conversation()
    updated = made.send("session.update", session={"tools": [TOOL], "tool_choice": "auto"})
    assert updated[0]["session"]["tools"] == [TOOL]
    made.say("Where does it rain?")
    made.send("response.create")
    (first,) = made.running
    made.delta(first, "I look.")
    made.call(first, *PIECES)
    told = made.take() + made.end(first)
    names = [each for each in told if each["type"] == "response.function_call_arguments.done"]
    assert [each["arguments"] for each in names] == ['{"city":"Oslo"}', "{}"]
    assert [item["type"] for item in told[-1]["response"]["output"]] == [
        "message",
        "function_call",
        "function_call",
    ]
    indexes = [each["output_index"] for each in told if "delta" in each]
    assert indexes == [0, 1, 1, 2]
    (refused,) = made.send("conversation.item.create", item=output_of("nobody's"))
    assert refused["error"]["param"] == "item.call_id"
    for call_id in ("call_0", "call_1"):
        made.send("conversation.item.create", item=output_of(call_id))
    made.send("response.create")
    (second,) = made.running
    roles = ["user", "assistant", "tool", "tool"]
    assert [role for role, _ in made.asked[second]] == roles


def output_of(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "Rain."}


def script(made: Conversation) -> Iterator[None]:
    """A conversation, step by step."""
    made.say("Where does it rain?")
    yield
    made.send("response.create")
    yield
    (running,) = made.running
    for text in ("I ", "look."):
        made.delta(running, text)
        yield
    for piece in PIECES:
        made.call(running, piece)
        yield
    made.end(running)
    yield
    made.say("Thanks")
    yield


def normal(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events without their ids, adjacent deltas merged, and nothing of the greeting."""
    merged: list[dict[str, Any]] = []
    for event in events:
        plain = {key: value for key, value in event.items() if key != "event_id"}
        before = merged[-1] if merged else {}
        if plain["type"] in ("session.created", "conversation.created"):
            continue
        if "delta" in plain and "delta" in before and before["item_id"] == plain["item_id"]:
            merged[-1] = {**before, "delta": before["delta"] + plain["delta"]}
        else:
            merged.append(plain)
    return merged


@pytest.mark.parametrize("how", [None, "stop", "cancel"])
def test_what_stands_behind_an_answer_is_told_behind_it_to_who_comes_back(how: str | None) -> None:
    made = Conversation()
    known = [made.say("Hello")]
    made.send("response.create")
    seen = made.events[-1]["event_id"]
    (response_id,) = made.running
    made.delta(response_id, "Hi")
    made.say("And?")
    if how is not None:
        made.end(response_id, how)
        made.send("response.create")
        made.delta(next(iter(made.running)), "Yes")
        made.say("More")
    made.protocol.outbox.detach()
    for event in made.attach(seen):
        if event["type"] == "conversation.item.added":
            assert event["previous_item_id"] == known[-1]
            known.append(event["item"]["id"])
    assert len(known) == (3 if how is None else 5)


def test_whatever_event_was_the_last_that_came_the_rest_is_told_once() -> None:
    whole = Conversation()
    for _ in script(whole):
        whole.take()
    num_steps, num_events = sum(1 for _ in script(Conversation())), len(whole.events)
    assert num_events >= 30
    num_cuts = 0
    for cut_at in range(1, num_steps):
        for last in range(num_events):
            made = Conversation()
            steps = script(made)
            for _ in range(cut_at):
                next(steps)
            made.take()
            if last >= len(made.events):
                break
            heard, made.events = made.events[: last + 1], []
            made.protocol.outbox.detach()
            made.attach(heard[-1]["event_id"])
            for _ in steps:
                made.take()
            made.take()
            assert normal(heard + made.events) == normal(whole.events), (cut_at, last)
            num_cuts += 1
    assert num_cuts > 100


def test_bounds_hold_and_say_so() -> None:
    made = Conversation()
    made.say()
    for _ in range(MAX_ASIDES):
        assert not made.send("response.create", response={"conversation": "none"})[-1].get("error")
    (told,) = made.send("response.create", response={"conversation": "none"})
    assert told["error"]["code"] == "too_many_responses"
    made.send("response.create")
    running = [each for each in made.running if each == made.protocol.responses.active_id]
    made.protocol.receive_frame('{"type":"response.cancel"}')
    made.protocol.take_command()  # the cancel takes its time
    for _ in range(MAX_WAITING_RESPONSES):
        assert made.send("response.create") == []
        assert made.send("response.cancel") == []
    (told,) = made.send("response.create")
    assert told["error"]["code"] == "conversation_already_has_active_response"
    told = made.end(running[0], "cancel")
    kinds = [each["type"] for each in told if each["type"] in ("response.created", "response.done")]
    assert kinds == ["response.done", *["response.created", "response.done"] * 16]


def test_a_conversation_has_so_many_items_and_so_many_bytes() -> None:
    made = Conversation()
    for number in range(MAX_ITEMS):
        made.protocol.receive_frame(
            json.dumps({"type": "conversation.item.create", "item": message(str(number))})
        )
        if number % 64 == 0:
            while made.queue.take_frame() is not None:
                pass
    while made.queue.take_frame() is not None:
        pass
    (told,) = made.send("conversation.item.create", item=message("one more"))
    assert told["error"]["code"] == "invalid_value"
    small = Conversation(room=100_000)
    (told,) = small.send("conversation.item.create", item=message("a" * 100_000))
    assert told["error"]["code"] == "quota_exceeded"
    small.say("a" * 90_000)
    assert 90_000 < small.protocol.num_bytes < 100_000
    (told,) = small.send("session.update", session={"instructions": "b" * 10_000})
    assert told["error"]["code"] == "quota_exceeded"
    small.send("response.create")
    (running,) = small.running
    before = small.protocol.num_bytes
    small.delta(running, "c" * 1000)
    assert small.protocol.num_bytes >= before + 1000
    small.end(running)
    for item_id in small.ids():
        small.send("conversation.item.delete", item_id=item_id)
    assert small.protocol.num_bytes == 0


def test_a_peer_that_reads_nothing_is_not_read() -> None:
    made = Conversation()
    while not made.queue.is_full:
        made.protocol.receive_frame('{"type":"response.cancel"}')
    made.take()
    assert not made.queue.is_full


EVENTS: list[dict[str, Any]] = [
    {"type": "session.update", "session": {"instructions": "Be brief.", "temperature": 0.5}},
    {"type": "session.update", "session": {"resumption": {"enabled": True}, "stop": ["a"]}},
    {"type": "conversation.item.create", "item": message("Hello")},
    {"type": "conversation.item.create", "item": message("a", id="x"), "previous_item_id": "root"},
    {"type": "conversation.item.create", "item": message("b", "assistant", id="y")},
    {"type": "conversation.item.create", "item": message("c"), "previous_item_id": "x"},
    {"type": "conversation.item.delete", "item_id": "x"},
    {"type": "conversation.item.delete", "item_id": "item_s_1_2"},
    {"type": "conversation.item.retrieve", "item_id": "y"},
    {"type": "conversation.item.truncate", "item_id": "y", "content_index": 0, "audio_end_ms": 1},
    {"type": "response.create"},
    {"type": "response.create", "event_id": "e", "response": {"max_output_tokens": "inf"}},
    {"type": "response.create", "response": {"conversation": "none", "metadata": {"a": "b"}}},
    {
        "type": "response.create",
        "response": {"input": [message("d"), {"type": "item_reference", "id": "y"}]},
    },
    {"type": "session.update", "session": {"tools": [TOOL]}, "x_events": True},
    {"type": "input_text.append", "text": "Wh"},
    {"type": "input_text.clear"},
    {"type": "input_text.commit", "item_id": "typed"},
    {"type": "conversation.item.create", "item": output_of("call_0")},
    {
        "type": "conversation.item.create",
        "item": {"type": "function_call", "call_id": "call_9", "name": "f", "arguments": "{}"},
    },
    {"type": "response.cancel"},
    {"type": "response.cancel", "response_id": "resp_s_1_3"},
    {"type": "input_audio_buffer.append", "audio": "AAAA"},
]
JUNK: list[Any] = [None, -1, 1e308, "", "\ud800", "root", [], {}, True, "x" * 600, {"type": "text"}]


def mutated(rng: random.Random, value: Any) -> Any:
    """A value with something in it replaced, doubled or gone."""
    if rng.random() < 0.2:
        return rng.choice(JUNK)
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: mutated(rng, value[key])}
    if isinstance(value, list) and value:
        return [*value, mutated(rng, value[0])]
    return value


def hostile(rng: random.Random) -> str:
    event = rng.choice(EVENTS)
    fate = rng.random()
    if fate < 0.5:
        return json.dumps(event)
    frame = json.dumps(mutated(rng, event))
    if fate < 0.9:
        return frame
    cut = rng.randrange(len(frame) + 1)
    return rng.choice([frame[:cut], frame[:cut] + "\x00\ud800" + frame[cut:], "[" * 10_000])


@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_a_client_sends_raises_and_all_that_it_hears_is_valid(seed: int) -> None:
    rng = random.Random(seed)
    made = Conversation(room=1 << 20)
    told: list[str] = []
    for _ in range(1000):
        made.send_frame(hostile(rng))
        for response_id in list(made.running):
            fate = rng.random()
            if fate < 0.4:
                made.delta(response_id, rng.choice(["a", "é", " b", "\u2028"]))
            elif fate < 0.5:
                number = made.num_calls(response_id)
                made.call(response_id, ToolCallDelta(number, "", f"call_{number}", "f"))
            elif fate < 0.6 and (number := made.num_calls(response_id)):
                made.call(response_id, ToolCallDelta(number - 1, '{"a":'))
            elif fate < 0.8:
                made.end(response_id, rng.choice(["stop", "length", "cancel", "drop", "fail"]))
        told += [each["event_id"] for each in made.take()]
        if rng.random() < 0.02:
            made.protocol.outbox.detach()
            seen = rng.choice([None, "event_1", "nothing", *told[-3:]])
            made.attach(seen)
    kinds = {each["type"] for each in made.events}
    assert {"response.done", "conversation.item.retrieved", "error", "session.updated"} <= kinds
    ids = [each["event_id"] for each in made.events]
    assert len(set(ids)) == len(ids)
    created = [e["response"]["id"] for e in made.events if e["type"] == "response.created"]
    done = {e["response"]["id"] for e in made.events if e["type"] == "response.done"}
    assert set(created) - done <= set(made.running)


def items(num_items: int) -> list[ConversationItem]:
    roles: tuple[Role, ...] = ("user", "assistant")
    return [
        ConversationItem(id=f"i_{i}", turn_id="t", role=roles[i % 2], content="Hi", end_len=i)
        for i in range(num_items)
    ]


def test_what_was_said_before_is_taken_over_in_steps_while_there_is_room() -> None:
    client = Conversation()
    steps = client.protocol.adopt(items(10 * ITEMS_AT_ONCE))
    for number, _ in enumerate(steps, 1):
        assert len(client.protocol._conversation) == number * ITEMS_AT_ONCE
    assert len(client.ids()) == 10 * ITEMS_AT_ONCE
    full = Conversation(room=100_000)
    with pytest.raises(QuotaExceeded):
        for _ in full.protocol.adopt(items(10_000)):
            pass
    assert full.protocol.num_bytes < 2 * full.room


def test_a_key_builds_the_new_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    num_built = 0

    def counted(*args: Any) -> Any:
        nonlocal num_built
        num_built += 1
        return messages_of(*args)

    monkeypatch.setattr(realtime_conversation, "messages_of", counted)
    client = Conversation()
    for _ in client.protocol.adopt(items(1000)):
        pass
    for number in range(1, 3):
        for key in "Hello":
            client.send("input_text.append", text=key)
            draft = client.drafts[-1].input
            assert isinstance(draft, ChatInput)
            assert len(draft.messages) == 1000 + number
        assert num_built == number
        client.send("input_text.commit")


def test_calls_of_one_answer_are_put_together_once() -> None:
    calls: list[RealtimeAnyItem] = [
        RealtimeCall(id=f"item_{i}", call_id=f"c_{i}", name="f", arguments="{}") for i in range(50)
    ]
    said = RealtimeMessage(id="m", role="assistant", content=())
    (both,) = messages_of([said, *calls], "")
    assert [call.id for call in both.tool_calls] == [f"c_{i}" for i in range(50)]
    with pytest.MonkeyPatch.context() as patch:
        replaced: list[object] = []
        replace = structs.replace

        def counted(message: Message, **fields: Any) -> Message:
            replaced.append(message)
            return replace(message, **fields)

        patch.setattr(realtime_conversation.structs, "replace", counted)
        assert len(messages_of([*calls, said, *calls], "")) == 2
        assert len(replaced) == 2
