"""The stream of samples: its numbers are those of the accounts, and it is made once for all."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from session_server.config import Settings
from session_server.core.commands import MAX_REPORTED_ROWS, MAX_REPORTED_STEPS, ReportMemory
from session_server.core.events import ACCOUNTS, TracedRow, TracedStep
from session_server.core.ids import TurnId
from session_server.engine.trace import StepTrace
from session_server.engine_host.inline import InlineEngine
from session_server.engine_wiring import build_engine
from session_server.metrics.recent import MAX_RECENT_TURNS, Recent
from session_server.web.server_watch import MAX_LISTENERS, ServerWatch
from session_server.web.timeline import MAX_UNSETTLED, Timeline
from tests.web.serving import Served, served, serving, serving_live, turn
from tests.web.test_keys import ring_of

DEADLINE_S = 60.0
URL = "/v1/admin/events"
LONG = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
MOVING = {"checks"}
"""Of a memory report: it counts its own checks, also while nothing else happens."""


@contextlib.asynccontextmanager
async def listening(this: Served, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Samples as a reader gets them."""
    async with this.http.stream("GET", URL, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield samples(answer)


async def samples(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The data of each event, with its id."""
    number = 0
    async for line in answer.aiter_lines():
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            yield json.loads(line[6:]) | {"id": number}


async def until_id(stream: AsyncIterator[dict[str, Any]], number: int) -> dict[str, Any]:
    """The sample of this number."""
    async for sample in stream:
        if sample["id"] == number:
            return sample
    raise AssertionError("the stream ended")


def watch_of(this: Served) -> ServerWatch:
    watch: ServerWatch = this.app.state.watch
    return watch


def live(check: Callable[[Served], Awaitable[None]]) -> Callable[[], None]:
    """A test over the embedded model."""

    def run() -> None:
        async def serve() -> None:
            engine = InlineEngine(lambda: build_engine(Settings()))
            async with asyncio.timeout(DEADLINE_S), serving_live(engine) as this:
                await check(this)

        asyncio.run(serve())

    run.__name__, run.__doc__ = check.__name__, check.__doc__
    return run


@live
async def test_a_sample_has_the_accounts_that_the_memory_route_has(this: Served) -> None:
    session_id = await this.open()
    async with listening(this) as stream:
        first = await anext(stream)
        assert first["rates"] is None
        for _ in range(2):
            done = await this.http.post(
                f"/v1/sessions/{session_id}/turns", json=turn("Hi.", sampling=LONG)
            )
            usage = done.json()["usage"]
        seen = [await anext(stream), await anext(stream)]
        books = (await this.http.get("/v1/admin/memory")).json()
    last = seen[-1]
    for name in set(books) - MOVING - {"sessions"}:
        assert last["memory"][name] == books[name], name
    assert last["memory"]["sessions"] == []
    assert set(last["memory"]["checks"]) == set(books["checks"])
    assert last["memory"]["checks"]["violations"] == books["checks"]["violations"] == 0
    for pool in last["memory"]["pools"].values():
        assert sum(pool[account] for account in ACCOUNTS) == pool["pages"]
    assert last["totals"]["generated_tokens"] >= 80
    assert last["totals"]["cached_tokens"] >= usage["cached_tokens"] > 0
    assert [sample["id"] for sample in (first, *seen)] == [1, 2, 3]
    assert last["counts"]["open_sessions"] == last["counts"]["resident_sessions"] == 1
    assert (last["engine"]["state"], last["listeners"]) == ("up", 1)
    made = sum(sample["rates"]["output_tokens_per_s"] * sample["interval_s"] for sample in seen)
    assert made == pytest.approx(80, abs=1)


@live
async def test_the_timeline_says_what_each_forward_computed_for_whom(this: Served) -> None:
    session_id = await this.open()
    async with listening(this) as stream:
        await anext(stream)
        body = turn("Tell me a story.", sampling=LONG, turn_id="mine")
        usage = (await this.http.post(f"/v1/sessions/{session_id}/turns", json=body)).json()[
            "usage"
        ]
        heard = [(await anext(stream))["timeline"] for _ in range(2)]
    forwards = [
        (forward["number"], timeline["turns"][place], tokens, kind)
        for timeline in heard
        for forward in timeline["forwards"]
        for place, tokens, kind in forward["rows"]
    ]
    assert len({number for number, *_ in forwards}) == len(forwards)
    assert {json.dumps(whom) for _, whom, *_ in forwards} == {
        json.dumps({"turn_id": "mine", "session": session_id})
    }
    prefill = sum(tokens for *_, tokens, kind in forwards if kind == "prefill")
    assert prefill == usage["input_tokens"] - usage["cached_tokens"]
    assert sum(kind == "decode" for *_, kind in forwards) >= usage["output_tokens"] - 1
    for timeline in heard:
        starts = [forward["start_s"] for forward in timeline["forwards"]]
        assert starts == sorted(starts)
        assert all(forward["forward_ms"] > 0 for forward in timeline["forwards"])


@served()
async def test_one_sampler_serves_all_listeners_and_none_runs_without(this: Served) -> None:
    def num_reports() -> int:
        return sum(isinstance(command, ReportMemory) for command in this.engine.seen)

    assert not watch_of(this).is_running
    async with contextlib.AsyncExitStack() as readers:
        streams = [await readers.enter_async_context(listening(this)) for _ in range(3)]
        firsts = await asyncio.gather(*map(anext, streams))
        newest = max(sample["id"] for sample in firsts) + 1
        heard = [await until_id(stream, newest) for stream in streams]
        assert heard == [heard[0]] * 3
        assert num_reports() == watch_of(this).num_samples
        assert heard[0]["listeners"] == 3
    await this.until(lambda: not watch_of(this).is_running)
    assert watch_of(this).num_listeners == 0
    num_before = num_reports()
    assert (await this.http.get("/health")).status_code == 200
    assert num_reports() == num_before
    async with listening(this, **{"last-event-id": "1"}) as stream:
        assert (await anext(stream))["id"] > heard[0]["id"]


@served()
async def test_listeners_are_bounded(this: Served) -> None:
    async with contextlib.AsyncExitStack() as readers:
        streams = []
        for _ in range(MAX_LISTENERS):
            streams.append(await readers.enter_async_context(listening(this)))
        await asyncio.gather(*map(anext, streams))
        refused = await this.http.get(URL)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_busy")
    await this.until(lambda: watch_of(this).num_listeners == 0)
    async with listening(this) as stream:
        await anext(stream)


@served()
async def test_listeners_that_come_at_once_are_refused_before_their_answer_begins(
    this: Served,
) -> None:
    async def listen() -> int:
        async with this.http.stream("GET", URL) as answer:
            statuses.append(answer.status_code)
            if answer.status_code == 200:
                await anext(samples(answer))
                await all_came.wait()
            return answer.status_code

    statuses: list[int] = []
    all_came = asyncio.Event()
    listeners = [asyncio.create_task(listen()) for _ in range(2 * MAX_LISTENERS)]
    await this.until(lambda: len(statuses) == len(listeners))
    all_came.set()
    await asyncio.gather(*listeners)
    assert sorted(statuses) == [200] * MAX_LISTENERS + [503] * MAX_LISTENERS


@served()
async def test_samples_say_that_the_engine_does_not_answer(this: Served) -> None:
    this.is_held = True
    async with listening(this) as stream:
        sample = await anext(stream)
        assert (sample["memory"], sample["totals"], sample["rates"]) == (None, None, None)
        this.is_held = False
        while sample["memory"] is None:
            sample = await anext(stream)


@served()
async def test_the_stream_ends_when_the_server_drains(this: Served) -> None:
    async with listening(this) as stream:
        await anext(stream)
        await this.sessions.drain(0.0)
        states = [sample["engine"]["state"] async for sample in stream]
    assert states == ["draining"]


def test_only_operators_listen_and_only_while_they_are(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    ring = ring_of(path, "alice alices\nops operators admin=1\n")

    async def check() -> None:
        async with serving(keys=ring) as this:
            header = {"authorization": "Bearer alices"}
            assert (await this.http.get(URL, headers=header)).status_code == 403
            async with listening(this, authorization="Bearer operators") as stream:
                await anext(stream)
                path.write_text("alice alices admin=1\nops operators\n", "utf-8")
                async for _ in stream:
                    pass

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


def traced(number: int, *, num_rows: int = 1, settled: tuple[int, ...] = ()) -> TracedStep:
    return TracedStep(
        step=number,
        now_s=float(number),
        commands=(),
        settled=settled,
        forward_s=(0.002,) * len(settled),
        cooled=(),
        retracted=(),
        admitted=(),
        refused=None,
        launched=number,
        is_probe=False,
        rows=(TracedRow(TurnId("t"), 0, 0, 1, 0, True),) * num_rows,
    )


@pytest.mark.parametrize("num_more", [-1, 0, 1])
def test_a_report_tells_of_so_many_steps_and_rows(num_more: int) -> None:
    trace = StepTrace()
    trace._ring.extend(traced(number) for number in range(1, MAX_REPORTED_STEPS + num_more + 1))
    assert len(trace.recent(0)) == min(MAX_REPORTED_STEPS, MAX_REPORTED_STEPS + num_more)
    assert trace.recent(0)[-1].step == MAX_REPORTED_STEPS + num_more
    assert trace.recent(100)[0].step == 101
    wide = StepTrace()
    wide._ring.append(traced(1, num_rows=1))
    wide._ring.append(traced(2, num_rows=MAX_REPORTED_ROWS + num_more))
    told = {-1: [1, 2], 0: [2], 1: []}[num_more]
    assert [step.step for step in wide.recent(0)] == told


@pytest.mark.parametrize("num_more", [-1, 0, 1])
def test_forwards_that_never_end_are_not_kept(num_more: int) -> None:
    timeline = Timeline(lambda turn_id: None)
    num = MAX_UNSETTLED + num_more
    assert timeline.read([traced(number) for number in range(1, num + 1)]).forwards == ()
    end = msgspec.structs.replace(traced(num + 1, settled=(1, num)), launched=None)
    found = [forward.number for forward in timeline.read([end]).forwards]
    assert found == ([1, num] if num_more < 1 else [num])
    assert timeline.last_step == num + 1


@pytest.mark.parametrize("num_more", [-1, 0, 1])
def test_times_between_two_looks_are_bounded(num_more: int) -> None:
    recent = Recent()
    for number in range(MAX_RECENT_TURNS + num_more):
        recent.note_first_token(float(number))
    recent.note_lag(0.5)
    recent.note_lag(0.25)
    taken = recent.take()
    assert len(taken.ttft_ms) == MAX_RECENT_TURNS + min(0, num_more)
    assert taken.lag_s == 0.5
    assert recent.take().ttft_ms == ()
