"""Every route is closed to whoever has no key, and what another key owns is nothing at all.

Routes are listed from the application, so that a new one is covered by itself.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections.abc import Awaitable, Iterable, Iterator
from types import FrameType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Message
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from session_server.web import app as web_app
from session_server.web.app import create_admin_app
from session_server.web.key_file import digest_of
from session_server.web.keys import KeyRing
from session_server.web.openapi import openapi_of
from session_server.web.requests import PUBLIC_ROUTES
from session_server.web.websocket_guard import CONNECTION
from tests.web.other_keys import OURS, PUBLIC_PARAMETERS, THEIRS, hold, unknown_like
from tests.web.serving import Served, served, turn

KEYS = KeyRing.of("secret", "other", "revoked")
PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def routes_of(routes: Iterable[Any]) -> Iterator[BaseRoute]:
    """Every route there is, those of included routers and mounted applications too."""
    for route in routes:
        inner = getattr(route, "original_router", route)
        below = getattr(inner, "routes", None)
        yield from routes_of(below) if below is not None else (route,)


def http_routes(app: FastAPI) -> Iterator[tuple[str, str, str]]:
    """(name, method, path) of every route of HTTP."""
    for route in routes_of(app.routes):
        if not isinstance(route, WebSocketRoute):
            for method in sorted(getattr(route, "methods", None) or ("GET",)):
                yield str(getattr(route, "name", "")), method, str(getattr(route, "path", "/"))


def socket_paths(this: Served) -> Iterator[str]:
    for route in routes_of(this.app.routes):
        if isinstance(route, WebSocketRoute):
            yield route.path


def test_routes_are_found_wherever_they_are() -> None:
    @served(keys=KEYS)
    async def check(this: Served) -> None:
        found = set(http_routes(this.app))
        assert ("get_session", "GET", "/v1/sessions/{session_id}") in found
        assert {name for name, *_ in found} >= PUBLIC_ROUTES
        assert len(found) > 50
        assert "/v1/realtime" in set(socket_paths(this))

    check()


def wrong_headers() -> Iterator[list[tuple[bytes, bytes]]]:
    """Headers that show no key of this server."""
    yield []
    for value in (
        *("Bearer", "bearer wrong", "Bearer revoked", "secret"),
        *("Token secret", "Basic c2VjcmV0OnNlY3JldA==", "Bearer secret extra", "Bearer secret,"),
        *("Bearer " + "s" * 600, f"Bearer sha256:{digest_of('secret')}", "Bearer\tsecret"),
        *(f"Bearer {digest_of('secret')}", 'Bearer "secret"', "Bearer secre", "Bearer secrett"),
    ):
        yield [(b"authorization", value.encode())]
    yield [(b"authorization", "Bearer secr\u00e9t".encode("latin-1"))]
    yield [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer secret")]
    yield [(b"authorization", b"Bearer secret"), (b"authorization", b"Bearer secret")]
    for name in (b"x-api-key", b"api-key", b"cookie", b"proxy-authorization"):
        yield [(name, b"Bearer secret")]


def revoke(this: Served) -> None:
    ring = this.services.settings.keys
    kept = {digest_of(key): ring.credential_of(key).owner for key in ("secret", "other")}
    ring.apply(ring.change_to(kept))


@served(keys=KEYS)
async def test_every_route_but_the_public_ones_needs_a_key(this: Served) -> None:
    ours = await hold(this, OURS)
    revoke(this)
    for name, method, path in http_routes(this.app):
        if name in PUBLIC_ROUTES:
            continue
        url = filled(path, ours.ids) + "?api_key=secret&key=secret&token=secret"
        for headers in wrong_headers():
            answer = await this.http.request(method, url, headers=headers)
            assert answer.status_code == 401, (method, path, headers)
            assert method == "HEAD" or answer.json()["error"]["code"] == "unauthorized"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert not ours.is_told_in(answer.text), (method, path)


@served(keys=KEYS, admin_port=1)
async def test_every_route_of_the_operators_bind_needs_a_key(this: Served) -> None:
    ours = await hold(this, OURS)
    revoke(this)
    app = create_admin_app(this.app)
    assert set(http_routes(app)) > set(http_routes(this.app))
    async with asked_in_process(app) as http:
        for name, method, path in http_routes(app):
            for headers in ({}, {"authorization": "Bearer revoked"}):
                answer = await http.request(method, filled(path, ours.ids), headers=headers)
                assert (answer.status_code == 401) == (name not in PUBLIC_ROUTES), (method, path)


@served(keys=KEYS, auth_timeout_s=0.05)
async def test_every_socket_needs_a_key(this: Served) -> None:
    ours = await hold(this, OURS)
    revoke(this)
    for path in socket_paths(this):
        url = this.url.replace("http", "ws", 1) + filled(path, ours.ids) + "?key=secret"
        for key in (None, "wrong", "revoked", digest_of("secret")):
            for origin in (None, this.url):
                offers = [*((f"bearer.{key}", f"ticket.{key}") if key else ()), "realtime"]
                offers += [f"openai-insecure-api-key.{key}"] if key else []
                code = await outcome_of(url, origin=origin, subprotocols=offers)
                assert code in ((401, 404) if origin is None and key else (401, 404, 4401)), path


async def outcome_of(url: str, **options: Any) -> int:
    """The status of a refused handshake, or the code with which a socket closes that says nothing
    but an error."""
    try:
        async with connect(url, proxy=None, compression=None, **options) as socket:
            with contextlib.suppress(ConnectionClosed):
                while True:
                    assert '"error"' in str(await socket.recv())
            assert socket.close_code is not None
            return socket.close_code
    except InvalidStatus as refused:
        return refused.response.status_code


TARGETS = (
    *("/v1/sessions/ID/", "//v1/sessions/ID", "/v1//sessions/ID", "/v1/sessions//ID"),
    *("/health/../v1/sessions/ID", "/health/%2e%2e/v1/sessions/ID", "/assets/../v1/sessions/ID"),
    *("/assets/%2e%2e/v1/sessions/ID", "/assets/..%2fv1%2fsessions%2fID", "/%2e/v1/sessions/ID"),
    *("/v1%2fsessions%2fID", "/V1/SESSIONS/ID", "/v1/sessions/ID;.css", "/v1/sessions/ID%00"),
    *(
        "/v1/sessions/ID%2f",
        "/v1/sessions/ID?x=/health",
        "/v1/sessions/ID#/health",
        "/v1/sessions/ID%20",
    ),
    *(
        "/health/v1/sessions/ID",
        "/docs/v1/sessions/ID",
        "/metrics",
        "/metrics/",
        "/health_generate",
    ),
    *(
        "/healthz",
        "/ready/../metrics",
        "/flush_cache",
        "/v1/sessions/ID/../ID",
        "*",
        "v1/sessions/ID",
    ),
    *("http://127.0.0.1/v1/sessions/ID", "http://x/health?/v1/sessions/ID", "/\\v1/sessions/ID"),
)
HOSTS = (
    *("127.0.0.1", "127.0.0.1/health?", "127.0.0.1/health#", "x/skip?", "127.0.0.1:80/health?"),
    *(
        "secret@127.0.0.1",
        "127.0.0.1, x",
        "[::1]/health",
        "127.0.0.1%2fhealth",
        "",
        "127.0.0.1\\health",
    ),
)
METHODS = ("GET", "HEAD", "OPTIONS", "PUT", "TRACE", "CONNECT", "PROPFIND", "get", "X")


@served(keys=KEYS)
async def test_no_spelling_of_a_request_gets_around_the_key(this: Served) -> None:
    ours = await hold(this, OURS)
    head = "{} {} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n"
    asked = [("GET", target, "127.0.0.1") for target in TARGETS]
    asked += [("GET", "/v1/sessions/ID", host) for host in HOSTS]
    asked += [(method, "/v1/sessions/ID", "127.0.0.1") for method in METHODS]
    asked += [("GET", target, host) for target in TARGETS[:6] for host in HOSTS[1:4]]
    for method, spelled, host in asked:
        target = spelled.replace("ID", ours.ids["session_id"])
        answer = (await this.until_closed(head.format(method, target, host).encode())).decode()
        assert re.match(r"HTTP/1.1 4\d\d ", answer), (method, target, host, answer[:60])
        assert not ours.is_told_in(answer), (method, target, host)


@served(keys=KEYS)
async def test_a_preflight_of_an_allowed_page_tells_of_no_session(this: Served) -> None:
    ours = await hold(this, OURS)
    headers = {"origin": this.url, "access-control-request-method": "GET"}
    for _, _, path in http_routes(this.app):
        answer = await this.http.request("OPTIONS", filled(path, ours.ids), headers=headers)
        assert answer.text == "OK" or answer.status_code >= 400
        assert not ours.is_told_in(answer.text)


# -- what another key owns


def filled(path: str, ids: dict[str, str]) -> str:
    """A path with its parameters. Say in `Holdings` of what a new kind of id is one."""
    return PARAMETER.sub(lambda match: ids[match[1]], path)


def owned_routes(app: FastAPI) -> Iterator[tuple[str, str, str]]:
    """Routes that name something of an owner's; to operators everybody's is known."""
    for name, method, path in http_routes(app):
        is_about_one = {*PARAMETER.findall(path)} - PUBLIC_PARAMETERS
        if is_about_one and name not in PUBLIC_ROUTES and not path.startswith("/v1/admin/"):
            yield name, method, path


def seen(answer: httpx.Response, ids: dict[str, str]) -> tuple[int, list[tuple[str, str]], str]:
    """All that an answer tells, but for the ids that were asked for, its time and its own name."""
    text = answer.text
    for each in ids.values():
        text = text.replace(each, "ID")
    own = ("date", "x-request-id")
    headers = [(key, value) for key, value in answer.headers.items() if key not in own]
    return answer.status_code, headers, text


BODIES: dict[str, Any] = {
    "create_turn": turn(),
    "draft_turn": {"draft_id": "d", "text": "x"},
    "rewind_session": {"to_item": None},
    "edit_item": {"content": "x"},
    "update_conversation": {"metadata": {}},
    "create_conversation_items": {"items": [{"role": "user", "content": "x"}]},
}


@served(keys=KEYS)
async def test_what_another_key_owns_is_as_unknown_as_what_never_was(this: Served) -> None:
    ours = await hold(this, OURS)
    unknown = unknown_like(ours.ids)
    num_compared = 0
    for name, method, path in owned_routes(this.app):
        answers = [
            await this.http.request(
                method, filled(path, ids), json=BODIES.get(name, {}), headers=THEIRS
            )
            for ids in (ours.ids, unknown)
        ]
        foreign, never = (seen(a, i) for a, i in zip(answers, (ours.ids, unknown), strict=True))
        assert foreign == never, (method, path)
        assert foreign[0] == 404, (method, path, foreign)
        num_compared += 1
    assert num_compared > 20
    assert await ours.is_whole(this), "nothing of it has changed"


def named_ids(document: dict[str, Any]) -> set[str]:
    """Properties of request bodies that look like the name of something."""
    schemas = document["components"]["schemas"]
    found: set[str] = set()
    todo = [
        operation["requestBody"]
        for path in document["paths"].values()
        for operation in path.values()
        if "requestBody" in operation
    ]
    visited: set[str] = set()
    while todo:
        match todo.pop():
            case {"$ref": str(reference)} if reference not in visited:
                visited.add(reference)
                todo.append(schemas[reference.rpartition("/")[2]])
            case dict(schema):
                found |= set(schema.get("properties", ()))
                todo += schema.values()
            case list(schemas_in_a_list):
                todo += schemas_in_a_list
            case _:
                pass
    return {name for name in found if re.search(r"(^|_)(id|ids|rid|item|conversation)$", name)} - {
        name for name in found if name.endswith("token_ids")
    }


CREATES = {"session_id", "id", "turn_id", "draft_id"}
"""Ids that a client may choose for something new of its own, beside what else they are."""

NO_NAMES = {"call_id", "tool_call_id", "input_ids"}
"""Of calls within a message, and of tokens."""


@served(keys=KEYS)
async def test_ids_in_bodies_and_queries_tell_nothing_of_what_another_key_owns(
    this: Served,
) -> None:
    ours, theirs = await hold(this, OURS), await hold(this, THEIRS, num_turns=1)
    unknown, used = unknown_like(ours.ids), set[str]()
    for method, path, body in theirs.requests():
        answers = [
            await this.http.request(
                method,
                path.replace("ID", chosen(body, ids)),
                json=with_id(body, ids),
                headers=THEIRS,
            )
            for ids in (ours.ids, unknown)
        ]
        foreign, never = (seen(a, i) for a, i in zip(answers, (ours.ids, unknown), strict=True))
        assert foreign == never, (method, path, body)
        assert foreign[0] in (200, 400, 404), (method, path, foreign)
        used |= named_in(body)
    known = named_ids(openapi_of(this.app))
    assert known - used - CREATES - NO_NAMES == set(), "say in `requests` what these name"
    assert await ours.is_whole(this)


def chosen(body: Any, ids: dict[str, str]) -> str:
    """The id that a request is about."""
    return next((ids[kind] for kind in ids if f"<{kind}>" in repr(body)), "")


def with_id(body: Any, ids: dict[str, str]) -> Any:
    """A body with `<kind>` replaced by the id of that kind."""
    match body:
        case dict():
            return {k: with_id(v, ids) for k, v in body.items() if k != "?"}
        case list():
            return [with_id(each, ids) for each in body]
        case str() if body.startswith("<"):
            return ids[body[1:-1]]
        case _:
            return body


def named_in(body: Any) -> set[str]:
    """The fields of a body that hold an id of another."""
    match body:
        case dict():
            here = {k for k, v in body.items() if isinstance(v, str) and v.startswith("<")}
            return here.union(*(named_in(each) for each in body.values()))
        case list():
            return set().union(*(named_in(each) for each in body))
        case _:
            return set()


SOCKETS_TO_SESSIONS = (
    "/v1/sessions/<session_id>/ws",
    "/v1/sessions/<session_id>/ws?after=0&epoch=x",
    "/v1/realtime?conversation_id=conv_<session_id>",
    "/v1/realtime?session_id=<session_id>&last_event_id=event_1",
)


def asked_in_process(app: FastAPI) -> httpx.AsyncClient:
    """A client that calls the application itself: nothing else runs in between."""
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def calls_during(work: Awaitable[object]) -> list[str]:
    """Every function of the server that is called, in order."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and "/session_server/" in code.co_filename:
            called.append(f"{code.co_filename}:{code.co_qualname}")

    gc.disable()
    sys.setprofile(note)
    try:
        await work
    finally:
        sys.setprofile(None)
        gc.enable()
    return called


