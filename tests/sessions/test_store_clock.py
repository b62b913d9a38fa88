"""A wall clock that is wrong ends no session on disk in silence, and one that is right ends it."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from session_server.core.commands import ForgetKV
from session_server.core.errors import SessionNotFound
from session_server.core.events import KVForgotten
from session_server.sessions.store.clock import GRACE_S, JUMP_S, NOTED_S, StoreClock
from tests.sessions.paper_store import PaperStore, count
from tests.sessions.world import OWNER, World, completed, turn

YEARS_S = 5 * 365 * 86_400.0
TTL_S = 86_400.0


class Machine:
    """A machine with a store: its wall clock may be set, and its other one only goes on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.wall_s, self.clock_s = 1_000_000_000.0, 50.0
        self.store: PaperStore

    def passes(self, seconds: float) -> None:
        self.wall_s += seconds
        self.clock_s += seconds

    @contextmanager
    def serves(self, **options: Any) -> Iterator[World]:
        """A server: it ends without a word, as one that is killed."""
        self.store = PaperStore(
            self.directory, lambda: self.wall_s, clock=lambda: self.clock_s, trusts=False
        )
        world = World("chatml", store=self.store, **options)
        try:
            self.tick(world)
            yield world
        finally:
            self.store.finish()
            world.finish()

    def tick(self, world: World, seconds: float = 0.0) -> None:
        self.passes(seconds)
        world.now_s += seconds
        world.manager.tick()
        world.spin(5)

    def num_rows(self) -> int:
        return count(self.store._database)[0]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "store")


def fill(world: World, num_sessions: int = 3) -> list[str]:
    names = [world.create(is_stored=True, ttl_s=TTL_S) for _ in range(num_sessions)]
    for name in names:
        completed(world.run(name, turn("hello")))
    return names


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    caplog.clear()
    return [line for line in found if "wall clock" in line]


def assert_there(world: World, names: list[str]) -> None:
    assert [view.session_id for view in world.do(world.manager.list(OWNER)).sessions] == names


