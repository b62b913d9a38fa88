"""The bytes that sessions may have on disk, in all and of one owner."""

from __future__ import annotations

from pathlib import Path

import pytest

from session_server.core.errors import QuotaExceeded, ServerBusy
from session_server.core.owner import Owner
from session_server.sessions.quotas import QuotaLimits
from tests.sessions.test_stored_sessions import Disk
from tests.sessions.world import OWNER, World, completed, turn


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


def on_disk(disk: Disk) -> int:
    """The bytes of all sessions, as the database has them."""
    return sum(holding.num_bytes for holding in disk.store.holdings())


def counted(world: World) -> int:
    return world.manager.stats().budgets["store_bytes"].held


def test_what_is_on_disk_is_counted_wherever_its_session_is(disk: Disk) -> None:
    with disk.world(quotas=QuotaLimits(sessions=2)) as world:
        names = [world.create(is_stored=True) for _ in range(4)]
        for name in names:
            for number in range(3):
                world.run(name, turn(f"t{number}", "word " * 30))
                assert counted(world) == on_disk(disk) > 0
        world.manager.edits.rewind(OWNER, names[0], None)
        world.manager.edits.fork(OWNER, names[1])
        assert counted(world) == on_disk(disk)
        for name in names[:2]:
            world.manager.close(OWNER, name)
            assert counted(world) == on_disk(disk)
        world.create()
        assert counted(world) == on_disk(disk)
    with disk.world() as world:
        assert counted(world) == on_disk(disk) > 0
        for view in world.do(world.manager.list(OWNER)).sessions:
            world.manager.close(OWNER, view.session_id)
        assert counted(world) == on_disk(disk) == 0


def test_what_a_client_sets_counts_as_what_it_says_does(disk: Disk) -> None:
    most, much = 40_000, {f"about {number}": "x" * 500 for number in range(8)}
    with disk.world(quotas=QuotaLimits(store_bytes=most)) as world:
        while counted(world) < most - 12_000:
            world.create(is_stored=True, metadata=much)
        with pytest.raises(ServerBusy, match="bytes in the store"):
            [world.create(is_stored=True, metadata=much) for _ in range(4)]
        held = counted(world)
        assert held == on_disk(disk) <= most
        name = world.do(world.manager.list(OWNER)).sessions[0].session_id
        world.manager.update(OWNER, name, metadata={})
        assert counted(world) == on_disk(disk) < held - 3900
    with disk.world() as world:
        assert counted(world) == on_disk(disk)
        world.manager.get(OWNER, name)
        world.manager.update(OWNER, name, metadata=much)
        assert counted(world) == on_disk(disk) == held


def test_a_write_that_fails_counts_nothing_and_its_retry_once(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        disk.store.fails = True
        world.run(name, turn("1"))
        assert counted(world) == on_disk(disk)
        disk.store.fails = False
        world.manager.tick()
        assert counted(world) == on_disk(disk)
        disk.store.is_slow = True
        world.submit(name, turn("2"))
        world.engine.run()
        world.manager.close(OWNER, name)
        assert counted(world) == on_disk(disk) or world.manager.stats().sessions
        disk.store.tell()
        assert counted(world) == on_disk(disk) == 0


def test_a_full_store_refuses_sessions_and_turns_and_nothing_that_makes_room(disk: Disk) -> None:
    with disk.world() as world:
        names = [world.create(is_stored=True) for _ in range(3)]
        for name in names:
            world.run(name, turn("1", "word " * 50))
        stored = world.manager._quotas.stored_bytes
        stored._limit = stored.total + 100
        with pytest.raises(ServerBusy, match="bytes in the store"):
            world.submit(names[0], turn("2", "word " * 50))
        with pytest.raises(ServerBusy, match="bytes in the store"):
            world.create(is_stored=True)
        with pytest.raises(ServerBusy, match="bytes in the store"):
            world.manager.edits.fork(OWNER, names[0])
        assert len(world.do(world.manager.list(OWNER)).sessions) == 3
        assert world.manager.get(OWNER, names[0]).running_turn is None
        memory = world.create()
        completed(world.run(memory, turn("1", "word " * 50)))  # it takes no disk
        world.manager.edits.rewind(OWNER, names[1], None)
        world.manager.update(OWNER, names[1], ttl_s=50.0)
        world.manager.close(OWNER, names[2])
        completed(world.run(names[0], turn("2", "word " * 50)))


def test_an_owner_has_its_share_of_the_store(disk: Disk) -> None:
    small, other = Owner("small", share=0.3), Owner("other", share=0.3)
    with disk.world(quotas=QuotaLimits(store_bytes=20_000)) as world:
        name = world.create(owner=small, is_stored=True)

        def talk() -> None:
            for number in range(99):
                world.submit(name, turn(f"t{number}", "word " * 100), owner=small)
                world.engine.run()

        with pytest.raises(QuotaExceeded, match="bytes in the store"):
            talk()
        held = world.manager._quotas.stored_bytes.held_by(small)
        assert 4_000 < held < 8_000
        theirs = world.create(owner=other, is_stored=True)
        world.submit(theirs, turn("1", "word " * 100), owner=other)
        world.engine.run()
    with disk.world(quotas=QuotaLimits(store_bytes=20_000)) as world:
        with pytest.raises(QuotaExceeded):
            world.submit(name, turn("again", "word " * 500), owner=small)
        world.manager.close(small, name)
        world.create(owner=small, is_stored=True)
