"""Sessions at rest leave the memory to make room, and nobody sees it but by their epoch."""

from __future__ import annotations

import gc
from pathlib import Path
from weakref import ref

import pytest

from session_server.core.commands import OpenSession
from session_server.core.errors import QuotaExceeded, ServerBusy, SessionNotFound
from session_server.core.owner import Owner, TenantLimits
from session_server.sessions import quotas as quotas_module
from session_server.sessions.backlog import SLICE
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.session import Session
from session_server.sessions.usage import quota_uses
from session_server.sessions.views import OpenRequest
from tests.sessions.paper_store import count
from tests.sessions.recount import recount
from tests.sessions.test_stored_sessions import Disk, state_of
from tests.sessions.world import OWNER, World, completed, turn


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


def loaded(world: World) -> set[str]:
    """The sessions that are in memory."""
    return {session.session_id for session in world.manager._sessions}


def session_of(world: World, name: str) -> Session:
    found = world.manager._sessions.find(OWNER, name)
    assert found is not None
    return found


FEW = QuotaLimits(sessions=3)


def test_the_one_unused_for_longest_leaves_and_comes_back_as_it_was(disk: Disk) -> None:
    with disk.world(quotas=FEW) as world:
        names = [world.create(is_stored=True, metadata={"n": str(n)}) for n in range(3)]
        ends = {name: completed(world.run(name, turn("1"))) for name in names}
        states = {name: state_of(world, name) for name in names}
        epochs = {name: world.manager.get(OWNER, name).epoch for name in names}
        world.manager.get(OWNER, names[0])  # whoever looks uses it
        names.append(world.create(is_stored=True))
        assert loaded(world) == {names[0], names[2], names[3]}
        recount(world.manager)
        for name in names[:3]:
            assert state_of(world, name) == states[name]
            assert world.manager.turn(OWNER, name, "1").end is not None
            again = world.submit(name, turn("1"))
            assert again.end is not None
            assert again.end.outcome.text == ends[name].outcome.text
        assert world.manager.get(OWNER, names[1]).epoch != epochs[names[1]]
        stats = world.manager.stats()
        assert (stats.sessions, stats.unread_sessions) == (3, 1)
        assert stats.loaded_sessions == stats.unloaded_sessions - 1
        assert stats.closed_sessions == {}
        recount(world.manager)
    with disk.world() as world:
        assert len(world.do(world.manager.list(OWNER)).sessions) == 4
        assert world.manager.stats().unread_sessions == 4


def test_a_conversation_goes_on_across_unloading_token_for_token(disk: Disk) -> None:
    with World() as plain, disk.world(quotas=QuotaLimits(sessions=1)) as world:
        first, second = (world.create(is_stored=True, session_id=name) for name in "ab")
        reference = plain.create()
        for number in range(6):
            request = turn(f"t{number}", f"question {number}", max_tokens=9)
            end = completed(world.run(first, request))
            assert (
                end.outcome.token_ids == completed(plain.run(reference, request)).outcome.token_ids
            )
            assert end.outcome.is_durable
            world.run(second, turn(f"t{number}"))
            assert loaded(world) == {second}
        assert world.history(first) == plain.history(reference)


def test_a_session_that_left_has_left_nothing(disk: Disk) -> None:
    with disk.world(quotas=QuotaLimits(sessions=1)) as world:
        name = world.create(is_stored=True)
        world.run(name, turn("1"))
        session = ref(session_of(world, name))
        journal = ref(session_of(world, name).journal)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            other = world.create(is_stored=True)
            assert session() is None, "no cycle keeps it"
            assert journal() is None
        finally:
            if was_enabled:
                gc.enable()
        world.engine.run()
        assert not world.engine.slots
        quotas = world.manager._quotas
        assert quotas.kv_tokens.total == 0
        assert len(world.manager._flow.residents) == 0
        recount(world.manager)
        for each in (name, other):
            world.manager.close(OWNER, each)
        assert not quotas.owners
        assert count(disk.store._database)[0] == 0


@pytest.mark.parametrize(
    "reason",
    [
        "turn",
        "queue",
        "listener",
        "reader",
        "draft",
        "write",
        "behind",
        "disk",
        "attached",
    ],
)
def test_who_is_in_use_or_not_on_disk_stays(disk: Disk, reason: str) -> None:
    with disk.world(quotas=QuotaLimits(sessions=1)) as world:
        name = world.create(is_stored=True)
        session = session_of(world, name)
        match reason:
            case "turn":
                world.submit(name, turn("1", max_tokens=50, ignore_eos=True))
                world.engine.step()
            case "queue":
                world.engine.die(will_restart=True)
                world.submit(name, turn("1"))
                assert session.queue
            case "listener":
                session.journal.add_listener(lambda: None)
            case "reader":
                world.manager.exits.count_readers = lambda owner, each: int(
                    (owner, each) == (OWNER, name)
                )
            case "draft":
                world.manager.drafts.submit(OWNER, name, turn("d"), lambda _answer: None)
            case "write":
                disk.store.is_slow = True
                world.manager.edits.rewind(OWNER, name, None)
            case "behind":
                disk.store.fails = True
                world.run(name, turn("1"))
                disk.store.fails = False
            case "disk":
                disk.store.fails = True
                world.manager.update(OWNER, name, ttl_s=77.0)
            case "attached":
                world.manager.set_attached_bytes(OWNER, name, 10)
        with pytest.raises(ServerBusy):
            world.open()
        assert session_of(world, name) is session
        assert not session.journal.is_closed
        disk.store.tell()


