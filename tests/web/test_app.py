"""Every route: closed by default, described in full, refusing in one shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.routing import BaseRoute, Route, WebSocketRoute
from websockets.exceptions import InvalidStatus

from session_server.core.commands import ReportMemory
from session_server.core.errors import WIRE_ERRORS, SessionServerError
from session_server.core.events import EngineResumed, EngineStalled, TierReport
from session_server.core.owner import ANONYMOUS
from session_server.sessions import engine_link
from session_server.web.keys import KeyRing
from session_server.web.refusals import error_response
from session_server.web.requests import PUBLIC_ROUTES
from tests.docs import published
from tests.engine_stats import engine_stats
from tests.web.realtime_client import realtime
from tests.web.serving import Served, served

KEYS = KeyRing.of("secret", "other")


@served(keys=KEYS)
async def test_every_route_but_the_probes_wants_a_key(this: Served) -> None:
    num_closed = 0
    for method, path, name in http_routes(this):
        answer = await this.http.request(method, path)
        if name in PUBLIC_ROUTES:
            assert answer.status_code in (200, 404), path
            continue
        assert answer.status_code == 401, (method, path)
        assert answer.json()["error"]["code"] == "unauthorized"
        assert answer.headers["www-authenticate"] == "Bearer"
        num_closed += 1
    assert num_closed >= 25
    sockets = [r for r in all_routes(this.app.router) if isinstance(r, WebSocketRoute)]
    served_paths = ["/v1/sessions/{session_id}/ws", "/v1/realtime", "/v1/responses"]
    assert [route.path for route in sockets] == [*served_paths, "/{path:path}"]
    with pytest.raises(InvalidStatus) as refused:
        async with this.socket(additional_headers={"authorization": "Bearer wrong"}):
            pass
    assert refused.value.response.status_code == 401
    with pytest.raises(InvalidStatus) as refused:
        async with realtime(this.url, additional_headers={"authorization": "Bearer wrong"}):
            pass
    assert refused.value.response.status_code == 401


@served(keys=KEYS)
async def test_no_trick_of_the_header_opens_a_route(this: Served) -> None:
    tricks = ["secret", "Basic secret", "Bearer", "Bearer secre", "Bearer secret x", ""]
    for trick in tricks:
        answer = await this.http.get("/v1/models", headers={"authorization": trick})
        assert answer.status_code == 401, trick
    for path in ("/v1/models?key=secret", "/health/../v1/models", "//v1/models", "/v1/models/"):
        assert (await this.http.get(path)).status_code in (401, 404), path
    good = await this.http.get("/v1/models", headers={"authorization": "bearer secret"})
    assert good.status_code == 200


@served(keys=KEYS)
async def test_another_owners_session_does_not_exist(this: Served) -> None:
    mine = {"authorization": "Bearer secret"}
    theirs = {"authorization": "Bearer other"}
    opened = await this.http.post("/v1/sessions", json={"id": "s"}, headers=mine)
    assert opened.status_code == 201
    for method, path, body in (
        ("GET", "/v1/sessions/s", None),
        ("PATCH", "/v1/sessions/s", {"ttl_s": 9}),
        ("DELETE", "/v1/sessions/s", None),
        ("GET", "/v1/sessions/s/items", None),
        ("GET", "/v1/sessions/s/events", None),
        ("POST", "/v1/sessions/s/turns", {"text": "a"}),
        ("POST", "/v1/sessions/s/turns/t/cancel", {}),
    ):
        foreign = await this.http.request(method, path, json=body, headers=theirs)
        elsewhere = path.replace("sessions/s", "sessions/unknown")
        unknown = await this.http.request(method, elsewhere, json=body, headers=theirs)
        assert foreign.status_code == unknown.status_code == 404, (method, path)
        assert foreign.json() == unknown.json()
    assert (await this.http.get("/v1/sessions", headers=theirs)).json()["data"] == []


@served()
async def test_what_is_not_there_is_refused_in_the_one_shape(this: Served) -> None:
    for method, path, status, code in (
        ("GET", "/nope", 404, "not_found"),
        ("PUT", "/v1/sessions", 405, "method_not_allowed"),
        ("TRACE", "/v1/sessions", 405, "method_not_allowed"),
        ("GET", "/v1/sessions?limit=0", 400, "invalid_request"),
        ("GET", "/v1/sessions?limit=1001", 400, "invalid_request"),
        ("GET", "/v1/sessions?limit=x", 400, "invalid_request"),
        ("GET", "/v1/admin/memory?full=2", 400, "invalid_request"),
        ("GET", "/v1/sessions/%00", 404, "session_not_found"),
        ("GET", "/v1/sessions/a%0Ab", 404, "session_not_found"),
    ):
        answer = await this.http.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code), (method, path)
        assert set(error) == {"type", "code", "message", "param"}


def test_a_bug_of_ours_shows_no_detail_and_every_refusal_its_row() -> None:
    bug = error_response(ValueError("the secret prompt"))
    assert bug.status_code == 500
    assert b"secret" not in bytes(bug.body)
    for kind, row in WIRE_ERRORS.items():
        refusal: SessionServerError = kind("no\nnews", param="p")
        response = error_response(refusal)
        error = json.loads(bytes(response.body))["error"]
        assert (response.status_code, error["code"]) == (row.status, row.code)
        assert "\n" not in error["message"]
        assert ("retry-after" in response.headers) == (row.status in (429, 503))


@served()
async def test_a_wrong_method_is_told_all_that_are_right(this: Served) -> None:
    for path, methods in (
        ("/v1/sessions", "GET, POST"),
        ("/v1/sessions/s_1", "DELETE, GET, PATCH"),
        ("/v1/chat/completions", "POST"),
    ):
        answer = await this.http.request("PUT", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)
        assert answer.json()["error"]["message"] == f"This path takes {methods}."


@served()
async def test_a_part_of_a_message_says_its_type(this: Served) -> None:
    said = {"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}
    answer = await this.http.post("/v1/sessions", json=said)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].type"


@served()
async def test_the_openapi_document_names_every_route_body_and_answer(this: Served) -> None:
    document = (await this.http.get("/openapi.json")).json()
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    routes = {
        (method, path.replace(":path}", "}"))
        for method, path, _ in http_routes(this, as_declared=True)
    }
    assert described == routes
    names = set(document["components"]["schemas"])
    assert {"OpenBody", "TurnBody", "SessionBody", "TurnResultBody", "GenerateBody"} <= names
    for item in document["paths"].values():
        for operation in item.values():
            assert operation["responses"]["default"]
            assert "422" not in operation["responses"], "never sent"
    public = {
        operation["operationId"].partition("_")[0]
        for item in document["paths"].values()
        for operation in item.values()
        if operation.get("security") == []
    }
    assert public == PUBLIC_ROUTES
    operations = [op["operationId"] for item in document["paths"].values() for op in item.values()]
    assert len(operations) == len(set(operations))
    listing = document["paths"]["/v1/sessions"]["get"]["parameters"]
    (limit,) = (each["schema"] for each in listing if each["name"] == "limit")
    assert (limit["minimum"], limit["maximum"], limit["default"]) == (1, 1000, 100)


@served(keys=KEYS)
async def test_the_documents_served_are_those_of_the_repository(this: Served) -> None:
    page = await this.http.get("/docs")
    assert "script" not in page.text
    assert "A store that cannot\nbe written to is told of" in page.text, "sentences are whole"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path, text in published.files().items():
        name = path.relative_to(published.DOCS)
        assert f'href="/{name}"' in page.text
        assert (await this.http.get(f"/{name}")).json() == json.loads(text)
    unknown = await this.http.get("/schemas/nothing.json")
    assert unknown.status_code == 404
    assert "kvsession.v1" in unknown.json()["error"]["message"]


@served()
async def test_an_unknown_path_is_answered_with_what_there_is(this: Served) -> None:
    for path, told in (
        ("/nope", "GET / lists the paths."),
        (
            "/chat/completions",
            "There is /v1/chat/completions: give /v1 at the end of the base URL.",
        ),
        ("/v1/embeddings", "there are /v1/admin/events, /v1/admin/memory, "),
        ("/v1/v1/sessions", "/v1/ws-ticket."),
    ):
        answer = await this.http.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].count(told) == 1
        assert ("GET /openapi.json has all" in answer.json()["error"]["message"]) == ("v1" in path)


@served()
async def test_recounts_that_are_asked_for_at_the_same_time_are_one(this: Served) -> None:
    def num_recounts() -> int:
        return sum(isinstance(each, ReportMemory) and each.full for each in this.engine.seen)

    this.is_held = True
    asked = [
        asyncio.create_task(this.http.get("/v1/admin/memory", params={"full": 1})) for _ in range(8)
    ]
    await this.until(lambda: len(this.server.server_state.tasks) == 8)
    this.is_held = False
    answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [200] * 8
    assert num_recounts() == 1
    assert (await this.http.get("/v1/admin/memory", params={"full": 1})).status_code == 200
    assert num_recounts() == 2


@served()
async def test_scrapes_share_one_report_that_lists_no_sessions(this: Served) -> None:
    this.is_held = True
    asked = [asyncio.create_task(this.http.get("/metrics")) for _ in range(8)]
    await this.until(lambda: len(this.server.server_state.tasks) == 8)
    this.is_held = False
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 8
    (report,) = [each for each in this.engine.seen if isinstance(each, ReportMemory)]
    assert (report.max_sessions, report.full) == (0, False)


@served()
async def test_the_gauge_of_tasks_counts_those_that_live(this: Served) -> None:
    async def count() -> float:
        lines = (await this.http.get("/metrics")).text.splitlines()
        (line,) = (line for line in lines if line.startswith("session_server_event_loop_tasks "))
        return float(line.split()[1])

    before = await count()
    waiting = [asyncio.create_task(asyncio.Event().wait()) for _ in range(5)]
    assert await count() == before + 5
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await count() == before


@served()
async def test_a_disk_without_room_for_kv_is_told_by_a_server_that_works(this: Served) -> None:
    tiers = TierReport(disk_max_bytes=3 << 20, disk_given_bytes=1000 << 20)
    this.engine.events.append(engine_stats(tiers=tiers))
    this.engine.deliver()
    answer = await this.http.get("/health")
    body = answer.json()
    assert (answer.status_code, body["status"]) == (200, "ok")
    assert "room for 3 of 1,000 MiB of --disk-kv-bytes" in body["message"]
    tiers = TierReport(disk_max_bytes=1000 << 20, disk_given_bytes=1000 << 20)
    this.engine.events.append(engine_stats(tiers=tiers))
    this.engine.deliver()
    assert (await this.http.get("/health")).json() == {"status": "ok"}


@served()
async def test_probes_metrics_models_and_memory_answer(this: Served) -> None:
    assert (await this.http.get("/health")).json() == {"status": "ok"}
    assert (await this.http.get("/ready")).json() == {"status": "ready"}
    model = (await this.http.get("/v1/models")).json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("paper", 4096)
    memory = (await this.http.get("/v1/admin/memory", params={"full": 1})).json()
    assert memory["checks"] == {
        "runs": 1,
        "levels": {"2": 1},
        "violations": 0,
        "recent": [],
        "quarantined_sessions": [],
        "rebuilds": 0,
        "reprefill_tokens": 0,
        "probes": 0,
        "last_probe_ago_s": None,
        "check_ms": 0.0,
        "probe_ms": 0.0,
        "cost_share": 0.0,
    }
    assert set(memory) == {
        "pools",
        "rows",
        "rows_free",
        "num_sessions",
        "sessions",
        "checks",
        "trace",
        "tiers",
    }
    await this.open()
    metrics = await this.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "session_server_sessions 1.0" in metrics.text
    assert "session_server_event_loop_tasks" in metrics.text


@served(keys=KEYS)
async def test_a_browser_that_opens_the_address_is_told_where_to_go(this: Served) -> None:
    answer = await this.http.get("/")
    assert answer.status_code == 200
    places = answer.json()
    assert places.pop("name") == "session-server"
    assert places.pop("socket") == "/v1/sessions/new/ws"
    assert places.pop("chat_completions") == "/v1/chat/completions"
    assert places.pop("responses") == "/v1/responses"
    assert places.pop("conversations") == "/v1/conversations"
    assert places.pop("realtime") == "/v1/realtime"
    with_key = {"authorization": "Bearer secret"}
    for place in places.values():
        assert (await this.http.get(place, headers=with_key)).status_code == 200, place


@served()
async def test_without_an_engine_the_server_is_not_ready_and_says_so(this: Served) -> None:
    this.engine.die(will_restart=False)
    await this.until(lambda: this.sessions.stats().ready is None)
    ready = await this.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "engine_unavailable")
    memory = await this.http.get("/v1/admin/memory")
    assert (memory.status_code, memory.json()["error"]["code"]) == (503, "engine_unavailable")
    assert memory.headers["retry-after"]
    assert (await this.http.get("/metrics")).status_code == 200


@served()
async def test_while_the_engine_completes_no_step_the_server_is_not_ready_and_nobody_waits(
    this: Served,
) -> None:
    this.is_held = True
    asking = asyncio.create_task(this.http.get("/v1/admin/memory"))
    await this.until(lambda: bool(this.engine.commands))
    this.sessions.on_event(EngineStalled(stalled_s=1.5))
    memory = await asking
    assert (memory.status_code, memory.json()["error"]["code"]) == (503, "engine_unavailable")
    ready = await this.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "engine_stalled")
    assert ready.json()["stalled_s"] >= 1.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_link, "STALLED_ANSWER_DEADLINE_S", 0.01)
        assert (await this.http.get("/v1/admin/memory")).status_code == 503
    this.sessions.on_event(EngineResumed())
    this.is_held = False
    assert (await this.http.get("/ready")).json() == {"status": "ready"}
    assert (await this.http.get("/v1/admin/memory")).status_code == 200


@served()
async def test_a_draining_server_refuses_work_and_tells_its_readers(this: Served) -> None:
    async with this.socket() as wire:
        await wire.send("turn.create", turn_id="t1", text="a", sampling={"max_tokens": 3000})
        await wire.until("turn.delta")
        this.is_held = True
        draining = asyncio.create_task(this.sessions.drain(20.0))
        await wire.until("session.draining")
        this.is_held = False
        await draining
        assert await wire.close_code() == 1012
        kinds = [frame["type"] for frame in wire.frames]
        assert kinds[-2:] == ["turn.completed", "session.closed"]
    ready = await this.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "draining")
    refused = await this.http.post("/v1/sessions", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
    with pytest.raises(InvalidStatus) as denied:
        async with this.socket():
            pass
    assert denied.value.response.status_code == 503


def http_routes(this: Served, *, as_declared: bool = False) -> list[tuple[str, str, str]]:
    """(method, path, name) of every HTTP route; path parameters filled unless as declared."""
    found = []
    for route in all_routes(this.app.router):
        if isinstance(route, Route):
            path = route.path if as_declared else route.path.replace("{", "").replace("}", "")
            methods = (route.methods or set()) - {"HEAD"}
            found += [(method, path, route.name) for method in sorted(methods)]
    assert len(found) > 20
    return found


def all_routes(router: Any) -> list[BaseRoute]:
    """Every route of a router, those of included routers too."""
    found: list[BaseRoute] = []
    for route in router.routes:
        included = getattr(route, "original_router", None)
        found += [route] if included is None else all_routes(included)
    return found


@served(allowed_origins=("https://app.example",))
async def test_an_allowed_origin_may_read_answers_and_others_may_not(this: Served) -> None:
    asked = {"origin": "https://app.example"}
    answer = await this.http.get("/v1/models", headers=asked)
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    preflight = asked | {"access-control-request-method": "POST"}
    assert (await this.http.options("/v1/sessions", headers=preflight)).status_code == 200
    evil = await this.http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert (evil.status_code, "access-control-allow-origin" in evil.headers) == (403, False)


@served(max_connections=1)
async def test_readers_are_bounded_whatever_they_read_by(this: Served) -> None:
    session_id = await this.open()
    async with this.socket(session_id):
        path = f"/v1/sessions/{session_id}"
        for request in (
            this.http.post(f"{path}/turns", json={"text": "a"}),
            this.http.post(f"{path}/draft", json={"draft_id": "d", "text": "a"}),
            this.http.get(f"{path}/events"),
            this.http.get("/v1/admin/events"),
            this.http.post("/generate", json={"text": "a"}),
        ):
            refused = await request
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_busy")
    assert this.sessions.get(ANONYMOUS, session_id).num_turns == 0
