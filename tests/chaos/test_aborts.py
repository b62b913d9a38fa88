"""Every way to abort reaches the scheduler before two more forwards hold the turn's row."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from session_server.core.batch import Batch, PendingStep, Runner
from session_server.core.commands import CancelTurn, EngineCommand
from session_server.core.engine_client import EventListener
from session_server.core.events import EngineEvent, EngineReady, TurnFinished
from session_server.core.ids import TurnId
from session_server.engine.config import MemoryCheck
from session_server.engine_host.inline import InlineEngine
from session_server.engine_host.loop import EngineAssembly
from tests.engine_host.live_echo import LiveStage, assemble
from tests.rig.decisions import Decisions
from tests.web.serving import Served, serving_live
from tests.web.wire_client import Wire, open_wire

MAX_LATE_LAUNCHES = 2
NUM_BYSTANDERS = 5
NUM_ABORTS = 12
SAMPLING = {"temperature": 0, "max_tokens": 380, "ignore_eos": True}
SGLANG_SAMPLING = {"temperature": 0, "max_new_tokens": 380, "ignore_eos": True}

Way = Callable[[Served, str, Decisions], Awaitable[None]]


@dataclass
class LaunchCounter:
    """A `Runner` that counts the forwards each turn had a row in."""

    runner: Runner
    launches: Counter[TurnId]

    def launch(self, batch: Batch) -> PendingStep:
        """See `Runner.launch`."""
        self.launches.update(row.turn_id for row in batch.rows)
        return self.runner.launch(batch)


@dataclass
class WatchedEngine:
    """An `EngineClient` that notes, once a cancel is in the engine's inbox, how many forwards the
    turn has been in so far."""

    inner: InlineEngine
    launches: Counter[TurnId]
    cancelled_after: dict[TurnId, int] = field(default_factory=dict)
    ended: set[TurnId] = field(default_factory=set)

    async def start(self, listener: EventListener) -> EngineReady:
        """See `EngineClient.start`."""

        def hear(event: EngineEvent) -> None:
            if isinstance(event, TurnFinished):
                self.ended.add(event.turn_id)
            listener(event)

        return await self.inner.start(hear)

    def send(self, command: EngineCommand) -> None:
        """See `EngineClient.send`."""
        self.inner.send(command)
        if isinstance(command, CancelTurn):
            self.cancelled_after[command.turn_id] = self.launches[command.turn_id]

    async def stop(self) -> None:
        """See `EngineClient.stop`."""
        await self.inner.stop()

    def late_launches(self, turn_id: TurnId) -> int:
        """Forwards with a row of the turn that began after its cancel was in the inbox."""
        return self.launches[turn_id] - self.cancelled_after[turn_id]


def watched_engine(stage: LiveStage) -> WatchedEngine:
    """An engine on a thread, over the fake device that `stage` describes."""
    launches: Counter[TurnId] = Counter()

    def build() -> EngineAssembly:
        assembly = assemble(msgspec.msgpack.encode(stage))
        return replace(assembly, runner=LaunchCounter(assembly.runner, launches))

    return WatchedEngine(InlineEngine(build), launches)


def words(chance: Decisions) -> list[int]:
    """A prompt of one chunk or of several, so that aborts strike prefills too."""
    return [chance.between(1, 28) for _ in range(chance.pick((3, 100)))]


async def running(wire: Wire, chance: Decisions, **fields: Any) -> None:
    """Begin a turn on the socket and hear a few of its frames."""
    body = {"turn_id": "t", "input_ids": words(chance), "sampling": SAMPLING}
    await wire.send("turn.create", **body, **fields)
    await wire.until("turn.created")
    for _ in range(chance.below(12)):
        await wire.receive()


async def by_message(this: Served, session_id: str, chance: Decisions) -> None:
    async with open_wire(this.url, session_id) as wire:
        await running(wire, chance)
        await wire.send("turn.cancel", turn_id="t", keep_partial=chance.happens(0.5))
        await wire.until("turn.cancelled")


async def by_closing_over_the_socket(this: Served, session_id: str, chance: Decisions) -> None:
    async with open_wire(this.url, session_id) as wire:
        await running(wire, chance)
        await wire.send("session.close")
        assert await wire.close_code() == 4410


async def by_a_lost_socket(this: Served, session_id: str, chance: Decisions) -> None:
    async with open_wire(this.url, session_id) as wire:
        await running(wire, chance, on_disconnect="cancel")
        wire.socket.transport.abort()


async def by_rest(this: Served, session_id: str, chance: Decisions) -> None:
    async with open_wire(this.url, session_id) as wire:
        await running(wire, chance)
        path = f"/v1/sessions/{session_id}/turns/t/cancel"
        assert (await this.http.post(path, json={})).status_code == 200


async def by_deleting_the_session(this: Served, session_id: str, chance: Decisions) -> None:
    async with open_wire(this.url, session_id) as wire:
        await running(wire, chance)
        assert (await this.http.delete(f"/v1/sessions/{session_id}")).status_code == 200


async def by_leaving_an_event_stream(this: Served, session_id: str, chance: Decisions) -> None:
    body = {"input_ids": words(chance), "sampling": SAMPLING}
    await leave_stream(this, f"/v1/sessions/{session_id}/turns", body, chance)


async def by_leaving_a_request(this: Served, session_id: str, chance: Decisions) -> None:
    body = {"input_ids": words(chance), "sampling": SAMPLING}
    request = asyncio.create_task(this.http.post(f"/v1/sessions/{session_id}/turns", json=body))
    while (await this.http.get(f"/v1/sessions/{session_id}")).json()["running_turn"] is None:
        pass
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def by_aborting_a_rid(this: Served, session_id: str, chance: Decisions) -> None:
    body = generation(session_id, chance) | {"rid": "mine", "stream": False}
    request = asyncio.create_task(this.http.post("/generate", json=body))
    while (await this.http.get(f"/v1/sessions/{session_id}")).json()["running_turn"] is None:
        pass
    assert (await this.http.post("/abort_request", json={"rid": "mine"})).status_code == 200
    answer = (await request).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def by_leaving_sglangs_stream(this: Served, session_id: str, chance: Decisions) -> None:
    await leave_stream(this, "/generate", generation(session_id, chance), chance)


def generation(session_id: str, chance: Decisions) -> dict[str, Any]:
    """A request of SGLang's, in a streaming session."""
    params = {"session_params": {"id": session_id}, "stream": True}
    return {"input_ids": words(chance), "sampling_params": SGLANG_SAMPLING, **params}


