"""Publish the API: OpenAPI for the routes, AsyncAPI for the WebSocket.

Schemas come from the structs that encode and decode the wire format, so they always match it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from session_server.protocol import (
    chat_answer,
    chat_completions,
    frames,
    messages,
    resources,
    sglang,
)
from session_server.protocol.errors import ErrorResponse
from session_server.protocol.session_protocol import SUBPROTOCOL
from session_server.web.refusals import JSON

_COMPONENTS: Final[tuple[Any, ...]] = (
    messages.OpenBody,
    messages.UpdateBody,
    messages.TurnBody,
    messages.CancelBody,
    messages.RewindBody,
    messages.ForkBody,
    messages.EditBody,
    resources.IndexBody,
    resources.SessionBody,
    resources.SessionList,
    resources.TurnResultBody,
    resources.ItemList,
    resources.ModelBody,
    resources.ModelList,
    chat_completions.ChatBody,
    chat_answer.ChatCompletion,
    resources.MemoryBody,
    resources.StatusBody,
    sglang.OpenSessionBody,
    sglang.CloseSessionBody,
    sglang.GenerateBody,
    sglang.AbortBody,
    frames.AnyServerFrame,
    ErrorResponse,
)
_TEMPLATE: Final = "#/components/schemas/{name}"


def body_of(kind: type[msgspec.Struct], *, required: bool = True) -> dict[str, Any]:
    """Return OpenAPI's description of a body of this kind, for `openapi_extra`."""
    content = {JSON: {"schema": {"$ref": _TEMPLATE.format(name=kind.__name__)}}}
    return {"requestBody": {"required": required, "content": content}}


def answers(
    kind: type[msgspec.Struct] | None, text: str, *, status: int = 200
) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's description of the answers of a route, for `responses`."""
    success: dict[str, Any] = {"description": text}
    if kind is not None:
        success["content"] = {JSON: {"schema": {"$ref": _TEMPLATE.format(name=kind.__name__)}}}
    error = {"schema": {"$ref": _TEMPLATE.format(name="ErrorResponse")}}
    refused = {"description": "Refused; `error.code` says why.", "content": {JSON: error}}
    return {status: success, "default": refused}


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, schemas = msgspec.json.schema_components(_COMPONENTS, ref_template=_TEMPLATE)
    document.setdefault("components", {})["schemas"] = schemas
    for path in document["paths"].values():
        for operation in path.values():
            # FastAPI adds a 422 that this server never sends.
            operation["responses"].pop("422", None)
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    return document


def asyncapi_of(app: FastAPI) -> dict[str, Any]:
    """Return the AsyncAPI 3 document of `kvsession.v1`."""
    _, schemas = msgspec.json.schema_components(
        (messages.ClientMessage, frames.AnyServerFrame), ref_template=_TEMPLATE
    )
    sent = _messages(frames.AnyServerFrame)
    received = _messages(messages.ClientMessage)
    channel = {
        "address": "/v1/sessions/{session_id}/ws",
        "description": f"Subprotocol {SUBPROTOCOL}; the id `new` opens a session.",
        "parameters": {"session_id": {"description": "a session's id, or `new`"}},
        "messages": {**sent, **received},
    }
    ref = {"$ref": "#/channels/session"}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": app.title, "version": app.version},
        "channels": {"session": channel},
        "operations": {
            "receive": {"action": "receive", "channel": ref, "messages": _refs(received)},
            "send": {"action": "send", "channel": ref, "messages": _refs(sent)},
        },
        "components": {"schemas": schemas},
    }


def _messages(union: Any) -> dict[str, Any]:
    return {
        str(kind.__struct_config__.tag): {"payload": {"$ref": _TEMPLATE.format(name=kind.__name__)}}
        for kind in union.__args__
    }


def _refs(named: dict[str, Any]) -> list[dict[str, str]]:
    return [{"$ref": f"#/channels/session/messages/{name}"} for name in named]