def test_what_another_key_owns_takes_the_steps_of_what_never_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for period in ("TICK_S", "LAG_PROBE_S"):
        monkeypatch.setattr(web_app, period, 1e6)

    @served(keys=KEYS)
    async def check(this: Served) -> None:
        ours, theirs = await hold(this, OURS), await hold(this, THEIRS, num_turns=1)
        asked: list[tuple[str, str, Any]] = [
            (method, path, BODIES.get(name, {})) for name, method, path in owned_routes(this.app)
        ]
        # Items of one's own session count up, and are nobody's secret.
        asked += [each for each in theirs.requests() if "<item_id>" not in repr(each)]
        async with asked_in_process(this.app) as http:
            for method, path, body in asked:
                steps = []
                for ids in (ours.ids, unknown_like(ours.ids), ours.ids, unknown_like(ours.ids)):
                    url = filled(path.replace("ID", chosen(body, ids)), ids)
                    work = http.request(method, url, json=with_id(body, ids), headers=THEIRS)
                    steps.append(await calls_during(work))
                assert len(steps[2]) > 10, (method, path)
                assert steps[2] == steps[3], (method, path, body)  # after what is done only once
        for path in SOCKETS_TO_SESSIONS:
            unknown = unknown_like(ours.ids)
            asked_for = [
                path.replace("<session_id>", ids["session_id"]) for ids in (ours.ids, unknown)
            ]
            steps = [await calls_during(handshake(this.app, each)) for each in asked_for * 2]
            assert len(steps[2]) > 10, path
            assert steps[2] == steps[3], path

    check()


