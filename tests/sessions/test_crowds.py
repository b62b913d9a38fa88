"""Many sessions at once: what happens to all of them is done in slices, or only where it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from session_server.core.errors import EngineUnavailable
from session_server.core.session_events import SessionStateChanged
from session_server.sessions import turn_flow
from session_server.sessions.backlog import SLICE, Backlog
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.registry import SessionRegistry
from session_server.sessions.turn_flow import TurnFlow
from tests.sessions.recount import recount
from tests.sessions.world import OWNER, World, cancelled, completed, failed, turn

MANY = QuotaLimits(sessions=10_000, turns=10_000, owner_sessions=10_000, owner_turns=10_000)
NUM = 2 * SLICE + 10


def crowd(world: World, count: int) -> list[str]:
    return [world.open(session_id=f"s{index}") for index in range(count)]


def num_ended(world: World, names: list[str], turn_id: str) -> int:
    return sum(world.manager.turn(OWNER, name, turn_id).end is not None for name in names)


def test_nothing_that_happens_often_walks_over_all_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def walk(_: SessionRegistry) -> None:
        raise AssertionError("walked over all sessions")

    with World(quotas=MANY) as world:
        names = crowd(world, 20)
        world.run(names[0], turn("1"))
        monkeypatch.setattr(SessionRegistry, "__iter__", walk)
        world.submit(names[1], turn("1", max_tokens=50, ignore_eos=True))
        world.manager.tick()
        assert world.manager.stats().sessions == 20
        world.engine.die()
        world.engine.deliver()
        assert failed(world.end_of(names[1], "1")).code == "engine_restarting"
        assert world.submit(names[2], turn("1")).status == "queued"
        world.manager.tick()
        world.engine.come_up()
        world.engine.run()
        completed(world.end_of(names[2], "1"))
        completed(world.run(names[0], turn("2")))
        monkeypatch.undo()


def test_an_engine_that_dies_ends_its_turns_in_slices() -> None:
    with World(quotas=MANY) as world:
        names = crowd(world, NUM)
        for name in names:
            world.submit(name, turn("1", max_tokens=50, ignore_eos=True))
            world.submit(name, turn("2", max_tokens=2))
        world.engine.step()
        world.engine.deliver()
        world.engine.die()
        world.engine.deliver()
        assert num_ended(world, names, "1") == SLICE
        world.engine.come_up()
        world.engine.deliver()
        world.spin(10)
        assert num_ended(world, names, "1") == NUM
        assert all(failed(world.end_of(name, "1")).code == "engine_restarting" for name in names)
        recount(world.manager)
        world.engine.run()
        assert all(completed(world.end_of(name, "2")) for name in names)
        for name in names:
            states = [e.state for e in world.entries(name) if isinstance(e, SessionStateChanged)]
            assert states == ["cold", "resident"]


def test_a_turn_of_a_dead_engine_can_be_cancelled_before_its_slice_comes() -> None:
    with World(quotas=MANY) as world:
        names = crowd(world, NUM)
        for name in names:
            world.submit(name, turn("1", max_tokens=50, ignore_eos=True))
        world.engine.step()
        world.engine.deliver()
        world.engine.die()
        world.engine.come_up()
        world.engine.deliver()
        late, closed = names[-1], names[-2]
        journal = world.manager.journal(OWNER, closed)
        assert world.manager.cancel(OWNER, late, "1").end is None
        world.manager.close(OWNER, closed)
        world.spin(10)
        assert cancelled(world.end_of(late, "1")).kept_partial
        assert journal.is_closed
        world.engine.run()
        completed(world.run(late, turn("2")))
        recount(world.manager)


def test_idle_sessions_are_told_in_slices_that_their_kv_is_gone() -> None:
    with World(quotas=MANY) as world:
        names = crowd(world, NUM)
        for name in names:
            world.submit(name, turn("1", max_tokens=1))
        world.engine.run()
        world.engine.die()
        world.engine.deliver()
        cold = [world.manager.get(OWNER, name).state for name in names].count("cold")
        assert cold == SLICE
        world.spin(10)
        assert {world.manager.get(OWNER, name).state for name in names} == {"cold"}


def test_a_session_that_is_back_before_its_slice_comes_is_told_both() -> None:
    with World(quotas=MANY) as world:
        names = crowd(world, NUM)
        for name in names:
            world.submit(name, turn("1", max_tokens=1))
        world.engine.run()
        last = names[-1]
        assert world.manager.get(OWNER, last).state == "resident"
        world.engine.die()
        world.engine.come_up()
        world.engine.deliver()
        request = turn("2", max_tokens=50, ignore_eos=True)
        task = world.loop.create_task(world.manager.submit(OWNER, last, request))
        task.add_done_callback(lambda _: world.engine.step())
        task.add_done_callback(lambda _: world.engine.deliver())
        world.spin(10)
        world.engine.run()
        states = [e.state for e in world.entries(last) if isinstance(e, SessionStateChanged)]
        assert states == ["cold", "resident"]
        assert world.manager.get(OWNER, last).state == "resident"


def test_an_engine_that_comes_up_gets_waiting_turns_in_slices_and_in_order() -> None:
    with World(quotas=MANY) as world:
        names = crowd(world, NUM)
        world.engine.die()
        world.engine.deliver()
        for name in names:
            assert world.submit(name, turn("1")).status == "queued"
        world.engine.come_up()
        world.engine.deliver()
        assert world.manager.stats().live_turns == SLICE
        world.spin(10)
        assert world.manager.stats().live_turns == NUM
        world.engine.run()
        assert num_ended(world, names, "1") == NUM


def test_an_engine_that_takes_nothing_is_offered_one_turn_per_tick() -> None:
    with World(quotas=MANY) as world:
        names = crowd(world, 20)
        world.engine.is_full = True
        for name in names:
            world.submit(name, turn("1"))
        offers = 0
        send = world.engine.send

        def count(command: object) -> None:
            nonlocal offers
            offers += 1
            send(command)  # type: ignore[arg-type]

        world.engine.send = count  # type: ignore[method-assign]
        for number in range(1, 4):
            world.manager.tick()
            assert offers == number
        world.engine.is_full = False
        world.manager.tick()
        world.engine.run()
        assert num_ended(world, names, "1") == 20


def test_a_drain_leaves_the_event_loop_free_in_between() -> None:
    with World(quotas=MANY) as world:
        crowd(world, NUM)
        rounds = 0

        def count() -> None:
            nonlocal rounds
            rounds += 1
            world.loop.call_soon(count)

        world.loop.call_soon(count)
        world.do(world.manager.drain(0.0))
        assert rounds >= 3 * (NUM // SLICE)
        assert world.manager.stats().sessions == 0


def test_work_that_fails_does_not_keep_the_rest_from_being_done() -> None:
    with World() as world:
        backlog, done = Backlog(), list[int]()
        backlog.bind(world.loop)
        world.loop.set_exception_handler(lambda _loop, _context: done.append(-1))

        def fail() -> None:
            raise EngineUnavailable("no")

        work = [lambda n=n: done.append(n) for n in range(3)]
        with pytest.raises(EngineUnavailable):
            backlog.run(iter([work[0], fail, work[1], fail, work[2]]))
        world.spin(5)
        assert done == [0, 1, -1, 2]
        assert len(backlog) == 0


def test_work_is_made_when_its_slice_comes() -> None:
    with World() as world:
        backlog, made = Backlog(), [0]
        backlog.bind(world.loop)

        def make() -> Iterator[Callable[[], None]]:
            for _ in range(2 * SLICE + 1):
                made[0] += 1
                yield lambda: None

        backlog.run(make())
        assert made == [SLICE]
        world.spin(5)
        assert made == [2 * SLICE + 1]
        assert len(backlog) == 0


@pytest.mark.parametrize("is_drain", [False, True])
def test_a_waiting_turn_is_looked_at_once_when_it_is_closed(
    is_drain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_waiting = 40
    with World(limits=SessionLimits(max_queued_turns=num_waiting)) as world:
        session = world.open()
        visits, accept = [0], TurnFlow._accept

        def count(self: TurnFlow, *args: Any) -> None:
            visits[0] += 1
            accept(self, *args)

        monkeypatch.setattr(TurnFlow, "_accept", count)
        for number in range(num_waiting + 1):
            visits[0] = 0
            view = world.submit(session, turn(f"t{number}", max_tokens=1))
            assert (view.position, visits[0] <= 2) == (number, True)
        world.engine.step()
        visits[0] = 0
        world.engine.deliver()
        assert world.manager.turn(OWNER, session, "t1").status == "running"
        assert visits[0] <= 2, "one turn ended and the next was started"
        visits[0] = 0
        if is_drain:
            world.engine.run()
            world.do(world.manager.drain(0.0))
        else:
            world.manager.close(OWNER, session)
        assert visits[0] <= 2 * num_waiting


@pytest.mark.parametrize(("max_tokens", "num_sent"), [(199, 2), (200, 2), (201, 3)])
def test_turns_of_long_histories_are_sent_to_a_new_engine_a_few_at_a_time(
    max_tokens: int, num_sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World(quotas=MANY) as world:
        names = crowd(world, 5)
        for name in names:
            world.submit(name, turn("1", (5,) * 100, max_tokens=0))
        world.engine.run()
        world.engine.die()
        world.engine.deliver()
        for name in names:
            world.submit(name, turn("2", (5,), max_tokens=0))
        world.spin(5)
        monkeypatch.setattr(turn_flow, "RETRY_TOKENS", max_tokens)
        world.engine.come_up()
        world.engine.deliver()
        assert world.manager.stats().live_turns == num_sent
        world.spin(5)
        assert world.manager.stats().live_turns == 5
