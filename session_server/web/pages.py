"""Serve the chat page, the dashboard and the files they are made of.

The table of files is made at import; a name that is not in it is no file, wherever it points to.
The pages need no key: a browser could not send one. Everything they call does.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import NoMatchFound

from session_server.protocol.resources import IndexBody
from session_server.web.headers import ACCEPT, ACCEPT_ENCODING, IF_NONE_MATCH
from session_server.web.openapi import NEEDS_NO_KEY, answer, answers
from session_server.web.refusals import HttpRefusal, JsonResponse

router = APIRouter(tags=["pages"])
operators = APIRouter(tags=["operations"])
"""Routes about everybody's sessions, for the admin bind if there is one."""

HTML: Final = "text/html"
_MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
"""Files of other suffixes, such as licenses, lie beside these and are not served."""

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; manifest-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_DIRECTORY: Final = Path(__file__).parent / "static"


class Representation(NamedTuple):
    """The bytes of an answer, and their strong validator."""

    content: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class StaticFile:
    """Hold a file as it is, and as it is sent to those who accept gzip."""

    media: str
    plain: Representation
    zipped: Representation


def _static_file(path: Path) -> StaticFile:
    content = path.read_bytes()
    return StaticFile(_MEDIA[path.suffix], _body(content), _body(gzip.compress(content, mtime=0)))


def _body(content: bytes) -> Representation:
    return Representation(content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _takes_gzip(accepted: str) -> bool:
    """Return whether an `Accept-Encoding` names gzip, and not with a weight of 0."""
    for offer in accepted.lower().split(","):
        coding, _, weight = offer.partition(";")
        if coding.strip() == "gzip":
            return not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight)
    return False


_PUBLIC: Final = IndexBody(
    dashboard=msgspec.UNSET, metrics=msgspec.UNSET, memory=msgspec.UNSET, all_sessions=msgspec.UNSET
)
"""What is listed beside an admin bind, which serves the rest."""

FILES: Final = {
    path.relative_to(_DIRECTORY).as_posix(): _static_file(path)
    for path in sorted(_DIRECTORY.rglob("*"))
    if path.suffix in _MEDIA
}
"""Every file by the name under which it is served."""


@router.get(
    "/",
    openapi_extra=NEEDS_NO_KEY,
    responses=answers(IndexBody, "The chat page, for browsers; links to the API for programs.")
    | {304: answer(None, "The page has not changed.")},
)
async def index(request: Request) -> Response:
    """Show the chat page to whoever accepts HTML, and list the paths to everybody else."""
    if HTML in request.headers.get(ACCEPT, ""):
        return _send("index.html", request)
    try:
        request.app.url_path_for(dashboard.__name__)
    except NoMatchFound:
        return JsonResponse(_PUBLIC, headers={"vary": ACCEPT})
    return JsonResponse(IndexBody(), headers={"vary": ACCEPT})


@operators.get(
    "/dashboard",
    openapi_extra=NEEDS_NO_KEY,
    responses=answers(str, "The page.", media=HTML) | {304: answer(None, "It has not changed.")},
)
async def dashboard(request: Request) -> Response:
    """Show the dashboard."""
    return _send("dashboard.html", request)


@router.get(
    "/static/{name:path}",
    openapi_extra=NEEDS_NO_KEY,
    responses=answers(str, "The file.", media="text/*")
    | {304: answer(None, "It has not changed.")},
)
async def asset(name: str, request: Request) -> Response:
    """Send a file of the pages."""
    if name not in FILES:
        raise HttpRefusal(404, "The pages have no such file.")
    return _send(name, request)


def _send(name: str, request: Request) -> Response:
    file = FILES[name]
    is_zipped = _takes_gzip(request.headers.get(ACCEPT_ENCODING, ""))
    content, etag = file.zipped if is_zipped else file.plain
    headers = {
        "etag": etag,
        "cache-control": "no-cache",
        "vary": f"{ACCEPT}, {ACCEPT_ENCODING}",
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
    }
    known = request.headers.get(IF_NONE_MATCH, "").split(",")
    if etag in {tag.strip().removeprefix("W/") for tag in known}:
        return Response(status_code=304, headers=headers)
    encoding = {"content-encoding": "gzip"} if is_zipped else {}
    return Response(content, media_type=file.media, headers=headers | encoding)
