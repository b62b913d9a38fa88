"""Parse the address of a server, and build the header that authenticates to it."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from session_server.client.errors import BadAddress

_HTTP_SCHEMES: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


def server_address(text: str) -> str:
    """Return `http(s)://HOST:PORT` without a slash at its end, for the paths of a server's routes.

    A `/v1` at its end, as other clients are given it, is left out.

    Raises:
        BadAddress: `text` is not http(s) or ws(s) to a host, with a port or without one.
    """
    try:
        parts = urlsplit(text)
        is_whole = parts.scheme in _HTTP_SCHEMES and bool(parts.hostname) and parts.port != 0
        is_whole = is_whole and not parts.query and not parts.fragment
    except ValueError:  # a port that is not a number, an unmatched bracket
        is_whole = False
    if not is_whole:
        raise BadAddress(f"{text!r} is no address of a server; give one as http://HOST:PORT")
    _, _, rest = text.rstrip("/").removesuffix("/v1").rstrip("/").partition("://")
    return f"{_HTTP_SCHEMES[parts.scheme]}://{rest}"


def key_header(key: str | None) -> dict[str, str]:
    """Return the header with the server's key; empty without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def socket_address(text: str) -> str:
    """Return `ws(s)://HOST:PORT` of the same server. Raises as `server_address` does."""
    return "ws" + server_address(text).removeprefix("http")