async def handshake(app: FastAPI, target: str) -> None:
    """Ask for a WebSocket in this process, and be refused."""
    path, _, query = target.partition("?")
    scope = {
        "type": "websocket",
        "scheme": "ws",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer other")],
        "client": ("127.0.0.1", 1),
        "subprotocols": [],
        "state": {CONNECTION: None},  # of which a refused handshake needs nothing
        "extensions": {"websocket.http.response": {}},
    }
    statuses: list[int] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        if message["type"] == "websocket.http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    assert statuses == [404], target


@served(keys=KEYS)
async def test_names_that_clients_choose_are_each_keys_own(this: Served) -> None:
    name = "shared-name"
    opened = [
        (await this.http.post("/v1/sessions", json={"id": name}, headers=key)).status_code
        for key in (OURS, THEIRS, THEIRS)
    ]
    assert opened == [201, 201, 409]
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    for key in (OURS, THEIRS):
        said = await this.http.post(
            "/v1/chat/completions", json=body, headers={**key, "x-session-id": "c"}
        )
        assert said.status_code == 200
    repeated = {
        (await this.http.post("/v1/sessions", headers={**key, "idempotency-key": "k"})).json()["id"]
        for key in (OURS, THEIRS)
        for _ in range(2)
    }
    assert len(repeated) == 2, "one each"


