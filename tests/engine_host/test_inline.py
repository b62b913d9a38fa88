"""The engine on a thread: real time, a real inbox, device threads."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from cache.types import TurnId
from session_server.core.commands import CancelTurn, ReportMemory
from session_server.core.errors import EngineUnavailable
from session_server.core.events import (
    EngineDied,
    EngineEvent,
    EngineResumed,
    EngineStalled,
    FinishReason,
    MemoryReported,
    TokensProduced,
    TurnFinished,
)
from session_server.engine import memory
from session_server.engine.engine import Engine, StepOutcome
from session_server.engine_host import audit_pace, inline, loop, progress
from session_server.engine_host.inbox import memory_bytes
from session_server.engine_host.inline import InlineEngine
from session_server.engine_host.loop import EngineAssembly, EngineLoop
from tests.engine_host import live_echo
from tests.engine_host.live_echo import BUG_TOKEN, HANG_TOKEN, LiveStage, assemble
from tests.engine_host.server_side import ServerSide, submit
from tests.sim.echo import replay


def engine(stage: LiveStage, **options: float) -> InlineEngine:
    return InlineEngine(lambda: assemble(msgspec.msgpack.encode(stage)), **options)


@pytest.mark.parametrize("is_device", [False, True])
def test_many_turns_at_once_say_what_each_would_say_alone(is_device: bool) -> None:
    async def scenario() -> None:
        server, client = ServerSide(), engine(LiveStage(is_device=is_device))
        await client.start(server.hear)
        prompts = {f"t{i}": tuple(1 + (i * 5 + k) % 29 for k in range(3 + i)) for i in range(12)}
        said = await asyncio.gather(
            *(server.turn(client, name, prompt, 9) for name, prompt in prompts.items())
        )
        for outputs, prompt in zip(said, prompts.values(), strict=True):
            assert outputs == replay("a", prompt, seed=1, max_new=9)
        await client.stop()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing watches what has ended"

    asyncio.run(scenario())


def test_a_cancel_reaches_a_turn_between_two_forwards() -> None:
    async def scenario() -> None:
        server, client = ServerSide(), engine(LiveStage(forward_s=0.002))
        await client.start(server.hear)
        submit(client, "long", (1, 2, 3), max_tokens=400)
        await server.until(lambda e: isinstance(e, TokensProduced))
        client.send(CancelTurn(turn_id=TurnId("long"), num_outputs=1))
        end = await server.until(lambda e: isinstance(e, TurnFinished))
        assert isinstance(end, TurnFinished)
        assert (end.reason, end.num_outputs, end.history_len) == (FinishReason.CANCELLED, 1, 4)
        await client.stop()

    asyncio.run(scenario())


def test_an_idle_engine_recounts_its_memory_once_and_then_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []
    naps = ("sleep", "wait")

    class WatchedLoop(EngineLoop):
        """Tell a wait that ends by itself from a sleep that only another thread ends."""

        def _sleep(self, wait_s: float | None) -> None:
            did.append("sleep" if wait_s is None else "wait")
            super()._sleep(wait_s)

    class Watched:
        """Write down when the engine ends a turn, recounts, and looks at the content of a page."""

        def __init__(self, engine: Engine) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def step(
            self, now_s: float, commands: Any, results: Any, *_: Any, **__: Any
        ) -> StepOutcome:
            did.extend("result" for _ in results)
            outcome = self._engine.step(now_s, commands, results)
            did.extend("end" for event in outcome.events if isinstance(event, TurnFinished))
            did.extend("launch" for _ in [outcome.batch] if outcome.batch is not None)
            return outcome

        def audit_slice(self) -> bool:
            did.append("recount")
            return self._engine.audit_slice()

    def build() -> EngineAssembly:
        assembly = assemble(msgspec.msgpack.encode(LiveStage()))
        return replace(assembly, engine=cast(Engine, Watched(assembly.engine)))

    monkeypatch.setattr(inline, "EngineLoop", WatchedLoop)
    monkeypatch.setattr(audit_pace, "REST_DELAY_S", 0.001)
    monkeypatch.setattr(memory, "SLICE_UNITS", 1000)

    async def scenario() -> None:
        server, client = ServerSide(), InlineEngine(build)
        await client.start(server.hear)
        await server.turn(client, "t", (1, 2, 3))
        async with asyncio.timeout(60):
            # A recount asks for a look at the content of a page, which the next step launches. A
            # thread of the device may hear of it while the engine's own still waits.
            while "recount" not in did or "result" not in did[did.index("recount") :]:
                await asyncio.sleep(0.001)
            while [each for each in did if each in naps][-1] != "sleep":
                await asyncio.sleep(0.001)
        resting = did[did.index("end") + 1 :]
        assert [each for each in resting if each not in naps] == ["recount", "launch", "result"]
        client.send(ReportMemory(request_id=7))
        report = await server.until(lambda e: isinstance(e, MemoryReported))
        assert isinstance(report, MemoryReported)
        assert report.checks.violations == 0
        await client.stop()

    asyncio.run(scenario())


def test_a_full_inbox_refuses_a_command_and_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ReportMemory` is answered once each, so a command that is lost is an answer that is."""
    is_stepping, may_go_on = threading.Event(), threading.Event()

    class Held:
        """Hold the first step that has a command until the test lets it go."""

        def __init__(self, engine: Engine) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def step(
            self, now_s: float, commands: Any, results: Any, *_: Any, **__: Any
        ) -> StepOutcome:
            if commands:
                is_stepping.set()
                may_go_on.wait()
            return self._engine.step(now_s, commands, results)

    def build() -> EngineAssembly:
        assembly = assemble(msgspec.msgpack.encode(LiveStage()))
        return replace(assembly, engine=cast(Engine, Held(assembly.engine)))

    command_bytes = memory_bytes(ReportMemory(request_id=0))
    monkeypatch.setattr(loop, "MAX_INBOX_BYTES", 2 * command_bytes)

    async def scenario() -> None:
        server, client = ServerSide(), InlineEngine(build)
        await client.start(server.hear)
        client.send(ReportMemory(request_id=0))
        await asyncio.to_thread(is_stepping.wait)
        for request_id in (1, 2):
            client.send(ReportMemory(request_id=request_id))
        with pytest.raises(EngineUnavailable, match="inbox is full"):
            client.send(ReportMemory(request_id=3))
        may_go_on.set()
        await server.until(lambda e: isinstance(e, MemoryReported) and e.request_id == 2)
        client.send(ReportMemory(request_id=4))
        await server.until(lambda e: isinstance(e, MemoryReported) and e.request_id == 4)
        answered = [e.request_id for e in server.events if isinstance(e, MemoryReported)]
        assert answered == [0, 1, 2, 4]
        await client.stop()

    asyncio.run(scenario())


