"""Bounds of what clients send: at each bound, and one beyond it."""

from __future__ import annotations

import json
from typing import get_args

import msgspec
import pytest

from session_server.core.errors import InvalidRequest
from session_server.core.sampling import (
    MAX_LOGIT_BIAS,
    MAX_OUTPUT_TOKENS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)
from session_server.core.session_events import ChatInput, Message
from session_server.protocol.errors import (
    MAX_MESSAGE_CHARS,
    error_body,
    sanitize,
    to_invalid_request,
)
from session_server.protocol.messages import (
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_PARTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TTL_S,
    MIN_TTL_S,
    Body,
    CancelBody,
    ClientMessage,
    DraftBody,
    EditBody,
    MessageBody,
    OpenBody,
    RewindBody,
    SamplingBody,
    TurnBody,
    TurnCreate,
    TurnFields,
    UpdateBody,
    decode,
    sampling_params,
    turn_request,
)

NUMBERS: list[tuple[str, object, object]] = [
    ("max_tokens", 0, -1),
    ("max_tokens", MAX_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS + 1),
    ("min_tokens", 0, -1),
    ("temperature", 0, -0.001),
    ("temperature", 100, 100.001),
    ("top_k", -1, -2),
    ("top_k", 1 << 30, (1 << 30) + 1),
    ("top_p", 1, 1.001),
    ("top_p", 0.001, 0),
    ("min_p", 0, -0.001),
    ("min_p", 1, 1.001),
    ("repetition_penalty", 0.001, 0),
    ("repetition_penalty", 10, 10.001),
    ("presence_penalty", -2, -2.001),
    ("frequency_penalty", 2, 2.001),
    ("seed", 0, -1),
    ("seed", (1 << 63) - 1, 1 << 63),
    ("logprobs", True, 1),
    ("top_logprobs", MAX_TOP_LOGPROBS, MAX_TOP_LOGPROBS + 1),
    ("stop", "a" * MAX_STOP_CHARS, "a" * (MAX_STOP_CHARS + 1)),
    ("stop", ["a"] * MAX_STOP_STRINGS, ["a"] * (MAX_STOP_STRINGS + 1)),
    ("stop_token_ids", [1] * MAX_STOP_TOKEN_IDS, [1] * (MAX_STOP_TOKEN_IDS + 1)),
    ("logit_bias", {str(i): 1 for i in range(MAX_LOGIT_BIAS)}, {"1": 101}),
    ("logit_bias", {"1": -100}, {"-1": 1}),
    ("logit_bias", {"1": 100}, {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}),
    ("prompt_logprobs_from", 0, -1),
]


BODIES = (MessageBody, SamplingBody, TurnBody, DraftBody, OpenBody, UpdateBody, CancelBody)
REQUIRED: dict[str, dict[str, object]] = {
    "MessageBody": {"role": "user", "content": "Hi"},
    "SessionAuth": {"token": "t"},
    "Ack": {"seq": 1},
    "SessionRewind": {"to_item": None},
    "TurnDraft": {"draft_id": "d1"},
    "DraftBody": {"draft_id": None},
    "ItemEdit": {"item_id": "i_1", "content": "Hi"},
}


@pytest.mark.parametrize("kind", [*BODIES, *get_args(ClientMessage)])
def test_a_misspelt_field_is_an_error_in_every_body_and_frame(kind: type[Body]) -> None:
    config = kind.__struct_config__
    tag = {config.tag_field: config.tag} if config.tag_field else {}
    good = tag | REQUIRED.get(kind.__name__, {})
    assert isinstance(decode(json.dumps(good), kind), kind)
    with pytest.raises(InvalidRequest) as refused:
        decode(json.dumps(good | {"mistake": 1}), kind)
    assert "mistake" in str(refused.value)


