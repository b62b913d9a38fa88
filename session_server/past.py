"""Show what a session that is resumed goes on from."""

from __future__ import annotations

import ssl
from typing import Any, Final
from urllib.parse import quote

import httpx

from session_server.client import key_header, server_address

MAX_SHOWN: Final = 1000
"""Characters of one message that are shown."""

_MARKS: Final = {"user": "you >", "assistant": " it >"}


def past_lines(
    url: str, session_id: str, *, key: str | None, trust: ssl.SSLContext | None
) -> list[str]:
    """Return how many turns and tokens a session has, and its last question and answer.

    Returns no lines where the server does not tell.
    """
    address = f"{server_address(url)}/v1/sessions/{quote(session_id, safe='')}"
    try:
        with httpx.Client(
            headers=key_header(key), timeout=10.0, trust_env=False, verify=trust or True
        ) as client:
            session = client.get(address).raise_for_status().json()
            items = client.get(f"{address}/items").raise_for_status().json()["data"]
        return [count_line(session["turns"], session["tokens"]), *_last_said(items)]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return []


def count_line(num_turns: int, num_tokens: int) -> str:
    """Describe the length of a past: `goes on from 1 turn, 22 tokens`."""
    turns = "1 turn" if num_turns == 1 else f"{num_turns:,} turns"
    return f"goes on from {turns}, {num_tokens:,} tokens"


def _last_said(items: list[dict[str, Any]]) -> list[str]:
    """Return the newest message of the user and what followed, without what tools gave."""
    said = [item for item in items if item["role"] in _MARKS and item["content"]]
    asked = [at for at, item in enumerate(said) if item["role"] == "user"]
    last = said[asked[-1] :] if asked else said[-1:]
    return [f"{_MARKS[item['role']]} {_shortened(item['content'])}" for item in last]


def _shortened(text: str) -> str:
    """Cut a long text in its middle: its end is what is gone on from."""
    if len(text) <= MAX_SHOWN:
        return text
    half = MAX_SHOWN // 2
    return f"{text[:half]} ... {text[-half:]}"