@served(keys=KEYS)
async def test_a_socket_to_what_another_key_owns_is_refused_as_to_what_never_was(
    this: Served,
) -> None:
    ours = await hold(this, OURS)
    unknown = unknown_like(ours.ids)
    for path in SOCKETS_TO_SESSIONS:
        for origin in (None, this.url):
            foreign, never = [
                await told_by_socket(this, path, ids, origin=origin) for ids in (ours.ids, unknown)
            ]
            assert foreign == never, (path, origin)
            assert foreign[0] in (404, 4404), (path, foreign)


async def told_by_socket(
    this: Served, path: str, ids: dict[str, str], *, origin: str | None
) -> tuple[int, list[str]]:
    """How a handshake ends, and what is said on the way."""
    url = this.url.replace("http", "ws", 1) + path.replace("<session_id>", ids["session_id"])
    options: dict[str, Any] = {"additional_headers": THEIRS, "origin": origin}
    told: list[str] = []
    try:
        async with connect(url, proxy=None, compression=None, **options) as socket:
            with contextlib.suppress(ConnectionClosed):
                while True:
                    told.append(without(str(await socket.recv()), ids))
            return int(socket.close_code or 0), told
    except InvalidStatus as refused:
        body = (refused.response.body or b"").decode()
        own = ("date", "x-request-id")
        kept = [
            f"{k}: {v}" for k, v in refused.response.headers.raw_items() if k.lower() not in own
        ]
        return refused.response.status_code, [without(body, ids), *kept]