@pytest.mark.parametrize(("name", "good", "bad"), NUMBERS)
def test_sampling_is_bounded_on_both_sides(name: str, good: object, bad: object) -> None:
    body = decode(json.dumps({name: good}), SamplingBody)
    assert getattr(body, name) is not None
    with pytest.raises(InvalidRequest) as refused:
        decode(json.dumps({name: bad}), SamplingBody)
    assert (refused.value.param or "").startswith(name)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"id": "a" * 64}, {"id": "a" * 65}),
        ({"id": "A.b_c:d-1"}, {"id": "a/b"}),
        ({"ttl_s": MIN_TTL_S}, {"ttl_s": MIN_TTL_S / 2}),
        ({"ttl_s": MAX_TTL_S}, {"ttl_s": MAX_TTL_S + 1}),
        (
            {"metadata": {str(i): "v" for i in range(MAX_METADATA)}},
            {"metadata": {str(i): "v" for i in range(MAX_METADATA + 1)}},
        ),
        ({"metadata": {"k": "v" * 512}}, {"metadata": {"k": "v" * 513}}),
        ({"metadata": {"k": "v"}}, {"metadata": {"k": 1}}),
        (
            {"messages": [{"role": "user", "content": "a"}] * MAX_MESSAGES},
            {"messages": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)},
        ),
        ({"pinned": True}, {"pinned": 1}),
    ],
)
def test_a_session_is_bounded_on_both_sides(good: object, bad: object) -> None:
    decode(json.dumps(good), OpenBody)
    with pytest.raises(InvalidRequest):
        decode(json.dumps(bad), OpenBody)


def test_an_empty_sampling_is_the_servers_own() -> None:
    defaults = SamplingParams(max_tokens=7, temperature=0.3, stop_token_ids=(9,))
    assert sampling_params(SamplingBody(), defaults=defaults) == defaults
    given = sampling_params(SamplingBody(temperature=0.0), defaults=defaults)
    assert given == msgspec.structs.replace(defaults, temperature=0.0)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff", b"{", b'{"text":"\xff"}', b'{"text":"\\ud800"}', b"NaN", b"\xfe\xff{}"],
)
def test_what_is_no_json_in_utf8_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(payload, TurnBody)


def test_messages_to_clients_are_one_bounded_line() -> None:
    assert sanitize("a\x1b[31m\r\nb\u2028c") == "a [31m b c"
    assert len(sanitize("a" * 10_000)) == MAX_MESSAGE_CHARS
    body = error_body(InvalidRequest("a\nb", param="p"), turn_id="t")
    assert (body.message, body.param, body.turn_id) == ("a b", "p", "t")


ON_BOTH_SURFACES = pytest.mark.parametrize("kind", [TurnBody, TurnCreate])


def turn(kind: type[TurnFields], **fields: object) -> TurnFields:
    """A turn as it comes over REST or over a socket."""
    tag = {"type": "turn.create"} if kind is TurnCreate else {}
    return decode(json.dumps(tag | fields), kind)


def chat_of(body: TurnFields) -> tuple[Message, ...]:
    """The messages of a turn."""
    request = turn_request(body, defaults=SamplingParams(), on_disconnect="detach")
    assert isinstance(request.input, ChatInput)
    return request.input.messages


@ON_BOTH_SURFACES
def test_a_content_in_parts_is_their_texts_put_together(kind: type[TurnFields]) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = turn(kind, input=[{"role": "user", "content": parts}])
    assert chat_of(body) == (Message("user", "Hello"),)
    most = [{"type": "text", "text": ""}] * MAX_PARTS
    assert chat_of(turn(kind, input=[{"role": "user", "content": most}]))
    for wrong in ([], [*most, most[0]]):
        with pytest.raises(InvalidRequest):
            turn(kind, input=[{"role": "user", "content": wrong}])


