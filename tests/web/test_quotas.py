"""Quotas of a tenant over HTTP and WebSockets: refused at the bound, and when to come again."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from session_server.core.errors import QuotaExceeded, ServerBusy
from session_server.core.owner import ANONYMOUS, Owner, TenantLimits
from session_server.sessions.manager import SessionManager
from session_server.sessions.salts import TenantSalts
from session_server.web.keys import KeyRing, key_sources
from tests.sessions.paper_engine import PaperEngine
from tests.web.realtime_client import realtime
from tests.web.serving import (
    DEADLINE_S,
    WORD,
    Served,
    Wire,
    model_text,
    served,
    serving,
    serving_over,
)
from tests.web.serving import turn as small_turn
from tests.web.test_responses_socket import lanes_of


def ring(**limits: int) -> KeyRing:
    return KeyRing(anonymous=replace(ANONYMOUS, limits=TenantLimits(**limits)))


@contextlib.asynccontextmanager
async def serving_at(clock: list[float], keys: KeyRing) -> AsyncIterator[Served[PaperEngine]]:
    """A server whose rates refill by a clock that stands still until the test moves it."""
    engine = PaperEngine(vocab_size=1536, eos_ids=(4,), next_token=lambda _context: WORD)
    salts = TenantSalts(bytes(32))
    manager = SessionManager(engine, model_text(), salts=salts, clock=lambda: clock[0])
    async with serving_over(engine, manager, keys=keys) as this:
        yield this


def assert_refused(answer: httpx.Response, retry_after_s: int) -> None:
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "quota_exceeded"
    assert answer.headers["retry-after"] == str(retry_after_s)
    assert answer.json()["error"]["retry_after_s"] == retry_after_s


async def turn(this: Any, session_id: str, max_tokens: int = 1) -> httpx.Response:
    body = {"input_ids": [5, 6, 7], "sampling": {"max_tokens": max_tokens}}
    answer: httpx.Response = await this.http.post(f"/v1/sessions/{session_id}/turns", json=body)
    return answer


def test_a_session_too_many_is_refused_until_another_closes() -> None:
    async def scenario() -> None:
        async with serving(keys=ring(max_sessions=2)) as this:
            first = await this.open()
            await this.open()
            assert_refused(await this.http.post("/v1/sessions", json={}), 1)
            with pytest.raises(InvalidStatus) as refusal:
                async with this.bare_socket():
                    pass
            assert refusal.value.response.status_code == 429
            assert refusal.value.response.headers["retry-after"] == "1"
            await this.http.delete(f"/v1/sessions/{first}")
            assert (await this.http.post("/v1/sessions", json={})).status_code == 201

    asyncio.run(scenario())


RATES = pytest.mark.parametrize(
    ("limits", "wait_s"),
    [
        ({"turns_per_min": 2}, 30),
        ({"input_tokens_per_min": 6}, 30),
        ({"output_tokens_per_min": 6}, 10),
    ],
)


@RATES
def test_a_client_that_waits_as_long_as_it_is_told_succeeds(
    limits: dict[str, int], wait_s: int
) -> None:
    clock = [1000.0]

    async def scenario() -> None:
        async with serving_at(clock, keys=ring(**limits)) as this:
            session_id = await this.open()
            for _ in range(2):
                assert (await turn(this, session_id, 3)).status_code == 200
            refusal = await turn(this, session_id, 3)
            assert_refused(refusal, wait_s)
            clock[0] += int(refusal.headers["retry-after"])
            assert (await turn(this, session_id, 3)).status_code == 200

    asyncio.run(scenario())


def test_a_connection_too_many_is_refused_until_another_ends() -> None:
    async def scenario() -> None:
        async with serving(keys=ring(max_connections=1)) as this:
            session_id = await this.open()
            async with this.socket(session_id):
                assert_refused(await turn(this, session_id), 1)
            while this.sockets._by_session:
                await asyncio.sleep(0)
            assert (await turn(this, session_id)).status_code == 200

    asyncio.run(scenario())


def test_one_tenant_leaves_connections_to_others() -> None:
    most, others, newcomer = (Owner(f"name:{who}", share=0.5) for who in "abc")

    @served(max_connections=10)
    async def test(this: Served) -> None:
        readers = this.app.state.readers
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(readers.connected(most, "http"))
            with pytest.raises(QuotaExceeded), readers.connected(most, "http"):
                pass
            for _ in range(4):
                stack.enter_context(readers.connected(others, "http"))
            with pytest.raises(QuotaExceeded), readers.connected(others, "http"):
                pass  # the last tenth is for owners that hold little
            stack.enter_context(readers.connected(newcomer, "http"))
            with pytest.raises(ServerBusy), readers.connected(newcomer, "http"):
                pass
        assert (readers.num_connections, readers.num_of(most)) == (0, 0)

    test()


def test_requests_that_come_at_once_are_no_more_connections_than_may_be() -> None:
    async def scenario() -> None:
        async with serving(keys=ring(max_connections=2)) as this:
            this.is_held = True
            model = (await this.http.get("/v1/models")).json()["data"][0]["id"]
            body = {"model": model, "max_tokens": 4, "stream": True}
            body["messages"] = [{"role": "user", "content": "Hello"}]

            async def ask() -> int:
                return (await this.http.post("/v1/chat/completions", json=body)).status_code

            asked = [asyncio.create_task(ask()) for _ in range(8)]
            await this.until(lambda: sum(task.done() for task in asked) == 6)
            assert this.app.state.readers.num_of(ANONYMOUS) == 2
            this.is_held = False
            assert sorted(await asyncio.gather(*asked)) == [200] * 2 + [429] * 6
            assert sum(this.sessions.stats().ended_turns.values()) == 2, "no other ran"
            usage = (await this.http.get("/v1/usage")).json()
            assert usage["quotas"]["max_connections"]["held"] == 0

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


@pytest.mark.parametrize(
    "path", ["/v1/sessions/{}/ws", "/v1/realtime?session_id={}", "/v1/responses"]
)
def test_sockets_that_come_at_once_are_no_more_connections_than_may_be(path: str) -> None:
    async def scenario() -> None:
        limited = serving(keys=ring(max_connections=2))
        async with limited as this, contextlib.AsyncExitStack() as stack:
            said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
            ids = [await this.open(messages=said) for _ in range(6)]
            base = this.url.replace("http://", "ws://", 1)

            async def join(session_id: str) -> int:
                socket = connect(base + path.format(session_id), proxy=None, close_timeout=0.2)
                try:
                    await stack.enter_async_context(socket)
                except InvalidStatus as refusal:
                    return refusal.response.status_code
                return 101

            joined = await asyncio.gather(*map(join, ids))
            assert sorted(joined) == [101] * 2 + [429] * 4
            assert this.app.state.readers.num_of(ANONYMOUS) == 2

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def held(usage: Any) -> dict[str, Any]:
    """What is held of each quota, without those of which nothing is."""
    return {name: quota["held"] for name, quota in usage["quotas"].items() if quota["held"]}


def test_a_tenant_sees_what_it_holds_and_nothing_of_others(tmp_path: Path) -> None:
    clock = [1000.0]
    path = tmp_path / "keys"
    path.write_text("alice alices-key max_sessions=3 turns_per_min=4\nbob bobs-key\n", "utf-8")
    keys = key_sources(given=None, environment=None, path=path).ring()
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("alices-key", "bobs-key"))

    async def scenario() -> None:
        async with serving_at(clock, keys=keys) as this:

            async def usage(who: dict[str, str]) -> Any:
                answer = await this.http.get("/v1/usage", headers=who)
                assert answer.status_code == 200
                return answer.json()

            assert (await this.http.get("/v1/usage")).status_code == 401
            untouched = await usage(bob)
            assert untouched["object"] == "usage"
            assert set(untouched["quotas"]) == {each.name for each in fields(TenantLimits)}
            assert held(untouched) == {}
            assert {quota["limit"] for quota in untouched["quotas"].values()} == {None}
            this.http.headers.update(alice)
            session_id = await this.open()
            await this.open()
            assert (await turn(this, session_id, 2)).status_code == 200
            async with this.socket(session_id, additional_headers=alice):
                clock[0] += 3.0
                quotas = (await usage(alice))["quotas"]
                assert quotas["max_sessions"] == {"held": 2, "limit": 3}
                assert quotas["turns_per_min"] == {"held": 1, "limit": 4, "refilled_in_s": 12.0}
                assert quotas["max_connections"] == {"held": 1, "limit": None}
                assert quotas["max_kv_tokens"] == {"held": 5, "limit": None}
                assert quotas["max_bytes"]["held"] > 0
                assert await usage(bob) == untouched

    asyncio.run(scenario())


def test_callers_of_an_open_server_are_one_tenant() -> None:
    async def scenario() -> None:
        async with serving(keys=ring(max_sessions=2)) as this:
            await this.open()
            quotas = (await this.http.get("/v1/usage")).json()["quotas"]
            assert quotas["max_sessions"] == {"held": 1, "limit": 2}

    asyncio.run(scenario())


@RATES
def test_a_socket_that_waits_as_long_as_it_is_told_succeeds(
    limits: dict[str, int], wait_s: int
) -> None:
    clock = [1000.0]

    async def scenario() -> None:
        async with serving_at(clock, ring(**limits)) as this, this.socket() as wire:

            async def ask(turn_id: str) -> dict[str, Any]:
                return await wire.turn(turn_id, input_ids=[5, 6, 7], max_tokens=3)

            for turn_id in ("t1", "t2"):
                assert (await ask(turn_id))["type"] == "turn.completed"
            refused = await ask("t3")
            assert (refused["type"], refused["error"]["code"]) == ("error", "quota_exceeded")
            assert refused["error"]["retry_after_s"] == wait_s
            clock[0] += refused["error"]["retry_after_s"]
            assert (await ask("t3"))["type"] == "turn.completed"

    asyncio.run(scenario())


def test_a_turn_that_is_refused_when_its_time_comes_is_told_when_to_come_again() -> None:
    clock = [1000.0]

    async def scenario() -> None:
        keys = ring(input_tokens_per_min=3)
        async with serving_at(clock, keys) as this, this.socket() as wire:
            this.is_held = True
            for turn_id in ("t1", "t2"):
                fields = {"input_ids": [5, 6, 7], "max_tokens": 1}
                await wire.send("turn.create", turn_id=turn_id, **small_turn(**fields))
                await wire.until("turn.created")
            this.is_held = False
            failed = await wire.until("turn.failed")
            assert (failed["turn_id"], failed["retryable"]) == ("t2", True)
            assert failed["error"]["retry_after_s"] == 60

    asyncio.run(scenario())


def test_an_http_turn_that_waited_and_was_refused_is_told_when_to_come_again() -> None:
    clock = [1000.0]

    async def scenario() -> None:
        async with serving_at(clock, ring(input_tokens_per_min=3)) as this:
            session_id = await this.open()
            this.is_held = True
            answers = [asyncio.create_task(turn(this, session_id)) for _ in range(2)]
            stats = this.sessions.stats
            await this.until(lambda: (stats().live_turns, stats().queued_turns) == (1, 1))
            this.is_held = False
            by_status = {each.status_code: each for each in await asyncio.gather(*answers)}
            assert by_status.keys() == {200, 429}
            assert_refused(by_status[429], 60)

    asyncio.run(scenario())


def test_a_socket_of_responses_is_told_in_headers_and_succeeds_after_them() -> None:
    clock = [1000.0]

    async def scenario() -> None:
        async with serving_at(clock, ring(turns_per_min=2)) as this, lanes_of(this) as lanes:
            for _ in range(2):
                assert (await lanes.ask())["status"] == "incomplete"
            refused = await lanes.ask()
            assert (refused["status"], refused["error"]["code"]) == (429, "quota_exceeded")
            assert refused["error"]["headers"] == {"retry-after": "30"}
            clock[0] += int(refused["error"]["headers"]["retry-after"])
            assert (await lanes.ask())["status"] == "incomplete"

    asyncio.run(scenario())


def test_a_realtime_socket_is_told_in_words_and_succeeds_after_them() -> None:
    clock = [1000.0]

    async def scenario() -> None:
        async with serving_at(clock, ring(turns_per_min=2)) as this, realtime(this.url) as wire:
            await wire.say("Hello")
            for _ in range(2):
                assert (await wire.answer())["status"] == "incomplete"
            await wire.send("response.create")
            refused = await wire.until("error")
            assert refused["error"]["code"] == "quota_exceeded"
            waits = re.search(r"try again in (\d+) seconds", refused["error"]["message"])
            assert waits is not None
            clock[0] += int(waits[1])
            assert (await wire.answer())["status"] == "incomplete"

    asyncio.run(scenario())


RATE_CASES: list[tuple[dict[str, int], list[list[tuple[Any, ...]]]]] = [
    ({}, [[], []]),
    ({"max_sessions": 9}, [[], []]),
    (
        {"turns_per_min": 4},
        [[("requests", 4, 3, 15.0)], [("requests", 4, 2, 30.0)]],
    ),
    (
        {"turns_per_min": 4, "input_tokens_per_min": 6000, "output_tokens_per_min": 60},
        [
            [("requests", 4, 3, 15.0), ("tokens", 60, 60, 0.0)],
            [("requests", 4, 2, 30.0), ("tokens", 60, 56, 4.0)],
        ],
    ),
]


@pytest.mark.parametrize(("limits", "told"), RATE_CASES)
def test_a_realtime_response_begins_with_what_is_left_of_the_rates(
    limits: dict[str, int], told: list[list[tuple[Any, ...]]]
) -> None:
    async def scenario() -> None:
        async with serving_at([1000.0], ring(**limits)) as this, realtime(this.url) as wire:
            await wire.say("Hello")
            for _ in told:
                await wire.answer()
            kinds = wire.kinds()
            behind = [kinds[i + 1] for i, kind in enumerate(kinds) if kind == "response.created"]
            is_told = "rate_limits.updated"
            assert [kind == is_told for kind in behind] == [bool(rates) for rates in told]
            assert kinds.count(is_told) == sum(map(bool, told))
            events = [event["rate_limits"] for event in wire.events if event["type"] == is_told]
            assert [[tuple(rate.values()) for rate in rates] for rates in events] == [
                rates for rates in told if rates
            ]

    asyncio.run(scenario())


class Client:
    """Asks over HTTP; each method returns the seconds it is told to wait, None if it succeeds."""

    def __init__(self, this: Served[PaperEngine], stack: contextlib.AsyncExitStack) -> None:
        self.this, self.stack = this, stack
        self.session_id = ""

    async def open(self) -> int | None:
        answer = await self.this.http.post("/v1/sessions", json={})
        if answer.status_code == 201:
            self.session_id = answer.json()["id"]
        return told(answer)

    async def turn(self, num_inputs: int = 1, num_outputs: int = 1) -> int | None:
        body = small_turn(input_ids=[5] * num_inputs, max_tokens=num_outputs)
        path = f"/v1/sessions/{self.session_id}/turns"
        return told(await self.this.http.post(path, json=body))

    async def connect(self) -> int | None:
        return await self.turn()


class SocketClient(Client):
    """Asks over native WebSockets, all of which stay open."""

    wire: Wire

    async def open(self) -> int | None:
        try:
            self.wire = await self.stack.enter_async_context(self.this.socket())
            return None
        except InvalidStatus as refusal:
            response = refusal.response
        assert response.status_code == 429
        return int(response.headers["retry-after"])

    async def turn(self, num_inputs: int = 1, num_outputs: int = 1) -> int | None:
        turn_id = f"t{len(self.wire.frames)}"
        inputs = [5] * num_inputs
        end = await self.wire.turn(turn_id, input_ids=inputs, max_tokens=num_outputs)
        if end["type"] == "turn.completed":
            return None
        assert end["error"]["code"] == "quota_exceeded"
        seconds: int = end["error"]["retry_after_s"]
        return seconds

    async def connect(self) -> int | None:
        return await self.open()


def told(answer: httpx.Response) -> int | None:
    if answer.is_success:
        return None
    seconds = int(answer.headers["retry-after"])
    assert_refused(answer, seconds)
    return seconds


async def sessions(client: Client) -> list[int | None]:
    return [await client.open() for _ in range(2)]


async def turns(client: Client) -> list[int | None]:
    return [await client.open(), *[await client.turn() for _ in range(3)]]


async def inputs(client: Client) -> list[int | None]:
    return [await client.open(), await client.turn(3), await client.turn(4)]


async def outputs(client: Client) -> list[int | None]:
    return [await client.open(), await client.turn(1, 6), await client.turn(1, 1)]


async def context(client: Client) -> list[int | None]:
    first = [await client.open(), await client.turn(2, 3)]
    return [*first, await client.open(), await client.turn(2, 3)]


async def connections(client: Client) -> list[int | None]:
    first = await Client(client.this, client.stack).open()
    client.session_id = (await client.this.http.get("/v1/sessions")).json()["data"][0]["id"]
    await client.stack.enter_async_context(client.this.socket())
    return [first, await client.connect()]


class Case(NamedTuple):
    """What is asked for, and how much of the quota that takes; None: it is measured in bytes."""

    quota: str
    ask: Callable[[Client], Awaitable[list[int | None]]]
    num_asked: int | None
    wait_s: int


CASES = (
    Case("max_sessions", sessions, 2, 1),
    Case("turns_per_min", turns, 3, 30),
    Case("input_tokens_per_min", inputs, 7, 10),
    Case("output_tokens_per_min", outputs, 7, 10),
    Case("max_kv_tokens", context, 10, 1),
    Case("max_connections", connections, 2, 1),
    Case("max_bytes", sessions, None, 1),
)


@pytest.mark.parametrize("kind", [Client, SocketClient])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.quota)
def test_what_is_asked_for_is_refused_by_a_quota_of_one_less_and_by_no_other(
    kind: type[Client], case: Case
) -> None:
    """The same is asked for where the quota has room for one more, just so, and for one less."""

    async def scenario(limit: int | None) -> tuple[list[int | None], int]:
        keys = ring() if limit is None else ring(**{case.quota: limit})
        async with serving_at([1000.0], keys) as this, contextlib.AsyncExitStack() as stack:
            waits = await case.ask(kind(this, stack))
            usage = (await this.http.get("/v1/usage")).json()
            return waits, usage["quotas"]["max_bytes"]["held"]

    num_asked = case.num_asked or asyncio.run(scenario(None))[1]
    for beyond in (-1, 0, 1):
        *before, last = asyncio.run(scenario(num_asked - beyond))[0]
        assert before == [None] * len(before)
        assert last == (case.wait_s if beyond == 1 else None)
