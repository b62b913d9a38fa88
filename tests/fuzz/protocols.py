"""Every protocol without a socket, fed with frames that are wrong: it refuses, it never raises."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

import msgspec

from session_server.core.errors import SessionServerError
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import Outcome, TokenUsage, TurnCompleted, TurnCreated
from session_server.protocol.chat_completions import ChatBody, parse_chat
from session_server.protocol.completions import CompletionBody, parse_completion
from session_server.protocol.frames import LimitsBody, OpenedFrame
from session_server.protocol.messages import OpenBody, TurnBody, chat_messages, decode, turn_request
from session_server.protocol.realtime import (
    REALTIME,
    RealtimeModel,
    RealtimeNames,
    RealtimeProtocol,
)
from session_server.protocol.realtime_outbox import RealtimeQueue
from session_server.protocol.realtime_responses import StartResponse
from session_server.protocol.responses import CompactBody, ResponseFields, parse_response
from session_server.protocol.responses_socket import ResponsesProtocol
from session_server.protocol.session_protocol import SUBPROTOCOL, SessionProtocol
from session_server.protocol.sglang import GenerateBody, parse_generation
from session_server.web.app import describe
from session_server.web.asyncapi import CHANNELS
from session_server.web.documents import published
from session_server.web.openapi import COMPONENTS
from tests.fuzz.draw import Draw

_DEFAULTS: Final = SamplingParams()
_HELLO: Final = OpenedFrame(
    seq=0,
    session_id="s_1",
    epoch="e",
    resumed=False,
    state="cold",
    tokens=0,
    model="m",
    limits=LimitsBody(
        max_message_bytes=4096, max_context=64, max_queued_turns=1, replay_bytes=1, idle_ttl_s=1.0
    ),
    heartbeat_s=20.0,
)
DOCUMENTS: Final = published(describe())
BODY_SCHEMAS: Final[dict[str, Any]] = DOCUMENTS["openapi.json"]["components"]["schemas"]
FRAME_SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    channel.name: DOCUMENTS[f"schemas/{channel.name}.json"]["$defs"] for channel in CHANNELS
}

Feed = Callable[[bytes], None]


def _translated(body: Any) -> object:
    """What a route makes of a body before it asks the sessions for anything."""
    match body:
        case TurnBody():
            return turn_request(body, defaults=_DEFAULTS, on_disconnect="cancel")
        case OpenBody():
            return chat_messages(body.messages or ())
        case GenerateBody():
            return parse_generation(body, rid="r", turn_id="t")
        case ChatBody():
            return parse_chat(body, turn_id="t", hint="", defaults=_DEFAULTS)
        case CompletionBody():
            return parse_completion(body, completion_id="c", defaults=_DEFAULTS)
        case ResponseFields():
            call = parse_response(body, response_id="r", model="m", created_s=1, defaults=_DEFAULTS)
            return msgspec.json.encode(call.body)
        case CompactBody():
            return _translated(body.summary_fields(None, max_tokens=4))
        case _:
            return None


def feed_body(kind: type[msgspec.Struct]) -> Feed:
    """Feed bodies of one kind to what reads them."""

    def feed(payload: bytes) -> None:
        try:
            _translated(decode(payload, kind))
        except SessionServerError as error:
            msgspec.json.encode((error.message, error.param))

    return feed


def feed_session(random: Random) -> Feed:
    """Feed frames to `kvsession.v1`, one connection after another."""
    made: list[SessionProtocol] = []

    def feed(payload: bytes) -> None:
        if not made or made[0].close_code is not None or random.random() < 0.01:
            protocol = SessionProtocol(
                defaults=_DEFAULTS, needs_auth=random.random() < 0.1, max_message_bytes=2048
            )
            if protocol.state.value == "opening":
                protocol.on_opened(_HELLO)
            made[:] = [protocol]
        made[0].receive_frame(payload.decode(errors="replace"), now_s=0.0)
        while (frame := made[0].take_frame()) is not None:
            msgspec.json.decode(frame)

    return feed


def feed_realtime(random: Random) -> Feed:
    """Feed events to Realtime, one conversation after another; its turns end at once."""
    made: list[tuple[RealtimeProtocol, RealtimeQueue]] = []

    def feed(payload: bytes) -> None:
        if not made or made[0][0].close_code is not None or random.random() < 0.01:
            protocol = RealtimeProtocol(
                RealtimeNames("s_1"),
                model=RealtimeModel("m", _DEFAULTS),
                max_message_bytes=2048,
                check_room=lambda _: None,
            )
            made[:] = [(protocol, protocol.outbox.attach())]
            list(protocol.greet(None))
        protocol, queue = made[0]
        protocol.receive_frame(payload.decode(errors="replace"))
        while (command := protocol.take_command()) is not None:
            if isinstance(command, StartResponse):
                turn_id, outcome = (
                    command.response_id,
                    Outcome("i_1", "Hi!", (5,), TokenUsage(), None),
                )
                end = TurnCompleted(turn_id, "stop", None, outcome)
                protocol.add_entries([(0, TurnCreated(turn_id, 0)), (1, end)])
        while (frame := queue.take_frame()) is not None:
            msgspec.json.decode(frame)

    return feed


def feed_responses(random: Random) -> Feed:
    """Feed frames to the WebSocket mode of Responses, one connection after another."""
    made: list[ResponsesProtocol] = []

    def feed(payload: bytes) -> None:
        if not made or random.random() < 0.01:
            made[:] = [ResponsesProtocol(max_message_bytes=2048)]
        request = made[0].receive_frame(payload.decode(errors="replace"))
        try:
            _translated(request)
        except SessionServerError as error:
            made[0].send_error(error)
        while (frame := made[0].take_frame()) is not None:
            msgspec.json.decode(frame)

    return feed


def request_kinds() -> dict[str, list[type[msgspec.Struct]]]:
    """The types of all bodies that routes read, by the module of their protocol."""
    read = {
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for path in DOCUMENTS["openapi.json"]["paths"].values()
        for operation in path.values()
        if "requestBody" in operation
    }
    kinds: dict[str, list[type[msgspec.Struct]]] = {}
    for kind in COMPONENTS:
        if getattr(kind, "__name__", None) in read:
            kinds.setdefault(kind.__module__.rpartition(".")[2], []).append(kind)
    return kinds


_SOCKETS: Final[dict[str, Callable[[Random], Feed]]] = {
    SUBPROTOCOL: feed_session,
    REALTIME: feed_realtime,
    "responses": feed_responses,
}
assert set(_SOCKETS) == set(FRAME_SCHEMAS), "every socket is fuzzed"

Shot = Callable[[], None]
"""Draws one frame and feeds it."""


def protocols(seed: int) -> dict[str, Shot]:
    """Every protocol by its name."""
    random = Random(seed)
    found: dict[str, Shot] = {}
    for name, make in _SOCKETS.items():
        frames, feed = Draw(random, FRAME_SCHEMAS[name]), make(random)
        found[name] = lambda frames=frames, feed=feed: feed(frames.payload("ClientMessage"))
    bodies = Draw(random, BODY_SCHEMAS)
    for name, kinds in request_kinds().items():
        feeds = [(kind.__name__, feed_body(kind)) for kind in kinds]

        def shoot(feeds: list[tuple[str, Feed]] = feeds) -> None:
            kind_name, feed_one = random.choice(feeds)
            feed_one(bodies.payload(kind_name))

        found[f"bodies of {name}"] = shoot
    return found
