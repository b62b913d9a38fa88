"""`kvsession.v1` without a socket: it never raises, and owes exactly what it should."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from session_server.core.events import TurnTimings
from session_server.core.sampling import SamplingParams, TokenLogprob
from session_server.core.session_events import (
    ChatInput,
    ContinueInput,
    ItemEdited,
    Message,
    Outcome,
    SessionClosed,
    SessionDraining,
    SessionForked,
    SessionRewound,
    SessionStateChanged,
    SessionUpdated,
    TextInput,
    TokenInput,
    TokenUsage,
    TurnCancelled,
    TurnCompleted,
    TurnCreated,
    TurnDelta,
    TurnFailedEntry,
    TurnProgress,
)
from session_server.protocol import frame_queue
from session_server.protocol.frame_queue import MAX_OUTBOX_FRAMES
from session_server.protocol.frames import (
    MAX_COALESCED_CHARS,
    AnyServerFrame,
    LimitsBody,
    OpenedFrame,
    coalesce,
    frame_of,
)
from session_server.protocol.messages import (
    ItemEdit,
    SessionAuth,
    SessionClose,
    SessionFork,
    SessionRewind,
    SessionUpdate,
    TurnCancel,
)
from session_server.protocol.session_protocol import (
    CloseCode,
    ProtocolState,
    SessionProtocol,
    StartTurn,
)

MAX_CHARS = 8
TIMINGS = TurnTimings(
    queue_ms=0.5, prefill_ms=2.0, ttft_ms=2.5, decode_ms=4.0, forward_ms=6.0, num_steps=3
)
OUTCOME = Outcome("i_1", "Hi!", (5, 6), TokenUsage(10, 7, 2), TIMINGS)
HELLO = OpenedFrame(
    seq=0,
    session_id="s_1",
    epoch="e",
    resumed=False,
    state="cold",
    tokens=0,
    model="m",
    limits=LimitsBody(
        max_message_bytes=4096,
        max_context=64,
        max_queued_turns=1,
        replay_bytes=1,
        idle_ttl_s=1.0,
    ),
    heartbeat_s=20.0,
)

NAMES = st.sampled_from(
    [
        "type",
        "turn_id",
        "input",
        "text",
        "input_ids",
        "sampling",
        "generate",
        "queue",
        "ttl_s",
        "metadata",
        "t",
        "seq",
        "token",
        "keep_partial",
        "temperature",
        "max_tokens",
        "stop",
        "continue",
        "pinned",
        "x",
    ]
)
TYPES = st.sampled_from(
    [
        "session.auth",
        "turn.create",
        "turn.cancel",
        "session.update",
        "session.rewind",
        "session.fork",
        "session.cool",
        "session.warm",
        "item.edit",
        "session.close",
        "ping",
        "ack",
        "nothing",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | TYPES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
FRAMES = (
    st.text(st.characters(codec=None), max_size=40)
    | VALUES.map(json.dumps)
    | st.builds(
        lambda kind, fields: json.dumps({"type": kind, **fields}),
        TYPES,
        st.dictionaries(NAMES, VALUES, max_size=5),
    )
    | st.binary(max_size=40).map(lambda data: data.decode("latin-1"))
)


def protocol(*, needs_auth: bool = False, is_open: bool = True) -> SessionProtocol:
    made = SessionProtocol(
        defaults=SamplingParams(max_tokens=9), needs_auth=needs_auth, max_message_bytes=4096
    )
    if is_open and not needs_auth:
        made.on_opened(HELLO)
        made.take_frame()
    return made


def frames_of(made: SessionProtocol) -> list[str]:
    return list(iter(made.take_frame, None))


def sent(made: SessionProtocol) -> list[dict[str, Any]]:
    return [json.loads(frame) for frame in frames_of(made)]


def create(**fields: object) -> str:
    return json.dumps({"type": "turn.create", "turn_id": "t1", **fields})


@given(st.lists(FRAMES, max_size=20), st.booleans())
def test_whatever_arrives_nothing_is_raised_and_little_is_owed(
    frames: list[str], needs_auth: bool
) -> None:
    made = protocol(needs_auth=needs_auth)
    for frame in frames:
        command = made.receive_frame(frame, now_s=1.0)
        owed = frames_of(made)
        assert len(owed) <= 1
        assert all(len(text) < 2048 for text in owed)
        for text in owed:
            msgspec.json.decode(text, type=AnyServerFrame)
        if needs_auth:
            assert command is None or isinstance(command, SessionAuth)


@pytest.mark.parametrize(
    "frame",
    [
        "[" * 200_000,
        '{"a":' * 50_000,
        '{"type":"turn.create","x":' + "[" * 1500 + "]" * 1500 + "}",
        '{"type":"ping","t":' + "9" * 3000 + "}",
        "\ud800",
        '"\\ud800"',
        "\x00",
        "",
        "x" * 5000,
    ],
)
def test_what_breaks_parsers_is_an_error_frame(frame: str) -> None:
    made = protocol()
    assert made.receive_frame(frame, now_s=0.0) is None
    (error,) = sent(made)
    assert error["type"] == "error"
    assert error["error"]["code"] == "invalid_request"
    assert made.close_code is None


def test_a_peer_that_never_reads_its_answers_is_let_go() -> None:
    made = protocol()
    for _ in range(2 * MAX_OUTBOX_FRAMES):
        made.receive_frame("{", now_s=0.0)
    assert made.close_code is CloseCode.OVERLOADED
    assert len(frames_of(made)) == MAX_OUTBOX_FRAMES


def test_an_outbox_is_full_at_its_bound_in_bytes_until_frames_are_taken() -> None:
    def answer(num_chars: int) -> TurnCompleted:
        outcome = Outcome("i_1", "x" * num_chars, (), TokenUsage(10, 7, 2), None)
        return TurnCompleted("t1", "stop", None, outcome)

    made = protocol()
    made.send_repeat("t1", position=0, end=answer(0))
    padding = frame_queue.MAX_OUTBOX_BYTES - made.outbox_bytes
    assert made.take_frame() is not None
    for num_chars, is_full in ((padding - 1, False), (padding, True), (padding + 1, True)):
        made.send_repeat("t1", position=0, end=answer(num_chars))
        assert made.is_full is is_full
        assert made.take_frame() is not None
        assert (made.outbox_bytes, made.is_full) == (0, False)


def test_a_turn_is_understood_with_every_input_and_option() -> None:
    made = protocol()
    chat = create(input=[{"role": "user", "content": "Hi"}], sampling={"seed": 3, "stop": "."})
    command = made.receive_frame(chat, now_s=0.0)
    assert isinstance(command, StartTurn)
    assert command.request.turn_id == "t1"
    assert command.request.input == ChatInput((Message("user", "Hi"),))
    assert command.request.sampling == SamplingParams(max_tokens=9, seed=3)
    assert command.request.text.stop == (".",)
    assert command.request.on_disconnect == "detach"

    sampling = {"top_k": -1, "logit_bias": {"5": -1}, "stop": ["a", "b"], "keep_stop": True}
    raw = create(text="x", sampling=sampling, generate=False, queue=False, priority=3)
    command = made.receive_frame(raw, now_s=0.0)
    assert isinstance(command, StartTurn)
    assert command.request.input == TextInput("x")
    assert command.request.sampling.max_tokens == 0
    assert command.request.sampling.top_k == 0
    assert command.request.sampling.logit_bias == ((5, -1.0),)
    assert command.request.text.keep_stop is True
    assert (command.request.queue, command.request.priority) == (False, 3)

    command = made.receive_frame(create(input_ids=[1, 2], on_disconnect="cancel"), now_s=0.0)
    assert isinstance(command, StartTurn)
    assert command.request.input == TokenInput((1, 2))
    assert command.request.on_disconnect == "cancel"
    assert sent(made) == []


def test_a_turn_without_an_id_gets_one() -> None:
    made = protocol()
    ids = set()
    for _ in range(2):
        command = made.receive_frame('{"type":"turn.create","text":"a"}', now_s=0.0)
        assert isinstance(command, StartTurn)
        ids.add(command.request.turn_id)
    assert len(ids) == 2


def test_a_turn_goes_on_without_input() -> None:
    made = protocol()
    command = made.receive_frame('{"type":"turn.create","continue":true}', now_s=0.0)
    assert isinstance(command, StartTurn)
    assert command.request.input == ContinueInput()
    assert made.receive_frame('{"type":"turn.create","continue":false}', now_s=0.0) is None
    both = '{"type":"turn.create","continue":true,"text":"a"}'
    assert made.receive_frame(both, now_s=0.0) is None
    assert [frame["error"]["code"] for frame in sent(made)] == ["invalid_request"] * 2


def test_the_other_messages_become_commands() -> None:
    made = protocol()
    for frame, command in (
        ({"type": "turn.cancel"}, TurnCancel()),
        (
            {"type": "turn.cancel", "turn_id": "t", "keep_partial": False},
            TurnCancel(turn_id="t", keep_partial=False),
        ),
        ({"type": "session.update", "ttl_s": 5}, SessionUpdate(ttl_s=5.0)),
        ({"type": "session.rewind", "to_item": "i_3"}, SessionRewind(to_item="i_3")),
        ({"type": "session.rewind", "to_item": None}, SessionRewind(to_item=None)),
        ({"type": "session.fork"}, SessionFork()),
        ({"type": "session.fork", "at_item": "i_3", "id": "b"}, SessionFork(at_item="i_3", id="b")),
        (
            {"type": "item.edit", "item_id": "i_3", "content": "x"},
            ItemEdit(item_id="i_3", content="x"),
        ),
        ({"type": "session.update", "metadata": {"a": "b"}}, SessionUpdate(metadata={"a": "b"})),
        ({"type": "session.close"}, SessionClose()),
        ({"type": "session.auth", "token": "late"}, None),
        ({"type": "ack", "seq": 4}, None),
        ({"type": "ack", "seq": 2}, None),
    ):
        assert made.receive_frame(json.dumps(frame), now_s=0.0) == command
    assert sent(made) == []
    assert made.receive_frame('{"type":"ping","t":7}', now_s=12.5) is None
    assert sent(made) == [{"type": "pong", "t": 7.0, "server_time": 12.5}]


def test_a_refused_turn_names_the_turn() -> None:
    made = protocol()
    for frame in (create(text=1), create(), create(text="a", sampling={"top_logprobs": 3})):
        assert made.receive_frame(frame, now_s=0.0) is None
        (error,) = sent(made)
        assert error["error"]["turn_id"] == "t1"


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ({"type": "session.cool", "turn_id": "t"}, "There is no field `turn_id`"),
        (
            {"type": "turn.cancel", "temperature": 1},
            "There is no field `temperature`; there are turn_id, keep_partial",
        ),
        ({"type": "ping", "input": "t"}, "There is no field `input`; there is only t"),
        (
            {"type": "turn.create", "inputs": "Hi"},
            "There is no field `inputs`; did you mean input?",
        ),
    ],
)
def test_a_wrong_field_of_a_frame_is_told_those_of_that_frame(
    frame: dict[str, object], text: str
) -> None:
    made = protocol()
    made.receive_frame(json.dumps(frame), now_s=0.0)
    assert sent(made)[0]["error"]["message"] == text


@pytest.mark.parametrize("name", ["turn_id", "draft_id"])
def test_a_frame_that_cannot_be_read_names_its_turn_or_draft(name: str) -> None:
    made = protocol()
    made.receive_frame(json.dumps({"type": "turn.draft", name: "d1", "inptu": "Hi"}), now_s=0.0)
    assert sent(made)[0]["error"]["turn_id"] == "d1"


def test_the_first_message_authenticates_or_ends_it() -> None:
    made = protocol(needs_auth=True)
    command = made.receive_frame('{"type":"session.auth","token":"k"}', now_s=0.0)
    assert command == SessionAuth(token="k")
    made.on_authenticated()
    assert made.state is ProtocolState.OPENING

    for frame in ('{"type":"ping"}', "{"):
        other = protocol(needs_auth=True)
        assert other.receive_frame(frame, now_s=0.0) is None
        assert other.close_code is CloseCode.BAD_FIRST_MESSAGE
        assert len(sent(other)) == 1
        assert other.receive_frame('{"type":"session.auth","token":"k"}', now_s=0.0) is None


def test_a_session_as_frames_word_for_word() -> None:
    """The golden transcript: a change here is a change of the protocol."""
    made = protocol(is_open=False)
    made.on_opened(HELLO)
    made.send_entries(
        enumerate(
            [
                TurnCreated("t1", 0),
                SessionStateChanged("resident", "turn"),
                TurnProgress("t1", 7, 7, 10),
                TurnDelta("t1", "i_1", "H", (5,)),
                TurnDelta("t1", "i_1", "i!", (6,)),
                TurnCompleted("t1", "stop", 6, OUTCOME),
                TurnCancelled("t2", True, "client_cancelled", OUTCOME),
                TurnFailedEntry("t3", "engine_restarting", "gone", True, OUTCOME),
                SessionUpdated(60.0, {"a": "b"}),
                SessionRewound("i_1", 118, 112),
                SessionForked("s_b", 118),
                ItemEdited("i_4", 131, 118),
                SessionDraining(10.0),
                SessionClosed("client"),
            ],
            start=1,
        )
    )
    usage = {
        "input_tokens": 10,
        "cached_tokens": 7,
        "cache_write_tokens": 3,
        "output_tokens": 2,
        "total_tokens": 12,
    }
    timings = {
        "queue_ms": 0.5,
        "prefill_ms": 2.0,
        "ttft_ms": 2.5,
        "decode_ms": 4.0,
        "forward_ms": 6.0,
        "num_steps": 3,
    }
    item = {"id": "i_1", "role": "assistant", "content": "Hi!", "token_ids": [5, 6]}
    limits = {
        "max_message_bytes": 4096,
        "max_context": 64,
        "max_queued_turns": 1,
        "replay_bytes": 1,
        "idle_ttl_s": 1.0,
    }
    failure = {
        "type": "server_error",
        "code": "engine_restarting",
        "message": "gone",
        "param": None,
        "turn_id": "t3",
    }
    end = {"usage": usage, "timings": timings}
    assert sent(made) == [
        {
            "type": "session.opened",
            "seq": 0,
            "session_id": "s_1",
            "epoch": "e",
            "resumed": False,
            "state": "cold",
            "tokens": 0,
            "model": "m",
            "limits": limits,
            "heartbeat_s": 20.0,
        },
        {"type": "turn.created", "seq": 1, "turn_id": "t1", "position": 0},
        {"type": "session.state", "seq": 2, "state": "resident", "reason": "turn"},
        {
            "type": "turn.progress",
            "seq": 3,
            "turn_id": "t1",
            "phase": "prefill",
            "processed": 7,
            "cached": 7,
            "total": 10,
        },
        {"type": "turn.delta", "seq": 5, "turn_id": "t1", "item_id": "i_1", "text": "Hi!", "n": 2},
        {
            "type": "turn.completed",
            "seq": 6,
            "turn_id": "t1",
            "finish_reason": "stop",
            "matched": 6,
            "item": item | {"status": "completed"},
            **end,
        },
        {
            "type": "turn.cancelled",
            "seq": 7,
            "turn_id": "t2",
            "reason": "client_cancelled",
            "kept_partial": True,
            "item": item | {"status": "incomplete"},
            **end,
        },
        {
            "type": "turn.failed",
            "seq": 8,
            "turn_id": "t3",
            "error": failure,
            "retryable": True,
            **end,
        },
        {
            "type": "session.updated",
            "seq": 9,
            "ttl_s": 60.0,
            "metadata": {"a": "b"},
            "pinned": False,
        },
        {
            "type": "session.rewound",
            "seq": 10,
            "to_item": "i_1",
            "tokens": 118,
            "kept_tokens": 112,
        },
        {"type": "session.forked", "seq": 11, "session_id": "s_b", "tokens": 118},
        {"type": "item.edited", "seq": 12, "item_id": "i_4", "tokens": 131, "kept_tokens": 118},
        {"type": "session.draining", "seq": 13, "deadline_s": 10.0},
        {"type": "session.closed", "seq": 14, "reason": "client"},
    ]
    assert made.close_code is CloseCode.SESSION_CLOSED
    assert made.receive_frame('{"type":"ping"}', now_s=0.0) is None


def test_a_server_that_leaves_invites_to_come_back() -> None:
    made = protocol()
    made.send_entries([(1, SessionClosed("draining"))])
    assert made.close_code is CloseCode.RESTART


def test_a_turn_submitted_twice_is_told_again_without_a_place_in_the_order() -> None:
    made = protocol()
    made.send_repeat("t1", position=2, end=None)
    made.send_repeat("t1", position=0, end=TurnCompleted("t1", "length", None, OUTCOME))
    created, completed = sent(made)
    assert created == {"type": "turn.created", "turn_id": "t1", "position": 2}
    assert (completed["type"], "seq" in completed) == ("turn.completed", False)


def test_a_merged_delta_has_no_more_scores_than_its_bound() -> None:
    score = TokenLogprob(1, -0.123456789, tuple((token, -1.23456789) for token in range(20)))
    deltas = [TurnDelta("t", "i_1", "a", (seq,), (score,)) for seq in range(500)]
    merged = [entry for _, entry in coalesce(enumerate(deltas, start=1))]
    frames = [msgspec.json.encode(frame_of(1, entry)) for entry in merged]
    assert max(map(len, frames)) <= 2 * MAX_COALESCED_CHARS
    assert len(frames) < len(deltas) / 5
    joined = [each for entry in merged if isinstance(entry, TurnDelta) for each in entry.token_ids]
    assert joined == list(range(500))


DELTAS = st.builds(
    lambda turn, text: TurnDelta(turn, "i_" + turn, text, tuple(range(len(text)))),
    st.sampled_from(["a", "b"]),
    st.text(max_size=5) | st.just("x" * MAX_CHARS),
)


@given(st.lists(DELTAS | st.just(SessionDraining(1.0)), max_size=30))
def test_merging_deltas_loses_nothing_and_reorders_nothing(
    entries: list[TurnDelta | SessionDraining],
) -> None:
    numbered = list(enumerate(entries, start=1))
    merged = list(coalesce(numbered, max_chars=MAX_CHARS))

    def spelled(items: list[Any]) -> list[tuple[str, str, int]]:
        return [
            (entry.turn_id, char, token)
            for _, entry in items
            if isinstance(entry, TurnDelta)
            for char, token in zip(entry.text, entry.token_ids, strict=True)
        ]

    assert spelled(merged) == spelled(numbered)
    seqs = [seq for seq, _ in merged]
    assert seqs == sorted(set(seqs))
    assert seqs[-1:] == ([len(entries)] if entries else [])
    for _, entry in merged:
        if isinstance(entry, TurnDelta):
            assert len(entry.text) <= MAX_CHARS - 1 + MAX_CHARS
    num_breaks = sum(isinstance(entry, SessionDraining) for entry in entries)
    assert sum(isinstance(entry, SessionDraining) for _, entry in merged) == num_breaks