@pytest.mark.parametrize("kv", ["none yet", "cooled", "of an engine that died"])
def test_a_pin_without_kv_keeps_no_place_in_memory(disk: Disk, kv: str) -> None:
    with disk.world(quotas=QuotaLimits(sessions=2)) as world:
        pinned = [world.create(is_stored=True, pinned=True) for _ in "ab"]
        if kv != "none yet":
            for name in pinned:
                world.run(name, turn("1"))
        if kv == "cooled":
            for slot in list(world.engine.slots):
                world.engine.cool(slot)
            world.engine.deliver()
        if kv == "of an engine that died":
            world.engine.die()
            world.engine.come_up()
            world.engine.deliver()
        completed(world.run(world.create(is_stored=True), turn("1")))
        assert len(loaded(world) & {*pinned}) == 1
        for name in pinned:
            assert world.manager.get(OWNER, name).is_pinned
            completed(world.run(name, turn("2")))
        opened = [each for each in world.engine.seen if isinstance(each, OpenSession)]
        assert [each.pinned for each in opened[-2:]] == [True, True]


def test_a_pin_with_kv_leaves_the_memory_behind_all_others(disk: Disk) -> None:
    """Else whoever pins as many sessions as there may be in memory has all of it."""
    with disk.world(quotas=QuotaLimits(sessions=3)) as world:
        pinned = [world.create(is_stored=True, pinned=True) for _ in "ab"]
        for name in pinned:
            world.run(name, turn("1"))
        for _ in range(3):
            world.create(is_stored=True)
            assert {*pinned} <= loaded(world)
        third = world.create(is_stored=True, pinned=True)
        world.run(third, turn("1"))
        other = world.create(is_stored=True)
        completed(world.run(other, turn("1")))
        assert loaded(world) == {pinned[1], third, other}
        assert world.manager.get(OWNER, pinned[0]).is_pinned


def test_the_session_in_hand_stays(disk: Disk) -> None:
    """A turn, or a change, of the only session that could make room for it."""
    with disk.world() as world:
        name = world.create(is_stored=True)
        session = session_of(world, name)
        world.manager._quotas.history_bytes._limit = session.num_bytes + 2000
        with pytest.raises(ServerBusy):
            world.submit(name, turn("1", "word " * 350))
        with pytest.raises(ServerBusy):
            world.manager.update(OWNER, name, metadata=dict.fromkeys("abcd", "v" * 500))
        assert session_of(world, name) is session
        completed(world.run(name, turn("2")))


def test_a_session_that_makes_room_for_its_fork_is_whole(disk: Disk) -> None:
    with disk.world(quotas=QuotaLimits(sessions=1)) as world:
        name = world.create(is_stored=True)
        world.run(name, turn("1"))
        history = world.history(name)
        fork = world.manager.edits.fork(OWNER, name).session_id
        assert loaded(world) == {fork}
        assert world.history(fork) == world.history(name) == history


def test_bytes_of_histories_make_room_for_a_turn(disk: Disk) -> None:
    with disk.world() as world:
        names = [world.create(is_stored=True) for _ in range(5)]
        for name in names:
            world.run(name, turn("1", "word " * 200))
        quotas = world.manager._quotas
        quotas.history_bytes._limit = quotas.history_bytes.total + 2000
        completed(world.run(names[4], turn("2", "word " * 400)))
        assert names[4] in loaded(world)
        assert names[0] not in loaded(world)
        assert names[3] in loaded(world), "no more leave than need to"
        recount(world.manager)


def test_a_session_without_a_place_on_disk_does_not_leave(disk: Disk) -> None:
    with disk.world(quotas=FEW) as world:
        for _ in range(3):
            world.create()
        with pytest.raises(ServerBusy):
            world.create(is_stored=True)
        with pytest.raises(ServerBusy):
            world.create()


