"""What a page of a browser may do here: one rule, however it asks."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest

import session_server.web
from session_server.web import headers
from session_server.web.keys import KeyRing
from tests.rig.raw_peer import upgrade
from tests.web.serving import Served, served

WEB = Path(session_server.web.__file__).parent
LISTED = "https://app.example"
FAR: dict[str, Any] = {"host": "0.0.0.0", "hosts": ("server.example",)}
NEAR: dict[str, Any] = {"host": "127.0.0.1"}
OWN, LOOPBACK, OTHER = "http://{host}", "http://localhost:5173", "https://evil.example"


@pytest.mark.parametrize(
    ("bound", "origin", "is_allowed"),
    [
        (NEAR, OWN, True),
        (NEAR, LOOPBACK, True),
        (NEAR, "http://[::1]:8080", True),
        (NEAR, LISTED, True),
        (NEAR, OTHER, False),
        (NEAR, "http://localhost.evil.example", False),
        (NEAR, "null", False),
        (NEAR, "http://[", False),
        (NEAR, "http://[::1", False),
        (NEAR, "http://[nothing]", False),
        (FAR, OWN, True),
        (FAR, LISTED, True),
        (FAR, LOOPBACK, False),
        (FAR, OTHER, False),
    ],
)
def test_a_page_may_open_a_socket_where_it_may_fetch(
    bound: dict[str, Any], origin: str, is_allowed: bool
) -> None:
    @served(**bound, allowed_origins=(LISTED + "/",))
    async def test(this: Served) -> None:
        name = "127.0.0.1" if bound is NEAR else "server.example"
        host = f"{name}:{this.port}"
        sent = {"origin": origin.format(host=host), "host": host}
        fetched = await this.http.get("/v1/models", headers=sent)
        assert fetched.status_code == (200 if is_allowed else 403)
        may_read = sent["origin"] in (
            fetched.headers.get("access-control-allow-origin"),
            f"http://{host}",
        )
        assert may_read == is_allowed
        said = f"Host: {host}\r\nOrigin: {sent['origin']}\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", this.port)
        writer.write(upgrade("new").replace(b"Host: localhost\r\n", said))
        answer = await reader.readuntil(b"\r\n\r\n")
        assert int(answer.split()[1]) == (101 if is_allowed else 403)
        writer.close()

    test()


@served(allowed_origins=(LISTED,))
async def test_a_preflight_allows_every_header_that_a_route_reads(this: Served) -> None:
    for name in headers.READ_BY_ROUTES:
        answer = await this.http.options(
            "/v1/sessions",
            headers={
                "origin": LISTED,
                "access-control-request-method": "POST",
                "access-control-request-headers": name,
            },
        )
        assert answer.status_code == 200, (name, answer.text)
    answer = await this.http.post("/v1/sessions", json={}, headers={"origin": LISTED})
    assert "location" in answer.headers["access-control-expose-headers"].lower()


def test_routes_read_no_header_that_a_preflight_does_not_allow() -> None:
    declared = {value for name, value in vars(headers).items() if name.isupper() and value}
    read = {value for value in declared if isinstance(value, str)} - set(headers.SHOWN_TO_PAGES)
    # A request id is read and shown; trace contexts and conversations have several names.
    read |= {headers.REQUEST_ID, *headers.TRACE_CONTEXT, *headers.CONVERSATION_NAMES}
    assert read == set(headers.READ_BY_ROUTES)
    literal = [
        f"{path.name}:{node.lineno}"
        for path in sorted(WEB.glob("*.py"))
        if path.name != "request_guard.py"  # what it reads no page can set
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("get", "getlist")
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "headers"
        and isinstance(node.args[0], ast.Constant)
    ]
    assert not literal, "name them in web/headers.py"


@served()
async def test_no_session_comes_or_goes_by_a_get(this: Served) -> None:
    session_id = await this.open()
    for path in ("/open_session", "/close_session", "/abort_request"):
        answer = await this.http.request("GET", path, json={"session_id": session_id})
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST"), path
    assert this.sessions.stats().sessions == 1


@served()
async def test_what_another_page_embeds_is_refused_and_what_a_person_opens_is_not(
    this: Served,
) -> None:
    image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    link = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    for sent, status in (
        (image, 403),
        (image | {"sec-fetch-site": "same-site"}, 403),
        (image | {"sec-fetch-site": "same-origin"}, 200),
        (image | {"sec-fetch-site": "none"}, 200),
        (link, 200),
        (link | {"sec-fetch-dest": "iframe"}, 403),
    ):
        answer = await this.http.get("/health_generate", headers=sent)
        assert answer.status_code == status, sent
        # A page may send its visitors here, so that a link changes nothing either.
        assert (await this.http.get("/flush_cache", headers=sent)).status_code == 403
    # Browsers say no Sec-Fetch-Site to a server of the local network.
    old = await this.http.get("/flush_cache", headers={"user-agent": "Mozilla/5.0"})
    assert old.status_code == 403
    assert (await this.http.get("/flush_cache")).status_code == 200
    own = image | {"sec-fetch-site": "same-origin"}
    assert (await this.http.post("/flush_cache", headers=own)).status_code == 200
    form = await this.http.post("/open_session", content=b"{}", headers=link)
    assert form.status_code == 403


@pytest.mark.parametrize(
    ("settings", "name", "status"),
    [
        ({"host": "0.0.0.0"}, "server.example", 421),
        ({"host": "0.0.0.0"}, "192.0.2.7", 200),
        ({"host": "0.0.0.0"}, "[2001:db8::1]", 200),
        ({"host": "0.0.0.0"}, "localhost", 200),
        ({"host": "0.0.0.0", "hosts": ("server.example",)}, "server.example", 200),
        ({"host": "0.0.0.0", "hosts": ("server.example",)}, "other.example", 421),
        ({"host": "0.0.0.0", "keys": KeyRing.of("k")}, "server.example", 200),
        (
            {"host": "0.0.0.0", "keys": KeyRing.of("k"), "hosts": ("server.example",)},
            "other.example",
            421,
        ),
        ({"host": "127.0.0.1"}, "server.example", 421),
        ({"host": "127.0.0.1"}, "192.0.2.7", 421),
        ({"host": "127.0.0.1", "hosts": ("Server.Example",)}, "server.example", 200),
        ({"host": "127.0.0.2"}, "127.0.0.2", 200),
    ],
)
def test_a_name_that_may_be_a_strangers_is_answered_only_where_a_key_is_asked_for(
    settings: dict[str, Any], name: str, status: int
) -> None:
    @served(**settings)
    async def test(this: Served) -> None:
        answer = await this.http.get("/health", headers={"host": f"{name}:80"})
        assert answer.status_code == status

    test()
