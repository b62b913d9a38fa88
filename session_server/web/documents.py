"""Serve the published contract: a page for people, and the documents that programs read.

They are the same for every server of a version and need no key: a browser could not send one.
"""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from session_server.web.asyncapi import CHANNELS, Channel, asyncapi_of, schema_of
from session_server.web.openapi import NEEDS_NO_KEY, answers, openapi_of
from session_server.web.refusals import HttpRefusal, JsonResponse

router = APIRouter(tags=["documents"])

_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""The page runs nothing and loads nothing."""

_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}td{padding:.1rem 1rem .1rem 0;vertical-align:top}"
    "code{font-size:.9em}"
)


@router.get(
    "/openapi.json",
    openapi_extra=NEEDS_NO_KEY,
    responses=answers(dict[str, Any], "The routes, as OpenAPI."),
)
async def openapi(request: Request) -> Response:
    """Describe every route."""
    return JsonResponse(_openapi(request.app))


@router.get(
    "/asyncapi.json",
    openapi_extra=NEEDS_NO_KEY,
    responses=answers(dict[str, Any], "The sockets, as AsyncAPI."),
)
async def asyncapi(request: Request) -> Response:
    """Describe every kind of socket."""
    return JsonResponse(asyncapi_of(request.app.title, request.app.version))


@router.get(
    "/schemas/{name}.json",
    openapi_extra=NEEDS_NO_KEY,
    responses=answers(dict[str, Any], "What it carries, as JSON Schema."),
)
async def schema(name: str) -> Response:
    """Describe every frame of one kind of socket."""
    return JsonResponse(schema_of(_channel(name)))


@router.get(
    "/docs", openapi_extra=NEEDS_NO_KEY, responses=answers(str, "The page.", media="text/html")
)
async def docs(request: Request) -> Response:
    """Show a page of links to the documents, with every route and socket."""
    return HTMLResponse(_page(request.app), headers=_HEADERS)


def published(app: FastAPI) -> dict[str, dict[str, Any]]:
    """Return every document by its path."""
    schemas = {f"schemas/{channel.name}.json": schema_of(channel) for channel in CHANNELS}
    sockets = asyncapi_of(app.title, app.version)
    return {"openapi.json": _openapi(app), "asyncapi.json": sockets, **schemas}


def _channel(name: str) -> Channel:
    for channel in CHANNELS:
        if channel.name == name:
            return channel
    known = ", ".join(channel.name for channel in CHANNELS)
    raise HttpRefusal(404, f"There is no such schema. There are: {known}.")


@cache
def _openapi(app: FastAPI) -> dict[str, Any]:
    return openapi_of(app)


@cache
def _page(app: FastAPI) -> str:
    links = "".join(f'<li><a href="/{path}">{path}</a></li>' for path in published(app))
    operations = (
        (f"{method.upper()} {path}", operation.get("description", "").partition("\n\n")[0])
        for path, item in _openapi(app)["paths"].items()
        for method, operation in item.items()
    )
    sockets = ((f"WS {channel.address}", channel.about) for channel in CHANNELS)
    rows = "".join(
        f"<tr><td><code>{escape(what)}</code></td><td>{escape(about)}</td></tr>"
        for what, about in (*operations, *sockets)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(app.title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(app.title)} {escape(app.version)}</h1>"
        f"<p>{escape(app.description)}</p><ul>{links}</ul><table>{rows}</table></html>\n"
    )