def test_a_start_with_the_clock_ahead_ends_nothing_before_it_is_set_right(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with machine.serves() as world:
        names = fill(world)
        assert warnings(caplog) == []
    machine.wall_s += YEARS_S
    with machine.serves() as world:
        (line,) = warnings(caplog)
        assert "3 sessions" in line
        assert "2006-" in line
        machine.tick(world, GRACE_S - 10.0)
        assert warnings(caplog) == []
        assert_there(world, names)
        completed(world.run(names[0], turn("who comes back goes on")))
    machine.wall_s -= YEARS_S
    with machine.serves() as world:
        machine.tick(world, 2 * GRACE_S)
        assert_there(world, names)
        for name in names:
            completed(world.run(name, turn("as ever")))
        assert warnings(caplog) == []


def test_a_disk_that_could_not_be_read_keeps_nobody_from_being_warned(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine.serves() as world:
        fill(world)
    with machine.serves() as world:
        with monkeypatch.context() as patch:

            def fail(*_: object, **__: object) -> int:
                raise sqlite3.OperationalError("disk I/O error")

            patch.setattr(machine.store._database, "num_expiring", fail)
            machine.wall_s += YEARS_S
            machine.tick(world, 1.0)
            assert warnings(caplog) == []
        machine.tick(world, 1.0)
        (line,) = warnings(caplog)
        assert "3 sessions" in line
        machine.tick(world, 1.0)
        assert warnings(caplog) == [], "once is enough"


def test_what_expired_without_a_server_is_gone_after_the_grace(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with machine.serves() as world:
        used, *others = fill(world)
    machine.passes(30 * TTL_S)
    with machine.serves() as world:
        assert len(warnings(caplog)) == 1
        completed(world.run(used, turn("I am back")))
        machine.tick(world, GRACE_S - 1.0)
        assert machine.num_rows() == 1 + len(others)
        machine.tick(world, 2.0)
        machine.tick(world, 1.0)
        assert machine.num_rows() == 1, "others than the one that was used are gone"
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, others[0])
        machine.tick(world, TTL_S / 2)
        completed(world.run(used, turn("and I have my time")))


def test_a_session_that_is_only_read_lives_on_if_the_clock_is_set_right(machine: Machine) -> None:
    with machine.serves() as world:
        (name,) = fill(world, 1)
    machine.wall_s += YEARS_S
    with machine.serves() as world:
        world.manager.get(OWNER, name)
        machine.wall_s -= YEARS_S
        machine.tick(world, 2 * GRACE_S)
        world.manager.get(OWNER, name)
        machine.tick(world, TTL_S)
        machine.tick(world, 1.0)
        assert machine.num_rows() == 0, "its time is what it was"


def test_a_short_time_without_a_server_counts_at_once(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with machine.serves() as world:
        world.create(is_stored=True, ttl_s=JUMP_S / 2)
    machine.passes(JUMP_S - 1.0)
    with machine.serves() as world:
        machine.tick(world, 1.0)
        assert machine.num_rows() == 0
        assert warnings(caplog) == []


@pytest.mark.parametrize("jump_s", [YEARS_S, -YEARS_S])
def test_a_jump_while_the_server_runs_ends_nothing_and_is_told(
    machine: Machine, jump_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    with machine.serves() as world:
        names = fill(world)
        machine.wall_s += jump_s
        machine.tick(world, 1.0)
        assert len(warnings(caplog)) == 1
        completed(world.run(names[0], turn("by the wrong clock")))
        machine.tick(world, GRACE_S / 2)
        assert warnings(caplog) == []
        machine.wall_s -= jump_s
        machine.tick(world, 1.0)
    with machine.serves() as world:
        machine.tick(world, 2 * GRACE_S)
        assert_there(world, names)
        assert warnings(caplog) == []


def test_a_clock_that_was_behind_when_sessions_were_written_ends_none_of_them(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with machine.serves() as world:
        names = fill(world)
    machine.wall_s -= YEARS_S
    with machine.serves() as world:
        (line,) = warnings(caplog)
        assert "before the last time" in line
        names += fill(world)
        machine.tick(world, 10.0)
    machine.wall_s += YEARS_S
    with machine.serves() as world:
        machine.tick(world, 2 * GRACE_S)
        assert_there(world, names)
        assert warnings(caplog) == []


def test_a_drain_writes_anew_when_sessions_end_that_the_wrong_clock_has_written(
    machine: Machine,
) -> None:
    with machine.serves() as world:
        (name,) = fill(world, 1)
        machine.wall_s += YEARS_S  # a new store knows no better than its first clock
        machine.tick(world, 60.0)
        world.do(world.manager.drain(0.0))
        row = machine.store.find(OWNER.owner_id, name)
        assert row is not None
        assert row.expires_s == pytest.approx(machine.wall_s + TTL_S - 60.0, abs=5.0)


def test_a_store_of_an_earlier_version_is_given_the_grace(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with machine.serves() as world:
        names = fill(world)
        with machine.store._database.transaction():
            machine.store._database._writer.execute("DELETE FROM facts WHERE name = 'time'")
    machine.passes(2 * TTL_S)
    with machine.serves() as world:
        assert len(warnings(caplog)) == 1
        assert_there(world, names)
        machine.tick(world, GRACE_S + 1.0)
        machine.tick(world, 1.0)
        assert machine.num_rows() == 0


def test_the_time_is_noted_with_writes_and_no_more_often_than_it_says(machine: Machine) -> None:
    with machine.serves() as world:
        (name,) = fill(world, 1)
        noted = machine.store._database.noted_s()
        assert noted == machine.wall_s
        machine.tick(world, NOTED_S - 1.0)
        completed(world.run(name, turn("soon")))
        assert machine.store._database.noted_s() == noted
        machine.tick(world, 1.0)
        assert machine.store._database.noted_s() == noted, "nothing was written"
        completed(world.run(name, turn("later")))
        assert machine.store._database.noted_s() == machine.wall_s


def test_a_further_jump_begins_the_grace_anew() -> None:
    times = [1000.0, 0.0]
    clock = StoreClock(1000.0, wall=lambda: times[0], clock=lambda: times[1])
    times[0] += 10 * JUMP_S
    assert clock.watch() == 10 * JUMP_S
    times[:] = times[0] + YEARS_S, GRACE_S - 1.0
    assert clock.watch() > 0.0
    times[:] = times[0] + 10.0, times[1] + 10.0
    assert clock.watch() == 0.0
    assert clock.now_s() == 1000.0 + times[1], "it was believed for no more than ten seconds"
    times[:] = times[0] + GRACE_S, times[1] + GRACE_S
    assert clock.watch() == 0.0
    assert clock.now_s() == times[0]


def test_a_clock_that_is_set_back_a_little_brings_back_nothing_that_is_being_deleted(
    machine: Machine,
) -> None:
    with machine.serves(kv_tiers="disk") as world:
        (name,) = fill(world, 1)
    with machine.serves(kv_tiers="disk") as world:
        machine.tick(world, TTL_S + 10.0)
        (told,) = (each for each in world.engine.seen if isinstance(each, ForgetKV))
        world.engine.commands.remove(told)  # its disk takes a while
        assert told.number is not None
        machine.wall_s -= JUMP_S / 2
        machine.tick(world, 1.0)
        with contextlib.suppress(SessionNotFound):
            completed(world.run(name, turn("acknowledged")))
        world.manager.on_event(KVForgotten(number=told.number, is_gone=True))
        world.spin(5)
        is_there = bool(world.do(world.manager.list(OWNER)).sessions)
        assert machine.num_rows() == is_there