def test_a_bug_ends_the_engine_and_the_server_is_told() -> None:
    async def scenario() -> None:
        server, client = ServerSide(), engine(LiveStage())
        await client.start(server.hear)
        submit(client, "t", (BUG_TOKEN, 1))
        death = await server.death()
        assert "a bug on purpose" in death.message
        assert not death.will_restart
        assert client.failed is not None
        assert "a bug on purpose" in await client.failed
        await asyncio.sleep(0)
        assert "engine-watchdog" not in {task.get_name() for task in asyncio.all_tasks()}
        await client.stop()
        with pytest.raises(EngineUnavailable):
            submit(client, "u", (1, 2))

    asyncio.run(scenario())


def test_a_device_that_hangs_is_given_up_and_what_it_says_later_is_not_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way_out = threading.Event()
    monkeypatch.setattr(live_echo, "time", SimpleNamespace(sleep=lambda s: s and way_out.wait()))
    of_others = set(threading.enumerate())

    async def scenario() -> None:
        server, client = ServerSide(), engine(LiveStage(), hang_limit_s=0.2)
        await client.start(server.hear)
        submit(client, "t", (HANG_TOKEN, 1))
        death = await server.death()
        assert "moved no turn" in death.message
        assert not death.will_restart
        with pytest.raises(EngineUnavailable):
            submit(client, "u", (1, 2))
        hanging = {each for each in threading.enumerate() if each.name == "engine"} - of_others
        assert [each.daemon for each in hanging] == [True], "the process can end without it"
        way_out.set()
        await client.stop()
        assert isinstance(server.events[-1], EngineDied)

    asyncio.run(scenario())


def test_a_forward_that_takes_too_long_is_told_and_so_is_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way_out = threading.Event()
    monkeypatch.setattr(live_echo, "time", SimpleNamespace(sleep=lambda s: s and way_out.wait()))
    monkeypatch.setattr(progress, "STEP_LIMIT_S", 0.05)

    async def scenario() -> None:
        server, client = ServerSide(), engine(LiveStage())
        await client.start(server.hear)
        await server.turn(client, "quick", (1, 2))
        submit(client, "slow", (HANG_TOKEN, 1))
        stall = await server.until(lambda e: isinstance(e, EngineStalled))
        assert isinstance(stall, EngineStalled)
        assert stall.stalled_s > 0.05
        way_out.set()
        await server.until(lambda e: isinstance(e, EngineResumed))
        await server.until(lambda e: isinstance(e, TurnFinished) and e.turn_id == "slow")
        await client.stop()

    asyncio.run(scenario())


def test_a_server_that_does_not_understand_an_event_gives_the_engine_up() -> None:
    """Events behind it in one step would be lost, and turns wait for ever."""

    async def scenario() -> None:
        heard: list[EngineEvent] = []

        def hear(event: EngineEvent) -> None:
            heard.append(event)
            if isinstance(event, TokensProduced):
                raise RuntimeError("a bug of the listener")

        client = engine(LiveStage())
        await client.start(hear)
        submit(client, "t", (1, 2))
        assert client.failed is not None
        async with asyncio.timeout(60):
            assert "a bug of the listener" in await client.failed
        assert isinstance(heard[-1], EngineDied)
        await client.stop()

    asyncio.run(scenario())


def test_an_engine_that_cannot_be_built_says_why() -> None:
    async def scenario() -> None:
        client = engine(LiveStage(fails_to_build=True))
        with pytest.raises(EngineUnavailable, match="no such model"):
            await client.start(lambda event: None)
        await client.stop()

    asyncio.run(scenario())