def test_an_owner_has_as_many_sessions_wherever_they_are(disk: Disk) -> None:
    owner = Owner("small", limits=TenantLimits(max_sessions=2))
    with disk.world(quotas=FEW) as world:
        manager = world.manager
        mine = [world.create(owner=owner, is_stored=True) for _ in range(2)]
        others = [world.create(is_stored=True) for _ in range(3)]
        assert loaded(world) == set(others)

        def held() -> int:
            uses = quota_uses(manager._quotas, owner, num_connections=0, now_s=world.now_s)
            return uses["max_sessions"].held

        assert held() == 2
        for is_stored in (True, False):
            with pytest.raises(QuotaExceeded):
                world.create(owner=owner, is_stored=is_stored)
        assert loaded(world) == set(others), "nobody leaves for what is refused"
        assert manager.get(owner, mine[0]).session_id == mine[0]
        assert held() == 2
        manager.close(owner, mine[1])
        assert held() == 1
        manager.close(owner, mine[0])
        assert held() == 0
        assert not manager._quotas.holds(owner)


def test_an_owner_whose_memory_is_full_makes_room_of_its_own(disk: Disk) -> None:
    owner = Owner("small", limits=TenantLimits(max_bytes=40_000))
    with disk.world() as world:
        other = world.create(is_stored=True)
        names = [world.create(owner=owner, is_stored=True) for _ in range(30)]
        assert other in loaded(world)
        assert 1 < len(loaded(world)) < 20
        assert len(world.do(world.manager.list(owner)).sessions) == len(names)


def test_one_that_left_is_listed_closed_and_expires_like_any_other(disk: Disk) -> None:
    with disk.world(quotas=QuotaLimits(sessions=1)) as world:
        names = [world.create(is_stored=True, ttl_s=60.0) for _ in range(4)]
        assert [view.session_id for view in world.do(world.manager.list(OWNER)).sessions] == names
        assert world.manager.close(OWNER, names[0]).state == "closing"
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, names[0])
        with pytest.raises(SessionNotFound):
            world.manager.journal(OWNER, names[0])
        for clock in (disk, world):
            clock.now_s += 30.0
        world.run(names[1], turn("1"))
        for clock in (disk, world):
            clock.now_s += 40.0
        world.manager.tick()
        assert [view.session_id for view in world.do(world.manager.list(OWNER)).sessions] == [
            names[1]
        ]
        stats = world.manager.stats()
        assert (stats.sessions, stats.unread_sessions) == (1, 0)


def test_the_time_that_is_on_disk_is_right_before_a_session_leaves(disk: Disk) -> None:
    """Where a turn that waited is canceled, the disk has a longer time until more is written."""
    with disk.world(quotas=QuotaLimits(sessions=1)) as world:
        name = world.create(is_stored=True, ttl_s=60.0)
        world.engine.die(will_restart=True)
        world.submit(name, turn("1"))
        world.manager.cancel(OWNER, name, "1")
        assert session_of(world, name).is_idle
        with pytest.raises(ServerBusy):
            world.open()  # it is written first
        world.open()
        row = disk.store.find(OWNER.owner_id, name)
        assert row is not None
        assert row.expires_s == pytest.approx(disk.now_s + 60.0, abs=1.0)


def test_making_room_looks_at_no_more_sessions_than_leave(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.world(quotas=QuotaLimits(sessions=300)) as world:
        exits, looks = world.manager.exits, list[str]()
        can_be_read_again = exits._can_be_read_again

        def look(session: Session) -> bool:
            looks.append(session.session_id)
            return can_be_read_again(session)

        monkeypatch.setattr(exits, "_can_be_read_again", look)
        names = [world.create(is_stored=True) for _ in range(400)]
        assert looks == names[:100]
        looks.clear()
        for session in list(world.manager._sessions):
            session.journal.add_listener(lambda: None)
        with pytest.raises(ServerBusy):
            world.create(is_stored=True)
        assert len(looks) == SLICE


def test_one_request_takes_the_place_of_no_more_than_its_bound(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas_module, "MAX_UNLOADED", 3)
    with disk.world() as world:
        for _ in range(9):
            world.create(is_stored=True)
        quotas = world.manager._quotas
        quotas.history_bytes._limit = num_bytes = quotas.history_bytes.total
        with pytest.raises(ServerBusy):
            quotas.check_growth(OWNER, num_bytes // 2)
        assert len(loaded(world)) == 6
        quotas.check_growth(OWNER, num_bytes // 2)
        assert len(loaded(world)) == 4
        recount(world.manager)


def test_a_damaged_session_that_left_takes_no_other_with_it(disk: Disk) -> None:
    with disk.world(quotas=QuotaLimits(sessions=1)) as world:
        damaged, whole = (world.create(is_stored=True) for _ in range(2))
        world.manager.open(OWNER, OpenRequest(is_stored=True))
        with disk.store._database.transaction():
            disk.store._database._writer.execute(
                "UPDATE sessions SET settings = x'00' WHERE id = ?", (damaged,)
            )
        for _ in range(2):
            with pytest.raises(Exception, match="damaged"):
                world.manager.get(OWNER, damaged)
        assert world.manager.get(OWNER, whole).session_id == whole
        assert len(world.do(world.manager.list(OWNER)).sessions) == 3
        world.manager.close(OWNER, damaged)
        assert len(world.do(world.manager.list(OWNER)).sessions) == 2
        recount(world.manager)
