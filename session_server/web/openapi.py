"""Publish the routes as an OpenAPI document.

Schemas come from the structs that encode and decode the wire format, so they always match it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from session_server.protocol import (
    chat_answer,
    chat_completions,
    completions,
    frames,
    generation_body,
    messages,
    operations,
    resources,
    response_body,
    response_events,
    responses,
    sglang,
)
from session_server.protocol.errors import ErrorResponse
from session_server.web.refusals import JSON
from session_server.web.schemas import schemas_of

COMPONENTS: Final[tuple[Any, ...]] = (
    messages.OpenBody,
    messages.UpdateBody,
    messages.TurnBody,
    messages.DraftBody,
    messages.CancelBody,
    messages.RewindBody,
    messages.ForkBody,
    messages.EditBody,
    resources.IndexBody,
    resources.SessionBody,
    resources.SessionList,
    resources.TicketBody,
    resources.TenantUsageBody,
    resources.TurnResultBody,
    resources.DraftResultBody,
    resources.ItemList,
    resources.ModelBody,
    resources.ModelList,
    chat_completions.ChatBody,
    chat_answer.ChatCompletion,
    completions.CompletionBody,
    completions.TextCompletion,
    responses.ResponseCreateBody,
    responses.InputTokensBody,
    responses.CompactBody,
    responses.ConversationCreateBody,
    responses.ConversationUpdateBody,
    responses.ConversationItemsBody,
    response_body.ConversationBody,
    response_body.ConversationDeleted,
    response_body.ResponseBody,
    response_events.ResponseEvent,
    response_body.ResponseDeleted,
    response_body.ResponseItems,
    response_body.InputTokenCount,
    response_body.CompactionBody,
    chat_answer.ChatChunk,
    resources.MemoryBody,
    operations.SampleBody,
    operations.AdminSessionBody,
    operations.AdminSessionList,
    resources.StatusBody,
    sglang.OpenSessionBody,
    sglang.CloseSessionBody,
    sglang.GenerateBody,
    sglang.AbortBody,
    generation_body.GenerationBody,
    frames.AnyServerFrame,
    ErrorResponse,
)
EVENTS: Final = "text/event-stream"
NEEDS_NO_KEY: Final[dict[str, Any]] = {"security": []}
"""For `openapi_extra` of the public routes."""

_TEMPLATE: Final = "#/components/schemas/{name}"


def body_of(
    kind: type[msgspec.Struct], *, required: bool = True, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return OpenAPI's description of a body of this kind, for `openapi_extra`.

    `headers`: what the route reads besides, and what that means.
    """
    content = {JSON: {"schema": _schema_of(kind)}}
    body = {"required": required, "content": content}
    return {"requestBody": body, "parameters": _header_parameters(headers or {})}


def reads_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return OpenAPI's description of a route that reads headers and no body."""
    return {"parameters": _header_parameters(headers)}


def answer(kind: Any, text: str, *, media: str = JSON, events: Any = None) -> dict[str, Any]:
    """Return OpenAPI's description of one answer.

    Args:
        kind: the type of its content; None if it has none.
        events: the type of what each event holds, where the answer may be a stream of them.
    """
    content: dict[str, Any] = {}
    if kind is not None:
        content[media] = {"schema": _schema_of(kind)}
    if events is not None:
        data = {"type": "string", "contentMediaType": JSON, "contentSchema": _schema_of(events)}
        content[EVENTS] = {
            "schema": {
                "type": "object",
                "description": "Server-sent events; each has:",
                "properties": {"data": data},
                "required": ["data"],
            }
        }
    return {"description": text, "content": content} if content else {"description": text}


def answers(
    kind: Any, text: str, *, status: int = 200, media: str = JSON, events: Any = None
) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's description of the answers of a route, for `responses`."""
    refused = answer(ErrorResponse, "Refused; `error.code` says why.")
    return {status: answer(kind, text, media=media, events=events), "default": refused}


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    document.setdefault("components", {})["schemas"] = schemas_of(COMPONENTS, _TEMPLATE)
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    return document


def _schema_of(kind: Any) -> dict[str, Any]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        # Routes are declared at import, which should not wait for schemas that few ask for.
        return {"$ref": _TEMPLATE.format(name=kind.__name__)}
    (schema,), _ = msgspec.json.schema_components((kind,), ref_template=_TEMPLATE)
    return schema


def _header_parameters(headers: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
        for name, text in headers.items()
    ]
