"""Print what several commands print alike: tables, and why a server could not be used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Final

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from session_server.client import ClientError, ConnectionLost, Refused, UntrustedServer
from session_server.core.owner import KEY_VARIABLE
from session_server.local_server import ServerFailed

SERVER_FAILURES: Final = (ServerFailed, ClientError, httpx.HTTPError)
"""Errors that `print_failure` explains."""

_OBEYED: Final = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

NOT_HTTP: Final = "did not receive a valid HTTP response"
"""What websockets says of a peer that speaks something else, such as TLS."""

NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""What ssl says of a peer that does not speak TLS, such as a server without a certificate."""


def printable(text: str) -> str:
    """Return a text of others without what a terminal would obey: control characters and marks
    that turn the direction of writing are shown as escapes, but for newlines and tabs."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def make_table(
    columns: Iterable[str | Column], rows: Iterable[Sequence[object]] = (), *, title: str = ""
) -> Table:
    """Return a table of rows. A column given by its name alone is aligned to the right."""
    all_columns = (Column(c, justify="right") if isinstance(c, str) else c for c in columns)
    table = Table(
        *all_columns, title=title or None, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    return table


def print_failure(
    error: Exception,
    console: Console,
    *,
    key: str | None,
    prefix: str = "",
    advice: str = "`session-server serve` starts one",
) -> int:
    """Print why a command could not use its server, and what to do. Return exit status 1.

    `key`: the API key that the server was given. `advice` follows the question whether a server is
    running there. Lines are not wrapped: an address stays in one piece.
    """
    is_refused = isinstance(error, Refused) and error.code == "unauthorized"
    text = str(error)
    if isinstance(error, httpx.HTTPStatusError):
        response = error.response
        is_refused = response.status_code == HTTPStatus.UNAUTHORIZED
        text = f"{response.status_code}: {response.text[:400]}"
        with suppress(ValueError, KeyError, TypeError):  # from another kind of server
            text = f"{response.status_code}: {response.json()['error']['message']}"
    elif isinstance(error, httpx.HTTPError):
        text = f"no answer from {error.request.url}: {error}"
    console.print(f"[red]{prefix}{escape(printable(text))}[/]", soft_wrap=True)
    if is_refused:
        what = "does not know the key of" if key else "requires an API key: pass"
        console.print(f"this server {what} --api-key or {KEY_VARIABLE}", soft_wrap=True)
    if isinstance(error, UntrustedServer) or "CERTIFICATE_VERIFY_FAILED" in text:
        console.print("pass --ca-file FILE with the certificate of who signed it", soft_wrap=True)
    elif isinstance(error, httpx.TransportError | ConnectionLost):
        if NOT_HTTP in text or isinstance(error, httpx.RemoteProtocolError):
            advice = "behind TLS it is at an https:// address"
        elif any(name in text for name in NOT_TLS):
            advice = "without TLS it is at an http:// address"
        console.print(f"is a server running there? {advice}", soft_wrap=True)
    return 1