@ON_BOTH_SURFACES
def test_a_string_as_input_is_one_message_of_the_user(kind: type[TurnFields]) -> None:
    assert chat_of(turn(kind, input="Hi")) == (Message("user", "Hi"),)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]},
            "input[0].content[0].type",
            "input[0].content[0].type must be one of text; it is 'image_url'",
        ),
        (
            {"input": [{"role": "boss", "content": "a"}]},
            "input[0].role",
            "input[0].role must be one of assistant, developer, system, tool, user; it is 'boss'",
        ),
        (
            {"on_disconnect": "stay"},
            "on_disconnect",
            "on_disconnect must be one of cancel, detach; it is 'stay'",
        ),
        (
            {"turn_id": "a b"},
            "turn_id",
            "Expected 1 to 64 characters of A-Z a-z 0-9 _ . : -",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "Expected 1 to 64 characters of A-Z a-z 0-9 _ . -",
        ),
        (
            {"sampling": {"logit_bias": {"a": 1}}},
            "sampling.logit_bias",
            "Expected 1 to 10 characters of 0-9",
        ),
        (
            {"sampling": {"temperature": -1}},
            "sampling.temperature",
            "sampling.temperature: Expected a number, at least 0.0",
        ),
        (
            {"sampling": {"top_p": 0}},
            "sampling.top_p",
            "sampling.top_p: Expected a number, above 0.0",
        ),
        (
            {"sampling": {"top_k": "all"}},
            "sampling.top_k",
            "sampling.top_k: Expected a whole number or null, got a string",
        ),
        (
            {"input": [{"role": "user", "content": []}]},
            "input[0].content",
            "input[0].content: Expected a list of length at least 1",
        ),
    ],
)
@ON_BOTH_SURFACES
def test_a_wrong_value_is_refused_with_the_field_and_what_it_takes(
    kind: type[TurnFields], fields: dict[str, object], param: str, text: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        turn(kind, **fields)
    assert (refused.value.param, refused.value.message) == (param, text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"inptu": "Hi"}, "inptu"),
        ({"sampling": {"temprature": 0}}, "sampling.temprature"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"a\n`b": 1}, "a `b"),
    ],
)
@ON_BOTH_SURFACES
def test_a_field_that_is_unknown_or_missing_is_named(
    kind: type[TurnFields], fields: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        turn(kind, **fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (TurnBody, {"samplng": {}}, "There is no field `samplng`; did you mean sampling?"),
        (TurnCreate, {"samplng": {}}, "There is no field `samplng`; did you mean sampling?"),
        (
            TurnBody,
            {"max_tokens": 8},
            "There is no field `max_tokens`; did you mean sampling.max_tokens?",
        ),
        (
            ClientMessage,
            {"type": "turn.create", "max_tokens": 8},
            "There is no field `max_tokens`; did you mean sampling.max_tokens?",
        ),
        (
            TurnBody,
            {"stream": True},
            "There is no field `stream`; send the header Accept: text/event-stream",
        ),
        (
            UpdateBody,
            {"messages": []},
            "There is no field `messages`; there are ttl_s, metadata, pinned",
        ),
        (TurnBody, {"content": "Hi"}, "There is no field `content`; did you mean input?"),
        (TurnBody, {"messages": []}, "There is no field `messages`; did you mean input?"),
        (
            TurnBody,
            {"sampling": {"max_completion_tokens": 8}},
            "There is no field `max_completion_tokens`; did you mean max_tokens?",
        ),
        (EditBody, {"text": "Hi"}, "There is no field `text`; there is only content"),
        (
            UpdateBody,
            {"ttl" * 100: 1},
            f"There is no field `{('ttl' * 22)[:64]}...`; there are ttl_s, metadata, pinned",
        ),
        (ClientMessage, {"type": "ping", "zzzzzz": 1}, "There is no field `zzzzzz`"),
        (RewindBody, {}, "`to_item` is missing"),
    ],
)
def test_a_wrong_field_is_told_what_to_send(
    kind: type[Body], fields: dict[str, object], text: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(msgspec.json.encode(fields), kind)
    assert refused.value.message == text


def test_a_frame_of_an_unknown_type_is_told_which_there_are() -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.json.decode(b'{"type": "turn.creat"}', type=ClientMessage)
    refusal = to_invalid_request(error.value, ClientMessage)
    assert refusal.param == "type"
    assert "turn.create, turn.cancel" in refusal.message
    assert refusal.message.endswith("it is 'turn.creat'")


def test_broken_json_is_told_where_it_breaks() -> None:
    with pytest.raises(msgspec.DecodeError) as error:
        msgspec.json.decode(b'{"type": "ping",', type=ClientMessage)
    refusal = to_invalid_request(error.value, ClientMessage)
    assert refusal.message == "The message is not valid JSON in UTF-8: Input data was truncated"