async def leave_stream(this: Served, path: str, body: dict[str, Any], chance: Decisions) -> None:
    """Read a few events, and hang up."""
    wanted = chance.between(1, 12)
    headers = {"accept": "text/event-stream"}
    async with this.http.stream("POST", path, json=body, headers=headers) as answer:
        lines = aiter(answer.aiter_lines())
        while wanted > 0:
            wanted -= (await anext(lines)).startswith("data:")


WAYS = (
    by_message,
    by_closing_over_the_socket,
    by_a_lost_socket,
    by_rest,
    by_deleting_the_session,
    by_leaving_an_event_stream,
    by_leaving_a_request,
    by_aborting_a_rid,
    by_leaving_sglangs_stream,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("is_device", [False, True], ids=["computes in launch", "computes later"])
def test_an_abort_reaches_the_scheduler_within_two_steps(way: Way, is_device: bool) -> None:
    late: Counter[int] = Counter()
    launched_before = 0

    async def test() -> None:
        nonlocal launched_before
        stage = LiveStage(0.001, is_device=is_device, memory_check=MemoryCheck.WARN)
        engine = watched_engine(stage)
        async with serving_live(engine) as this:
            others = [asyncio.create_task(bystander(this, n)) for n in range(NUM_BYSTANDERS)]
            for number in range(NUM_ABORTS):
                turn_id = await abort(this, engine, way, Decisions(1, way.__name__, number))
                late[engine.late_launches(turn_id)] += 1
                launched_before += engine.cancelled_after[turn_id] > 0
            for other in others:
                other.cancel()
            ends = await asyncio.gather(*others, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends

    asyncio.run(asyncio.wait_for(test(), 200))
    print(way.__name__, dict(late), launched_before)
    assert max(late) <= MAX_LATE_LAUNCHES, late
    assert launched_before >= NUM_ABORTS // 4, "turns ran when they were aborted"


async def abort(this: Served, engine: WatchedEngine, way: Way, chance: Decisions) -> TurnId:
    """Abort a turn of a session of its own; the engine's name of the turn, once it has ended."""
    session_id = (await this.http.post("/v1/sessions", json={})).json()["id"]
    before = set(engine.cancelled_after)
    await way(this, session_id, chance)
    while not (found := set(engine.cancelled_after) - before):
        await asyncio.sleep(0.001)
    (turn_id,) = found
    while turn_id not in engine.ended:
        await asyncio.sleep(0.001)
    await this.http.delete(f"/v1/sessions/{session_id}")
    return turn_id


async def bystander(this: Served, number: int) -> None:
    """Runs turns beside the aborted ones; none of them is disturbed."""
    chance, count = Decisions(2, number), 0
    async with open_wire(this.url) as wire:
        session_id = (await wire.receive())["session_id"]
        total = 0
        while True:
            count += 1
            body = {"input_ids": [chance.between(1, 28)], "sampling": SAMPLING | {"max_tokens": 9}}
            await wire.send("turn.create", turn_id=f"b{count}", **body)
            end = await wire.until("turn.completed", "turn.cancelled", "turn.failed", "error")
            assert end["type"] == "turn.completed", end
            assert end["usage"]["input_tokens"] == total + 1, session_id
            total = end["usage"]["total_tokens"]
            if total > 400:
                await wire.send("session.close")
                assert await wire.close_code() == 4410
                return await bystander(this, number)
