"""A decode replica has others compute long prompts: whatever comes of it, a turn says the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from session_server.core.commands import (
    CoolSession,
    ExpectKV,
    MeasureKV,
    SubmitTurn,
)
from session_server.core.errors import ServerBusy
from session_server.core.session_events import TurnEnd
from session_server.sessions.roles import asking
from session_server.sessions.roles.asking import Others, Prefills, SentCounts
from session_server.sessions.roles.messages import (
    News,
    PrefillRefused,
    PrefillRequest,
    PrefillWorking,
    PrefillWritten,
    Seal,
)
from session_server.sessions.roles.policy import MIN_SENT_TOKENS, Peer
from session_server.sessions.roles.transport import Unreachable
from tests.sessions.world import OWNER, World, cancelled, completed, failed, turn

URL = "http://prefill:1"
SECRET = b"s" * 32
LONG = tuple(3 + i % 40 for i in range(MIN_SENT_TOKENS + 40))
NEXT = tuple(5 + i % 30 for i in range(2 * len(LONG)))
FILES = ((b"name", 4096),)


@dataclass
class PaperPeer:
    """Stands in for the transport and the replica behind it: answers when it is told to.

    `news`: what it says; an exception is raised in its place. `is_open`: whether somebody waits.
    """

    news: list[News | Exception] = field(default_factory=list)
    asked: list[PrefillRequest] = field(default_factory=list)
    num_waiting: int = 0
    is_known: bool = True
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def find(self) -> list[Peer]:
        if not self.is_known:
            raise ServerBusy("the store is away")
        return [Peer(1, URL)]

    @contextlib.asynccontextmanager
    async def ask(self, url: str, sealed: bytes) -> AsyncGenerator[AsyncIterator[News], None]:
        assert url == URL
        self.asked.append(Seal(SECRET).unseal(sealed, url=url, now_s=1e9))
        self.num_waiting += 1
        try:
            yield self._answer()
        finally:
            self.num_waiting -= 1

    async def _answer(self) -> AsyncIterator[News]:
        yield PrefillWorking(16)
        await self.released.wait()
        for each in self.news:
            if isinstance(each, Exception):
                raise each
            yield each

    async def close(self) -> None:
        return


class Apart:
    """A decode replica on paper, and a prefill replica that does as it is told."""

    def __init__(self, **options: int) -> None:
        self.world = World(kv_tiers="disk", **options)  # type: ignore[arg-type]
        self.peer = PaperPeer()
        exits = self.world.manager.exits
        others = Others(
            find=self.peer.find,
            transport=self.peer,
            seal=Seal(SECRET),
            model=b"model",
            wall_s=lambda: 1e9,
        )
        now_s = lambda: self.world.now_s  # noqa: E731
        self.prefills = Prefills(exits.parts.link, others, clock=now_s)
        exits.flow.copies.prefills = self.prefills

    @property
    def counts(self) -> SentCounts:
        return self.prefills.counts

    def say(self, *news: News | Exception) -> None:
        """Let the replica answer."""
        self.peer.news = list(news)
        self.peer.released.set()

    def until(self, condition: Callable[[], bool]) -> None:
        """Run the engine and the loop until something is so."""
        for _ in range(2_000):
            self.on_loop(self.world.engine.run)
            self.world.spin()
            if condition():
                return
        raise AssertionError("it does not come to that")

    def on_loop(self, call: Callable[[], object]) -> None:
        """Call something where the loop runs, as an engine's client does."""

        async def run() -> None:
            call()

        self.world.do(run())

    def begin(self, session_id: str, turn_id: str, ids: tuple[int, ...]) -> asyncio.Task[object]:
        """Submit a turn of raw tokens, for which nobody waits yet."""
        request = turn(turn_id, ids, temperature=0.0, seed=1)
        submit = self.world.manager.submit(OWNER, session_id, request)
        return self.world.loop.create_task(submit)

    def until_asked(self) -> None:
        self.until(lambda: self.peer.num_waiting == 1)

    def end(self, session_id: str, turn_id: str) -> TurnEnd:
        self.until(lambda: self.world.manager.turn(OWNER, session_id, turn_id).end is not None)
        return self.world.end_of(session_id, turn_id)

    def said(self, session_id: str, turn_id: str, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The history behind a turn that has ended well."""
        task = self.begin(session_id, turn_id, ids)
        self.until(task.done)
        completed(self.end(session_id, turn_id))
        return self.world.history(session_id)

    def seen(self, kind: type) -> int:
        return sum(isinstance(each, kind) for each in self.world.engine.seen)

    def assert_nothing_is_left(self) -> None:
        """Nobody waits, nothing is counted as held, and no task runs."""
        self.until(lambda: not self.peer.num_waiting)
        self.world.spin(5)
        assert self.prefills.num_sent == 0
        assert self.prefills._book.num_tokens == 0
        assert not self.prefills._book._num_asked
        manager = self.world.manager
        assert not manager._flow.prompt_builder._tasks
        assert manager._flow.counts.live == manager._flow.counts.queued == 0
        assert manager._quotas.turn_bytes.total == 0
        assert not manager._link._waiting


@pytest.fixture
def apart() -> Iterator[Apart]:
    made = Apart()
    yield made
    made.assert_nothing_is_left()
    made.world.finish()


def plain_history(*turns: tuple[int, ...]) -> tuple[int, ...]:
    """What a replica says that does both."""
    with World() as world:
        session_id = world.open()
        for number, ids in enumerate(turns):
            completed(world.run(session_id, turn(f"t{number}", ids, temperature=0.0, seed=1)))
        return world.history(session_id)


def test_a_long_prompt_is_computed_elsewhere_before_its_turn_begins(apart: Apart) -> None:
    session_id = apart.world.open()
    task = apart.begin(session_id, "t0", LONG)
    apart.until_asked()
    assert apart.seen(SubmitTurn) == 0, "a turn that waits is not in the engine"
    (asked,) = apart.peer.asked
    assert len(asked.tokens) // 4 == (len(LONG) - 1) // 16 * 16
    assert (asked.owner_id, asked.session, asked.cut) == (OWNER.owner_id, session_id, 0)
    # Others are served meanwhile.
    other = apart.world.open()
    completed(apart.world.run(other, turn("short")))
    apart.say(PrefillWorking(32), PrefillWritten(len(asked.tokens) // 4, FILES))
    apart.until(task.done)
    completed(apart.end(session_id, "t0"))
    kinds = [type(each) for each in apart.world.engine.seen]
    assert kinds.index(ExpectKV) < len(kinds) - 1 - kinds[::-1].index(SubmitTurn)
    assert apart.seen(CoolSession) == 0, "the engine did not know the session"
    assert apart.world.history(session_id) == plain_history(LONG)
    assert (apart.counts.sent, apart.counts.done) == (1, 1)
    assert apart.counts.done_bytes == 4096


def test_of_a_resident_session_the_tree_has_the_beginning(apart: Apart) -> None:
    session_id = apart.world.open()
    apart.said(session_id, "t0", LONG[:20])
    apart.say(PrefillWritten(len(NEXT), FILES))
    history = apart.said(session_id, "t1", NEXT)
    assert history == plain_history(LONG[:20], NEXT)
    (cooled,) = (each for each in apart.world.engine.seen if isinstance(each, CoolSession))
    assert cooled.is_ahead_of_turn
    assert apart.counts.done == 1


def test_short_prompts_and_small_changes_are_computed_here(apart: Apart) -> None:
    apart.say(PrefillWritten(1 << 20, FILES))
    session_id = apart.world.open()
    apart.said(session_id, "t0", LONG[:MIN_SENT_TOKENS])
    assert apart.seen(MeasureKV) == 0, "nobody is asked about a short one"
    apart.said(session_id, "t1", LONG[:32])
    assert apart.counts == SentCounts()


@pytest.mark.parametrize(
    ("news", "outcome"),
    [
        (PrefillRefused("busy"), "refused"),
        (PrefillRefused("misfit"), "refused"),
        (PrefillRefused("failed", "the disk took no file"), "failed"),
        (Unreachable("refused"), "failed"),
        (Unreachable("silent"), "failed"),
        (PrefillWritten(0, ()), "failed"),
        (None, "failed"),
    ],
    ids=str,
)
def test_what_is_not_computed_elsewhere_is_computed_here(
    apart: Apart, news: News | Exception | None, outcome: str
) -> None:
    apart.say(*([] if news is None else [news]))
    session_id = apart.world.open()
    assert apart.said(session_id, "t0", LONG) == plain_history(LONG)
    assert apart.seen(ExpectKV) == 0
    assert (apart.counts.sent, getattr(apart.counts, outcome)) == (1, 1)
    # For a while that replica is not asked again.
    assert apart.said(apart.world.open(), "t0", LONG) == plain_history(LONG)
    assert (apart.counts.sent, apart.counts.no_peer) == (1, 1)


def test_a_bug_while_it_is_asked_leaves_the_turn_alone(apart: Apart) -> None:
    apart.say(ZeroDivisionError("a bug"))
    assert apart.said(apart.world.open(), "t0", LONG) == plain_history(LONG)


def test_without_its_store_it_computes_by_itself(apart: Apart) -> None:
    apart.peer.is_known = False
    assert apart.said(apart.world.open(), "t0", LONG) == plain_history(LONG)
    assert apart.counts.sent == 0


def test_who_says_nothing_more_is_not_waited_for(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "WAIT_S", 0.05)
    session_id = apart.world.open()
    task = apart.begin(session_id, "t0", LONG)
    apart.until_asked()
    apart.world.do(asyncio.sleep(0.1))
    apart.until(task.done)
    completed(apart.end(session_id, "t0"))
    assert apart.world.history(session_id) == plain_history(LONG)
    assert apart.counts.failed == 1


@pytest.mark.parametrize("is_known", [False, True])
def test_a_turn_that_is_cancelled_while_it_waits_leaves_nothing(
    apart: Apart,
    is_known: bool,
) -> None:
    session_id = apart.world.open()
    if is_known:
        apart.said(session_id, "t", LONG[:20])
    history = apart.world.history(session_id)
    task = apart.begin(session_id, "t0", NEXT)
    apart.until_asked()
    apart.world.manager.cancel(OWNER, session_id, "t0")
    apart.until(task.done)
    cancelled(apart.end(session_id, "t0"))
    assert apart.world.history(session_id) == history
    assert apart.peer.num_waiting == 0, "the replica is told at once"
    assert apart.counts.cancelled == 1
    assert apart.seen(CoolSession) == 0
    # The session goes on, and the replica is not taken to have failed.
    apart.say(PrefillWritten(len(NEXT), FILES))
    apart.said(session_id, "t1", NEXT)
    assert apart.counts.done == 1


def test_a_session_that_is_closed_while_it_waits_is_gone_at_once(apart: Apart) -> None:
    session_id = apart.world.open()
    apart.begin(session_id, "t0", LONG)
    apart.until_asked()
    apart.world.manager.close(OWNER, session_id)
    apart.until(lambda: not apart.world.manager._sessions.find(OWNER, session_id))
    assert apart.counts.cancelled == 1


def test_turns_behind_one_that_waits_follow_it(apart: Apart) -> None:
    session_id = apart.world.open()
    tasks = [apart.begin(session_id, "t0", LONG), apart.begin(session_id, "t1", LONG[:40])]
    apart.until_asked()
    apart.say(PrefillWritten(len(LONG), FILES))
    apart.until(lambda: all(each.done() for each in tasks))
    completed(apart.end(session_id, "t1"))
    assert apart.world.history(session_id) == plain_history(LONG, LONG[:40])


def test_an_engine_that_dies_meanwhile_takes_the_turn_when_it_is_back(apart: Apart) -> None:
    session_id = apart.world.open()
    task = apart.begin(session_id, "t0", LONG)
    apart.until_asked()
    apart.world.engine.die()
    apart.on_loop(apart.world.engine.deliver)
    apart.say(PrefillWritten(len(LONG), FILES))
    apart.world.spin(5)
    apart.world.engine.come_up()
    apart.until(task.done)
    completed(apart.end(session_id, "t0"))
    assert apart.world.history(session_id) == plain_history(LONG)


def test_an_engine_that_is_gone_for_good_ends_it(apart: Apart) -> None:
    session_id = apart.world.open()
    apart.begin(session_id, "t0", LONG)
    apart.until_asked()
    apart.world.engine.die(will_restart=False)
    apart.on_loop(apart.world.engine.deliver)
    apart.say(PrefillWritten(len(LONG), FILES))
    apart.world.spin(10)
    apart.on_loop(apart.world.manager.tick)
    assert failed(apart.end(session_id, "t0")).code == "engine_unavailable"


def test_a_server_that_drains_cancels_what_waits(apart: Apart) -> None:
    session_id = apart.world.open()
    apart.begin(session_id, "t0", LONG)
    apart.until_asked()
    apart.world.do(apart.world.manager.drain(0.0))
    apart.until(lambda: apart.peer.num_waiting == 0)
    assert apart.counts.cancelled == 1
