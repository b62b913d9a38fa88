"""Publish the sockets as an AsyncAPI document, and what they carry as JSON Schema.

Schemas come from the types that frames are decoded to and encoded from, so they always match.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, get_args

import msgspec

from session_server.protocol import (
    frames,
    messages,
    realtime_frames,
    realtime_messages,
    responses_socket,
)
from session_server.protocol.realtime import REALTIME
from session_server.protocol.response_events import ResponseEvent
from session_server.protocol.session_protocol import SUBPROTOCOL
from session_server.web.realtime import KEY_PROTOCOL
from session_server.web.requests import BEARER_PROTOCOL, TICKET_PROTOCOL
from session_server.web.schemas import schemas_of
from session_server.web.tickets import TICKET_TTL_S

SCHEMA_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_TEMPLATE: Final = "#/$defs/{name}"


@dataclass(frozen=True, slots=True)
class Channel:
    """Describe one kind of socket: the types of what its clients send, and of what it sends them.
    `name` is that of its schema too."""

    name: str
    address: str
    about: str
    parameters: dict[str, str]
    query: dict[str, str]
    client: tuple[type[msgspec.Struct], ...]
    server: tuple[type[msgspec.Struct], ...]


CHANNELS: Final = (
    Channel(
        name=SUBPROTOCOL,
        address="/v1/sessions/{session_id}/ws",
        about=f"A session; the subprotocol is `{SUBPROTOCOL}`. The server speaks first.",
        parameters={"session_id": "a session's id; `new` opens one"},
        query={
            "after": "the last `seq` that was seen; what came behind it follows",
            "epoch": "that of the `session.opened` which `after` counts on from",
        },
        client=get_args(messages.ClientMessage),
        server=get_args(frames.AnyServerFrame),
    ),
    Channel(
        name=REALTIME,
        address="/v1/realtime",
        about="OpenAI's Realtime in text modality: one conversation.",
        parameters={},
        query={
            "model": "the model served, or nothing",
            "session_id": "a session that is open, or the id of a new one",
            "conversation_id": "the same by the id in `conversation.created`; it must be open",
            "last_event_id": "the last event that was seen; what came behind it follows",
            "x_events": "1: `input_text.drafted` is sent too",
        },
        client=get_args(realtime_messages.RealtimeClientEvent),
        server=get_args(realtime_frames.RealtimeServerEvent),
    ),
    Channel(
        name="responses",
        address="/v1/responses",
        about="The WebSocket mode of OpenAI's Responses: lanes of responses.",
        parameters={},
        query={},
        client=get_args(responses_socket.SocketMessage),
        server=(ResponseEvent, responses_socket.SteerFailed, responses_socket.SocketError),
    ),
)


_OFFER: Final = {"type": "httpApiKey", "in": "header", "name": "Sec-WebSocket-Protocol"}

CREDENTIALS: Final = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": f"a key in `Authorization`; for `{SUBPROTOCOL}` also in a first message, "
        "`session.auth`",
    },
    "offeredKey": {
        **_OFFER,
        "description": f"a key among the subprotocols: `{BEARER_PROTOCOL}KEY` "
        f"(`{KEY_PROTOCOL}KEY` for `{REALTIME}`)",
    },
    "ticket": {
        **_OFFER,
        "description": f"`{TICKET_PROTOCOL}TICKET` among the subprotocols. `POST /v1/ws-ticket` "
        f"with a key makes the ticket: it opens one socket of any kind, within {TICKET_TTL_S} "
        "seconds. For pages, in place of a key.",
    },
}
"""Ways to say who connects, one of which is enough, and none where the server asks for no key."""


def asyncapi_of(title: str, version: str) -> dict[str, Any]:
    """Return the AsyncAPI 3 document."""
    channels, operations = {}, {}
    for channel in CHANNELS:
        sent, received = _messages(channel, channel.server), _messages(channel, channel.client)
        channels[channel.name] = {
            "address": channel.address,
            "description": channel.about,
            "parameters": {key: {"description": text} for key, text in channel.parameters.items()},
            "messages": {**sent, **received},
            "bindings": {"ws": {"method": "GET", **_query(channel)}},
        }
        for action, named in (("receive", received), ("send", sent)):
            operations[f"{action}:{channel.name}"] = {
                "action": action,
                "channel": {"$ref": _pointer("channels", channel.name)},
                "security": [
                    {"$ref": _pointer("components", "securitySchemes", name)}
                    for name in CREDENTIALS
                ],
                "messages": [
                    {"$ref": _pointer("channels", channel.name, "messages", name)} for name in named
                ],
            }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": title, "version": version},
        "channels": channels,
        "operations": operations,
        "components": {"securitySchemes": CREDENTIALS},
    }


def schema_of(channel: Channel) -> dict[str, Any]:
    """Return the JSON Schema of everything that a kind of socket carries: what clients send is
    `ClientMessage`, what the server sends `ServerMessage`."""
    schemas = schemas_of((*channel.client, *channel.server), _TEMPLATE)
    directions = {
        "ClientMessage": _any_of(kind.__name__ for kind in channel.client),
        "ServerMessage": _any_of(kind.__name__ for kind in channel.server),
    }
    head = {"$schema": SCHEMA_DIALECT, "title": channel.name, **_any_of(directions)}
    return {**head, "$defs": {**directions, **schemas}}


def _query(channel: Channel) -> dict[str, Any]:
    fields = {key: {"type": "string", "description": text} for key, text in channel.query.items()}
    return {"query": {"type": "object", "properties": fields}} if fields else {}


def _any_of(names: Iterable[str]) -> dict[str, Any]:
    return {"anyOf": [{"$ref": _TEMPLATE.format(name=name)} for name in names]}


def _messages(channel: Channel, kinds: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
    """Return the messages of one direction by their `type`, or by their schema if they have several
    types."""
    document = f"schemas/{channel.name}.json"
    return {
        str(kind.__struct_config__.tag or kind.__name__): {
            "payload": {
                "schemaFormat": "application/schema+json;version=2020-12",
                "schema": {"$ref": f"{document}#/$defs/{kind.__name__}"},
            }
        }
        for kind in kinds
    }


def _pointer(*path: str) -> str:
    escaped = (step.replace("~", "~0").replace("/", "~1") for step in path)
    return "#/" + "/".join(escaped)
