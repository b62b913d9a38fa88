"""Of a session that is deleted while the engine does not know it, the engine hears by its tokens:
its KV may be in host memory or on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from session_server.core.commands import CloseSession, ForgetKV, OpenSession, SubmitTurn
from session_server.core.errors import SessionNotFound
from session_server.core.owner import Owner
from session_server.core.session_events import ChatInput, Message
from session_server.sessions import stored_ends
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.session import Session
from session_server.sessions.store.session_store import ENTRIES_AT_ONCE
from session_server.sessions.stored_ends import MAX_TOLD_TOKENS
from tests.sessions.paper_store import count
from tests.sessions.recount import recount
from tests.sessions.test_stored_sessions import Disk
from tests.sessions.world import OWNER, World, turn


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


def stored(disk: Disk, *names: str, num_turns: int = 1) -> dict[str, tuple[int, ...]]:
    """Sessions of an earlier process, and what the engine had of them."""
    histories = {}
    with disk.world(kv_tiers="disk") as world:
        for name in names:
            world.create(is_stored=True, session_id=name)
            for number in range(num_turns):
                world.run(name, turn(f"t{number}", f"I am {name}, {number}", max_tokens=4))
            histories[name] = world.history(name)
        assert not told(world)
    return histories


def told(world: World) -> list[tuple[int, ...]]:
    """The tokens that the engine was told to forget."""
    found = [each for each in world.engine.seen if isinstance(each, ForgetKV)]
    return [tuple(np.frombuffer(each.tokens, "<i4").tolist()) for each in found]


def tick(world: World) -> None:
    """A second passes, and what it brings about is done."""
    world.now_s += 1.0
    world.manager.tick()
    for _ in range(4):
        world.spin(ENTRIES_AT_ONCE)
        world.engine.step()
        world.engine.deliver()
    world.spin(ENTRIES_AT_ONCE)


def num_rows(disk: Disk) -> int:
    return count(disk.store._database)[0]


def on_disk(disk: Disk) -> int:
    (holding,) = disk.store.holdings()
    return holding.num_retired


def num_counted(world: World) -> int:
    return world.manager._quotas.owned_sessions.held_by(OWNER)


def test_one_that_nobody_has_named_since_the_start(disk: Disk) -> None:
    histories = stored(disk, "one", "two")
    with disk.world(kv_tiers="disk") as world:
        world.manager.close(OWNER, "one")
        assert num_counted(world) == 1
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, "one")
        assert [view.session_id for view in world.do(world.manager.list(OWNER)).sessions] == ["two"]
        assert not told(world), "nobody waits for its tokens"
        tick(world)
        assert told(world) == [histories["one"]]
        assert num_rows(disk) == 1
        assert num_counted(world) == 1
        world.run("two", turn("next"))
        (command,) = (each for each in world.engine.seen if isinstance(each, ForgetKV))
        opened = next(each for each in world.engine.seen if isinstance(each, OpenSession))
        assert (command.tenant, command.tenant_salt) == (opened.tenant, opened.tenant_salt)
        tick(world)
        assert len(told(world)) == 1
        recount(world.manager)


def test_its_namespace_may_be_its_own(disk: Disk) -> None:
    with disk.world(kv_tiers="disk", share_prefixes=False) as world:
        world.create(is_stored=True, session_id="one")
        world.run("one", turn("1"))
        (salt,) = world.engine.salts.values()
    with disk.world(kv_tiers="disk", share_prefixes=False) as world:
        world.manager.close(OWNER, "one")
        tick(world)
        (command,) = (each for each in world.engine.seen if isinstance(each, ForgetKV))
        assert command.tenant_salt == salt


def test_one_that_was_read_and_not_used(disk: Disk) -> None:
    histories = stored(disk, "one")
    with disk.world(kv_tiers="disk") as world:
        assert world.history("one") == histories["one"]
        world.manager.close(OWNER, "one")
        tick(world)
        assert told(world) == [histories["one"]]
        assert num_rows(disk) == num_counted(world) == 0
        recount(world.manager)


def test_those_whose_time_is_over(disk: Disk) -> None:
    histories = stored(disk, "one", "two", "three")
    with disk.world(kv_tiers="disk") as world:
        world.manager.get(OWNER, "three")
        disk.now_s += 10_000.0
        world.now_s += 10_000.0
        for _ in range(3):
            tick(world)
        assert sorted(told(world)) == sorted(histories.values())
        assert num_rows(disk) == num_counted(world) == 0


def test_one_that_makes_room_and_one_that_is_spared(disk: Disk) -> None:
    with disk.world(kv_tiers="disk") as world:
        histories = []
        for name in ("one", "two"):
            world.create(is_stored=True, session_id=name)
            world.run(name, turn("1", name))
            session = session_of(world, name)
            session.life.num_own_uses = session.life.num_uses
            world.manager._flow.conclusion.logs.touch(session)
            histories.append(world.history(name))
    with disk.world(kv_tiers="disk") as world:
        world.manager._sessions.spare_on_disk(OWNER, "two")
        assert world.manager._quotas.room_makers.delete(OWNER, of_others=False)
        assert num_counted(world) == 0
        tick(world)
        assert sorted(told(world)) == sorted(histories)


def test_without_tiers_it_is_deleted_at_once(disk: Disk) -> None:
    stored(disk, "one", "two")
    with disk.world() as world:
        world.manager.close(OWNER, "one")
        assert num_rows(disk) == 1
        world.manager.get(OWNER, "two")
        world.manager.close(OWNER, "two")
        assert num_rows(disk) == 0
        tick(world)
        assert not told(world)


def test_host_memory_has_nothing_of_an_earlier_engine(disk: Disk) -> None:
    stored(disk, "one", "two")
    with disk.world(kv_tiers="host", quotas=QuotaLimits(sessions=1)) as world:
        disk.now_s += 5.0
        world.manager.close(OWNER, "one")
        assert num_rows(disk) == 1
        world.run("two", turn("again"))
        history = world.history("two")
        world.create(session_id="three")
        assert world.manager._sessions.find(OWNER, "two") is None, "it was unloaded"
        assert world.engine.seen[-1].is_deleted is False  # type: ignore[union-attr]
        world.manager.close(OWNER, "two")
        tick(world)
        assert told(world) == [history]
        assert num_rows(disk) == 0


def test_host_memory_is_gone_with_its_engine(disk: Disk) -> None:
    with disk.world(kv_tiers="host") as world:
        world.create(is_stored=True, session_id="one")
        world.run("one", turn("1"))
        world.now_s += 1.0
        world.engine.die()
        world.engine.come_up()
        world.engine.deliver()
        world.manager.close(OWNER, "one")
        tick(world)
        assert not told(world)
        assert num_rows(disk) == 0


def test_one_that_is_not_stored_is_told_from_memory() -> None:
    with World(kv_tiers="host") as world:
        name = world.open()
        world.run(name, turn("1"))
        history = world.history(name)
        world.manager.edits.retention.pin(OWNER, name, pinned=True)  # from its next turn on
        assert world.engine.seen[-1].is_deleted is False  # type: ignore[union-attr]
        world.manager.close(OWNER, name)
        assert told(world) == [history]


def session_of(world: World, name: str) -> Session:
    found = world.manager._sessions.find(OWNER, name)
    assert found is not None
    return found


def test_it_waits_on_disk_for_an_engine_and_for_the_next_process(disk: Disk) -> None:
    histories = stored(disk, "one", "two")
    with disk.world(kv_tiers="disk") as world:
        world.engine.die()
        world.engine.deliver()
        world.manager.close(OWNER, "one")
        tick(world)
        assert num_rows(disk) == 2
        world.engine.come_up()
        world.engine.deliver()
        world.engine.is_full = True
        tick(world)
        assert num_rows(disk) == 2
        world.engine.is_full = False
        tick(world)
        assert told(world) == [histories["one"]]
        world.manager.close(OWNER, "two")
    with disk.world(kv_tiers="disk") as world:
        assert num_counted(world) == 0
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, "two")
        tick(world)
        assert told(world) == [histories["two"]]
        assert num_rows(disk) == num_counted(world) == 0


def test_its_id_is_free_at_once(disk: Disk) -> None:
    histories = stored(disk, "one", "two")
    with disk.world(kv_tiers="disk") as world:
        world.manager.close(OWNER, "one")
        world.create(is_stored=True, session_id="one")
        disk.now_s += 10_000.0  # and so is that of one whose time is over
        world.create(is_stored=True, session_id="two")
        tick(world)
        assert sorted(told(world)) == sorted(histories.values())
        assert num_rows(disk) == num_counted(world) == 2
        assert world.history("one") == world.history("two") == ()
        recount(world.manager)


def test_one_that_cannot_be_read_goes_and_its_kv_ages_out(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    stored(disk, "one")
    with disk.world(kv_tiers="disk") as world:
        with disk.store._database.transaction():
            disk.store._database._writer.execute("UPDATE entries SET entry = x'00'")
        world.manager.close(OWNER, "one")
        tick(world)
        assert not told(world)
        assert num_rows(disk) == 0
    assert "session one cannot be read, so its KV ages out" in caplog.text


def test_many_and_long_ones_are_told_in_slices(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    histories = stored(disk, "long", num_turns=3 * ENTRIES_AT_ONCE) | stored(disk, "b", "c", "d")
    limit = len(histories["long"]) + 1
    assert limit < MAX_TOLD_TOKENS
    monkeypatch.setattr(stored_ends, "MAX_TOLD_TOKENS", limit)
    with disk.world(kv_tiers="disk") as world:
        for name in histories:
            world.manager.close(OWNER, name)
        world.now_s += 1.0
        world.manager.tick()
        num_slices = 0
        while not told(world):
            num_slices += 1
            world.spin(1)
        assert num_slices >= 2
        world.spin(100)
        assert len(told(world)) == 2, "one more than there is room for"
        tick(world)
        assert sorted(told(world)) == sorted(histories.values())


def test_those_that_come_back_keep_theirs(disk: Disk) -> None:
    stored(disk, "one", "two")
    with disk.world(kv_tiers="disk", quotas=QuotaLimits(sessions=1)) as world:
        world.manager.get(OWNER, "one")
        world.manager.get(OWNER, "two")
        world.do(world.manager.drain(0.0))
        tick(world)
        assert not told(world)
        assert num_rows(disk) == 2


def test_an_end_leaves_those_that_come_back_to_the_engine_and_closes_the_others(disk: Disk) -> None:
    """It writes what is worth it, what was used last first: to close them would ask for another
    order."""
    with disk.world(kv_tiers="disk") as world:
        for name, is_stored in (("one", True), ("two", True), ("passing", False)):
            world.create(is_stored=is_stored, session_id=name)
            world.run(name, turn("t", name, max_tokens=4))
        world.do(world.manager.drain(0.0))
        (closed,) = (each for each in world.engine.seen if isinstance(each, CloseSession))
        opened = [each for each in world.engine.seen if isinstance(each, OpenSession)]
        assert (closed.session_id, closed.is_deleted) == (opened[-1].session_id, True)
        assert num_rows(disk) == 2


def test_sessions_of_another_tokenizer_have_nothing_here(disk: Disk) -> None:
    stored(disk, "one")
    with disk.world(kv_tiers="disk", model=b"another") as world:
        world.manager.close(OWNER, "one")
        assert num_rows(disk) == 0
        tick(world)
        assert not told(world)


def test_another_owner_has_another_namespace(disk: Disk) -> None:
    other = Owner("other")
    with disk.world(kv_tiers="disk") as world:
        for owner in (OWNER, other):
            world.create(owner=owner, is_stored=True, session_id="one")
            world.submit("one", turn("1"), owner=owner)
            world.engine.run()
    with disk.world(kv_tiers="disk") as world:
        for owner in (OWNER, other):
            world.manager.close(owner, "one")
        tick(world)
        found = [each for each in world.engine.seen if isinstance(each, ForgetKV)]
        assert len({each.tenant for each in found}) == 2
        assert len({each.tenant_salt for each in found}) == 2


@pytest.mark.parametrize("is_rewound", [True, False])
def test_what_is_cut_off_a_history_is_told_too(disk: Disk, *, is_rewound: bool) -> None:
    histories = stored(disk, "one", num_turns=9)
    with disk.world(kv_tiers="disk") as world:
        if is_rewound:
            first = world.manager.snapshot(OWNER, "one").items[1]
            world.manager.edits.rewind(OWNER, "one", first.id)
            num_kept = len(world.history("one"))
        else:
            anew = ChatInput((Message("user", "Something else"),), is_whole=True)
            world.submit("one", turn("other", anew))
            num_kept = next(
                len(each.tokens) for each in world.engine.seen if isinstance(each, OpenSession)
            )
        assert told(world) == [histories["one"]]
        assert num_kept < len(histories["one"])
        (command,) = (each for each in world.engine.seen if isinstance(each, ForgetKV))
        assert command.num_kept == num_kept


@pytest.mark.parametrize("how", ["unloaded", "drained", "pinned"])
def test_what_was_cut_off_in_the_engine_stays_there_no_longer_than_its_session(
    disk: Disk, how: str
) -> None:
    """Its tokens may be in no log: then nobody could name what they have left."""
    with disk.world(kv_tiers="disk", quotas=QuotaLimits(sessions=2)) as world:
        for name in ("cut", "whole"):
            world.create(is_stored=True, session_id=name)
            world.run(name, turn("1", name, max_tokens=40))
        first = world.manager.snapshot(OWNER, "cut").items[0]
        world.manager.edits.rewind(OWNER, "cut", first.id)
        names = {session_of(world, name).copy.session_id: name for name in ("cut", "whole")}
        if how == "drained":
            world.do(world.manager.drain(0.0))
        for name in ("cut", "whole"):
            if how == "pinned":
                world.manager.edits.retention.pin(OWNER, name, pinned=True)
            elif how == "unloaded":
                world.create()
        closed = [each for each in world.engine.seen if isinstance(each, CloseSession)]
        is_deleted = {names[each.session_id]: each.is_deleted for each in closed}
        assert is_deleted == {"cut": True} | ({} if how == "drained" else {"whole": False})
        assert num_rows(disk) == 2


@pytest.mark.parametrize("how", ["canceled", "failed"])
def test_what_was_cut_off_stays_in_the_engine_until_a_turn_has_begun(disk: Disk, how: str) -> None:
    """A turn that ends while it waits there has changed nothing."""
    with disk.world(kv_tiers="disk", quotas=QuotaLimits(sessions=1)) as world:
        world.create(is_stored=True, session_id="cut")
        world.run("cut", turn("1", max_tokens=40))
        first = world.manager.snapshot(OWNER, "cut").items[0]
        world.manager.edits.rewind(OWNER, "cut", first.id)
        world.submit("cut", turn("2"))
        if how == "canceled":
            world.manager.cancel(OWNER, "cut", "2")
        else:
            command = world.engine.commands.pop()
            assert isinstance(command, SubmitTurn)
            world.engine._fail(command.session_id, command.turn_id, "busy", command.base_len)
        world.engine.run()
        world.create()
        (closed,) = (each for each in world.engine.seen if isinstance(each, CloseSession))
        assert closed.is_deleted


@pytest.mark.parametrize("is_read", [True, False])
def test_what_was_cut_off_since_the_last_turn_is_told_by_the_next_server(
    disk: Disk, *, is_read: bool
) -> None:
    before, num_kept = (), 0
    with disk.world(kv_tiers="disk") as world:
        world.create(is_stored=True, session_id="cut")
        for number in range(9):
            world.run("cut", turn(f"t{number}", "Again and again"))
        before = world.history("cut")
        items = world.manager.snapshot(OWNER, "cut").items
        for item in (items[5], items[1]):
            world.manager.edits.rewind(OWNER, "cut", item.id)
        num_kept = len(world.history("cut"))
    with disk.world(kv_tiers="disk") as world:
        if is_read:
            world.history("cut")
        else:
            world.manager.close(OWNER, "cut")
            tick(world)
        found = [each for each in world.engine.seen if isinstance(each, ForgetKV)]
        assert (told(world)[0], found[0].num_kept) == (before, num_kept)


def test_one_that_the_engine_knows_is_there_until_its_files_are_gone(disk: Disk) -> None:
    with disk.world(kv_tiers="disk") as world:
        world.create(is_stored=True, session_id="one")
        world.run("one", turn("1"))
        history = world.history("one")
        world.manager.close(OWNER, "one")
        assert isinstance(world.engine.seen[-1], CloseSession)
        world.engine.die()  # before it has dropped anything
        world.engine.deliver()
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, "one")
        tick(world)
        assert num_rows(disk) == 1
        world.engine.come_up()
        tick(world)
        tick(world)
        assert told(world) == [history]
        assert num_rows(disk) == num_counted(world) == 0
        recount(world.manager)


def test_it_goes_once_the_engine_has_answered_that_nothing_is_left(disk: Disk) -> None:
    histories = stored(disk, "one")
    with disk.world(kv_tiers="disk") as world:
        world.engine.erases = False
        world.manager.close(OWNER, "one")
        tick(world)
        assert told(world) == [histories["one"]]
        assert num_rows(disk) == 1
    with disk.world(kv_tiers="disk") as world:  # the server was killed
        world.manager.tick()
        world.spin()
        assert told(world) == [histories["one"]]
        world.manager.tick()
        world.spin()
        assert len(told(world)) == 1, "it is asked once"
        world.engine.die()
        world.engine.come_up()
        for _ in range(2):
            tick(world)
        assert len(told(world)) == 2, "and again of another engine"
        assert num_rows(disk) == 0


def test_the_engine_is_asked_of_no_more_than_a_slice_before_it_answers(disk: Disk) -> None:
    names = [f"s{number}" for number in range(3 * stored_ends.AT_ONCE)]
    stored(disk, *names)
    with disk.world(kv_tiers="disk") as world:
        for name in names:
            world.manager.close(OWNER, name)
        for _ in range(3):
            world.now_s += 1.0
            world.manager.tick()
            world.spin(4 * len(names))
        assert stored_ends.AT_ONCE <= len(told(world)) <= stored_ends.AT_ONCE + 1
        tick(world)
        tick(world)
        assert len(told(world)) == len(names)
        assert num_rows(disk) == 0


def test_one_that_is_deleted_while_it_is_written_counts_as_what_is_written(disk: Disk) -> None:
    with disk.world(kv_tiers="disk") as world:
        world.create(is_stored=True, session_id="one")
        for number in range(9):
            world.run("one", turn(f"t{number}", "Again and again"))
        place = session_of(world, "one").life.log
        assert place is not None
        disk.store.is_slow, place.is_behind = True, True  # the next write has all that is left
        world.manager.edits.rewind(OWNER, "one", None)
        world.manager.close(OWNER, "one")
        disk.store.is_slow = False
        disk.store.tell()
        assert dict(disk.store.deletions._retired_bytes) == {OWNER.owner_id: on_disk(disk)}
        tick(world)
        tick(world)
        assert num_rows(disk) == 0
        assert not disk.store.deletions._retired_bytes


def test_one_whose_deletion_has_failed_leaves_no_kv_either(disk: Disk) -> None:
    histories = stored(disk, "one")
    with disk.world(kv_tiers="disk") as world:
        disk.store.fails = True
        world.manager.close(OWNER, "one")
        disk.store.fails = False
        for _ in range(3):
            tick(world)
        assert told(world) == [histories["one"]]
        assert num_rows(disk) == 0