def without(text: str, ids: dict[str, str]) -> str:
    for each in ids.values():
        text = text.replace(each, "ID")
    return re.sub(r'"event_id":"\w+"', "", text)


FRAMES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/responses",
        {"type": "response.create", "input": "x", "previous_response_id": "<response_id>"},
    ),
    (
        "/v1/responses",
        {"type": "response.create", "input": "x", "conversation": "<conversation_id>"},
    ),
    ("/v1/responses", {"type": "response.cancel", "response_id": "<response_id>"}),
    ("/v1/sessions/new/ws", {"type": "turn.cancel", "turn_id": "<turn_id>"}),
    ("/v1/sessions/new/ws", {"type": "session.rewind", "to_item": "<item_id>"}),
    ("/v1/sessions/new/ws", {"type": "session.fork", "at_item": "<item_id>"}),
    ("/v1/sessions/new/ws", {"type": "item.edit", "item_id": "<item_id>", "content": "x"}),
    ("/v1/realtime", {"type": "response.cancel", "response_id": "<response_id>"}),
    ("/v1/realtime", {"type": "conversation.item.delete", "item_id": "<item_id>"}),
    ("/v1/realtime", {"type": "conversation.item.retrieve", "item_id": "<item_id>"}),
)


@pytest.mark.parametrize(("path", "frame"), FRAMES)
def test_a_frame_that_names_what_another_key_owns_is_refused_as_one_that_names_nothing(
    path: str, frame: dict[str, Any]
) -> None:
    @served(keys=KEYS)
    async def check(this: Served) -> None:
        ours = await hold(this, OURS)
        told = [
            without(await refusal_in(this, path, with_id(frame, ids)), ids)
            for ids in (ours.ids, unknown_like(ours.ids))
        ]
        assert told[0] == told[1]
        assert await ours.is_whole(this)

    check()


async def refusal_in(this: Served, path: str, frame: dict[str, Any]) -> str:
    url = this.url.replace("http", "ws", 1) + path
    async with connect(url, proxy=None, compression=None, additional_headers=THEIRS) as socket:
        await socket.send(httpx.Request("POST", this.url, json=frame).content.decode())
        while True:
            text = str(await socket.recv())
            if '"error"' in text and '"type":"error"' in text:
                return text


def test_ids_that_the_server_makes_cannot_be_guessed() -> None:
    @served(keys=KEYS)
    async def check(this: Served) -> None:
        many = [await hold(this, OURS) for _ in range(3)]
        for kind in ("session_id", "response_id", "conversation_id"):
            random = [re.sub(r"^[a-z]+_", "", each.ids[kind]) for each in many]
            assert all(re.fullmatch(r"[0-9a-f]{32,}", each) for each in random), (kind, random)
            alike = max(
                sum(a == b for a, b in zip(one, other, strict=True))
                for one in random
                for other in random
                if one != other
            )
            assert alike <= len(random[0]) // 2, "128 bits, none of which is a count"

    check()
