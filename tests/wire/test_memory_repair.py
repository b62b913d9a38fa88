"""A server whose memory is damaged while clients talk to it: they hear the right answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cache.types import Holder, SlotState
from session_server.client import SessionClient, connect
from session_server.config import CacheOptions, ModelOptions, Settings
from session_server.core.batch import CompileResult, StepResult
from session_server.core.commands import EngineCommand
from session_server.core.tier_orders import TierResult
from session_server.demo.corpus import dialogue
from session_server.engine.engine import StepOutcome
from session_server.engine_host.inline import InlineEngine
from session_server.engine_host.loop import EngineAssembly
from session_server.engine_wiring import build_engine
from session_server.models.config import FULL_POOL
from session_server.runner.model_runner import ModelRunner
from tests.web.serving import Served, serving_live

GREEDY = {"temperature": 0, "max_tokens": 32}
LONG = {"temperature": 0, "max_tokens": 800, "ignore_eos": True}
"""It runs while some dozens of pages are probed."""
SEEDS = (11, 12, 13)
NUM_TURNS = 4

Damage = Callable[[EngineAssembly], None]


@dataclass
class Patient:
    """A served engine, and what is to be done to it between two of its steps."""

    server: Served[InlineEngine]
    assembly: EngineAssembly
    operations: list[Damage] = field(default_factory=list)

    async def damage(self, damage: Damage) -> None:
        """Do it on the engine's thread, as a bug would."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def operation(assembly: EngineAssembly) -> None:
            damage(assembly)
            loop.call_soon_threadsafe(done.set)

        self.operations.append(operation)
        await self.checks()  # whatever the engine does, it steps
        await done.wait()

    async def checks(self, **params: int) -> dict[str, Any]:
        """What the operator sees."""
        answer = await self.server.http.get("/v1/admin/memory", params=params)
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()["checks"]
        return found

    async def until_found(self) -> dict[str, Any]:
        """Wait for the checker."""
        async with asyncio.timeout(60):
            while not (found := await self.checks())["violations"]:
                await asyncio.sleep(0.01)
        return found


@contextlib.asynccontextmanager
async def patient() -> AsyncIterator[Patient]:
    """The embedded model on a thread of this process, probing all the time."""
    assemblies: list[EngineAssembly] = []
    operations: list[Damage] = []

    def build() -> EngineAssembly:
        cache = CacheOptions(max_total_tokens=16384, probe_interval_s=0.01)
        model = ModelOptions(threads=1, context_length=1024)
        assembly = build_engine(Settings(cache=cache, model=model))
        step = assembly.engine.step

        def operate_and_step(
            now_s: float,
            commands: Sequence[EngineCommand],
            results: Sequence[StepResult],
            compiled: Sequence[CompileResult],
            *,
            copied: Sequence[TierResult],
        ) -> StepOutcome:
            while operations:
                operations.pop()(assembly)
            return step(now_s, commands, results, compiled, copied=copied)

        assembly.engine.step = operate_and_step  # type: ignore[method-assign]
        assemblies.append(assembly)
        return assembly

    async with serving_live(InlineEngine(build)) as server:
        yield Patient(server, assemblies[0], operations)


async def talk(session: SessionClient, seed: int, turns: slice) -> list[str]:
    """Some turns of a dialogue; gives the answers."""
    answers = []
    for exchange in dialogue(seed, NUM_TURNS).turns[turns]:
        result = await session.ask(exchange.user, sampling=GREEDY)
        assert result.status == "completed", result.error
        answers.append(result.text)
    return answers


async def story(this: Patient, damage: Damage | None) -> tuple[list[str], list[int]]:
    """Dialogues, damage in their middle while a long answer runs, and the rest of the dialogues.

    Returns:
        Every answer, the long one last; and the cached tokens of each dialogue's turn after it.
    """
    url = this.server.url
    sessions = [await connect(url) for _ in SEEDS]
    answers = [await talk(s, seed, slice(2)) for s, seed in zip(sessions, SEEDS, strict=True)]
    async with await connect(url) as speaker:
        long_turn = await speaker.start("Count from one to one hundred.", sampling=LONG)
        while not this.assembly.engine.inspect().scheduler.running:
            await asyncio.sleep(0.005)
        if damage is not None:
            await this.damage(damage)
            await this.until_found()
        cached = []
        for session, seed, said in zip(sessions, SEEDS, answers, strict=True):
            third = dialogue(seed, NUM_TURNS).turns[2]
            result = await session.ask(third.user, sampling=GREEDY)
            assert result.status == "completed", result.error
            cached.append(result.usage.cached_tokens)
            said.extend([result.text, *await talk(session, seed, slice(3, None))])
        long_answer = await long_turn.result()
        assert long_answer.status == "completed", long_answer.error
    for session in sessions:
        await session.close()
    flushed = await this.server.http.post("/flush_cache")
    assert flushed.status_code == 200
    return [*(text for said in answers for text in said), long_answer.text], cached


def invent_a_free_page(assembly: EngineAssembly) -> None:
    assembly.engine.inspect().cache.inspect().stores.ledgers[FULL_POOL]._accounts[Holder.FREE] += 1


def first_parked_row(assembly: EngineAssembly) -> int:
    slots = assembly.engine.inspect().cache.inspect().slots.values()
    lease = next(slot for slot in slots if slot.state is SlotState.PARKED).lease
    assert lease is not None
    return lease.row


def point_a_row_elsewhere(assembly: EngineAssembly) -> None:
    """What its next forward would read is not what the lease holds."""
    rows = assembly.engine.inspect().cache.inspect().stores.rows
    rows._tables[FULL_POOL][first_parked_row(assembly), 1] += 1
    assembly.engine.inspect().watch.audit_all()


def overwrite_a_page(assembly: EngineAssembly) -> None:
    runner = assembly.runner
    assert isinstance(runner, ModelRunner)
    row = first_parked_row(assembly)
    page = int(assembly.engine.inspect().cache.inspect().stores.rows.entries(FULL_POOL, row)[2])
    kv = runner.pools[FULL_POOL].storage[:, :, :, page]
    kv.copy_(torch.randn(kv.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("damage", "num_rebuilds", "num_quarantined"),
    [(invent_a_free_page, 1, 0), (point_a_row_elsewhere, 0, 1), (overwrite_a_page, 0, 1)],
)
def test_clients_of_a_damaged_server_hear_what_they_would_have_heard(
    damage: Damage, num_rebuilds: int, num_quarantined: int
) -> None:
    async def scenario() -> None:
        async with patient() as this:
            expected, undisturbed = await story(this, None)
            assert (await this.server.http.get("/health")).status_code == 200
            assert (await this.checks())["probes"] > 0
            answers, cached = await story(this, damage)
            assert answers == expected
            is_cold = [kept == 0 for kept in cached]
            assert all(undisturbed)
            assert is_cold == ([True] * 3 if num_rebuilds else [True, False, False])
            found = await this.checks(full=1)
            assert found["rebuilds"] == num_rebuilds
            assert len(found["quarantined_sessions"]) == num_quarantined
            assert found["reprefill_tokens"] > 0
            health = await this.server.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "memory_invariant_failed")
            assert (await this.server.http.get("/ready")).status_code == 200
            report = (await this.server.http.get("/v1/admin/memory", params={"trace": 1})).json()
            assert any(step["rows"] for step in report["trace"])
            pool = report["pools"]["full"]
            assert (pool["quarantine"] > 0) is (num_quarantined > 0)
            assert pool["free"] + pool["quarantine"] + 1 == pool["pages"]

    asyncio.run(scenario())
