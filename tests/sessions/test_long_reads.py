"""A long session is read from the disk a little at a time, and others are served meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from session_server.core.errors import InternalInconsistency, ServerBusy, SessionNotFound
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.store.session_store import ENTRIES_AT_ONCE
from session_server.sessions.transcript import Transcript
from tests.sessions.recount import recount
from tests.sessions.test_stored_sessions import Disk, state_of
from tests.sessions.world import OWNER, World, completed, turn

NUM_TURNS = 5 * ENTRIES_AT_ONCE


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


def long_session(disk: Disk) -> tuple[str, dict[str, object]]:
    """A session of many entries that is on disk alone."""
    with disk.world() as world:
        name = world.create(is_stored=True)
        for number in range(NUM_TURNS):
            world.run(name, turn(f"t{number}", max_tokens=2))
        return name, state_of(world, name)


@pytest.mark.parametrize("num_clients", [1, 3])
def test_others_run_between_slices_and_one_reads_for_all(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, num_clients: int
) -> None:
    name, state = long_session(disk)
    steps: list[str] = []
    apply = Transcript.apply

    def noted(said: Transcript, change: object) -> None:
        steps.append("entry")
        apply(said, change)  # type: ignore[arg-type]

    monkeypatch.setattr(Transcript, "apply", noted)

    async def others(reading: asyncio.Future[object]) -> None:
        while not reading.done():
            steps.append("others")
            await asyncio.sleep(0)

    async def read(world: World) -> None:
        loads = (world.manager.load(OWNER, name) for _ in range(num_clients))
        reading = asyncio.gather(*loads)
        await others(reading)
        await reading

    with disk.world() as world:
        world.do(read(world))
        assert steps.count("entry") == NUM_TURNS + 1
        pieces = "".join(step[0] for step in steps).split("o")
        assert max(map(len, pieces)) <= ENTRIES_AT_ONCE
        steps.clear()
        assert state_of(world, name) == state
        assert not steps, "it was there already"
        recount(world.manager)
        assert world.manager.stats().loaded_sessions == 1
        again = completed(world.run(name, turn("next")))
        assert again.outcome.is_durable


@pytest.mark.parametrize("event", ["asked for", "closed", "closed and opened"])
def test_what_happens_meanwhile_counts(disk: Disk, event: str) -> None:
    name, state = long_session(disk)

    async def read(world: World) -> None:
        manager = world.manager
        loading = asyncio.create_task(manager.load(OWNER, name))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not loading.done()
        assert manager._sessions.find(OWNER, name) is None
        match event:
            case "asked for":
                with pytest.raises(ServerBusy):
                    manager.edits.rewind(OWNER, name, None)
            case "closed":
                manager.close(OWNER, name)
            case "closed and opened":
                manager.close(OWNER, name)
                world.open(session_id=name, is_stored=True)
        await loading

    with disk.world() as world:
        world.do(read(world))
        match event:
            case "asked for":
                assert state_of(world, name) == state
            case "closed":
                with pytest.raises(SessionNotFound):
                    world.manager.get(OWNER, name)
            case _:
                assert world.history(name) == ()
        recount(world.manager)


def test_a_long_session_that_is_damaged_is_refused_and_the_next_one_is_read(disk: Disk) -> None:
    damaged, _ = long_session(disk)
    whole, state = long_session(disk)
    with disk.world() as world:
        number = "(SELECT number FROM sessions WHERE id = ?)"
        with disk.store._database.transaction():
            disk.store._database._writer.execute(
                f"UPDATE entries SET entry = x'00' WHERE session = {number} AND position = 70",
                (damaged,),
            )
        with pytest.raises(InternalInconsistency):
            world.do(world.manager.load(OWNER, damaged))
        world.do(world.manager.load(OWNER, whole))
        assert world.manager.stats().loaded_sessions == 1
        assert state_of(world, whole) == state


def test_a_short_one_and_one_that_is_not_there_are_left_to_whoever_asks(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
    with disk.world(quotas=QuotaLimits(sessions=1)) as world:
        for each in (name, "unknown"):
            world.do(world.manager.load(OWNER, each))
        assert world.manager.stats().sessions == 0
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, "unknown")
    with World() as world:
        world.do(world.manager.load(OWNER, name))
