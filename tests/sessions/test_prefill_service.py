"""A prefill replica computes prompts for others, in order and within bounds, and leaves nothing of
one that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from session_server.core.commands import CloseSession, SubmitTurn, WriteKV
from session_server.core.owner import Owner
from session_server.sessions.roles import serving
from session_server.sessions.roles.messages import (
    News,
    PrefillRefused,
    PrefillRequest,
    PrefillWorking,
    PrefillWritten,
)
from session_server.sessions.roles.serving import AT_ONCE, PrefillService
from session_server.sessions.salts import TenantSalts
from tests.sessions.world import World

SALTS = TenantSalts(b"0123456789abcdef")


def request(number: int = 0, num_tokens: int = 64, **changes: object) -> PrefillRequest:
    tokens = np.arange(number, number + num_tokens, dtype="<i4") % 50 + 3
    values: dict[str, object] = {
        "model": b"model",
        "page_size": 16,
        "owner_id": "name:o",
        "session": f"s{number}",
        "weight": 1000,
        "tokens": tokens.astype("<i4").tobytes(),
    }
    return PrefillRequest(**(values | changes))  # type: ignore[arg-type]


@dataclass
class Asker:
    """Reads news until told to leave."""

    news: list[News] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def last(self) -> News:
        return self.news[-1]


class Served:
    """A prefill service over an engine on paper."""

    def __init__(self) -> None:
        self.world = World(kv_tiers="disk")
        self.is_draining = False
        link = self.world.manager.exits.parts.link
        self.service = PrefillService(
            link, SALTS, model=b"model", is_draining=lambda: self.is_draining
        )
        listener = self.world.engine._listener
        assert listener is not None

        def hear(event: object) -> None:
            self.service.on_event(event)  # type: ignore[arg-type]
            listener(event)  # type: ignore[arg-type]

        self.world.engine._listener = hear

    def ask(self, asked: PrefillRequest) -> Asker:
        asker = Asker()

        async def read() -> None:
            answer = self.service.serve(asked)
            try:
                async for news in answer:
                    asker.news.append(news)
            finally:
                await answer.aclose()

        asker.task = self.world.loop.create_task(read())
        self.world.spin()
        return asker

    def leave(self, asker: Asker) -> None:
        assert asker.task is not None
        asker.task.cancel()
        self.world.spin(6)

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(500):
            self.world.engine.step()
            self.world.engine.deliver()
            self.world.spin()
            if condition():
                return
        raise AssertionError("it does not come to that")

    def end(self, asker: Asker) -> News:
        self.until(lambda: asker.task is not None and asker.task.done())
        return asker.last

    @property
    def deleted(self) -> list[bool]:
        closed = (each for each in self.world.engine.seen if isinstance(each, CloseSession))
        return [each.is_deleted for each in closed]


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.until(lambda: not made.world.engine.commands)
    assert made.service.num_prefills == made.service.num_tokens == 0
    assert not made.service._running
    assert not made.world.engine.slots, "every session of it is closed"
    assert not made.world.manager.exits.parts.link._waiting
    made.world.finish()


def test_a_prompt_is_computed_without_output_written_and_left_for_others(served: Served) -> None:
    asker = served.ask(request())
    assert asker.news == [PrefillWorking(0)]
    assert served.end(asker) == PrefillWritten(64, ((b"file", 64),))
    (turn,) = (each for each in served.world.engine.seen if isinstance(each, SubmitTurn))
    assert (turn.sampling.max_tokens, len(turn.tokens)) == (0, 64)
    (salt,) = served.world.engine.salts.values()
    assert salt == SALTS.salt_of(Owner("name:o"), "s0"), "others look for it by the same salt"
    assert served.deleted == [False]
    counts = served.service.counts
    assert (counts.asked, counts.done, counts.done_tokens, counts.done_bytes) == (1, 1, 64, 64)


def test_prompts_come_in_order_and_few_at_a_time(served: Served) -> None:
    askers = [served.ask(request(number)) for number in range(4)]
    submitted = [each for each in served.world.engine.seen if isinstance(each, SubmitTurn)]
    assert len(submitted) == AT_ONCE
    for asker in askers:
        assert isinstance(served.end(asker), PrefillWritten)


@pytest.mark.parametrize("changes", [{"model": b"another"}, {"page_size": 32}])
def test_a_prompt_of_another_model_is_refused(served: Served, changes: dict[str, object]) -> None:
    news = served.end(served.ask(request(**changes)))  # type: ignore[arg-type]
    assert isinstance(news, PrefillRefused)
    assert news.why == "misfit"
    assert served.world.engine.seen == []


@pytest.mark.parametrize("bound", ["MAX_PREFILLS", "MAX_PREFILL_TOKENS"])
def test_more_than_it_may_keep_is_refused_at_once(
    served: Served, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, bound, 1)
    first = served.ask(request())
    second = served.ask(request(1))
    assert [type(each) for each in second.news] == [PrefillRefused]
    assert isinstance(served.end(first), PrefillWritten)
    assert isinstance(served.end(served.ask(request(2))), PrefillWritten)
    assert served.service.counts.refused == 1


def test_a_server_that_ends_or_has_no_engine_refuses(served: Served) -> None:
    served.is_draining = True
    assert isinstance(served.end(served.ask(request())), PrefillRefused)
    served.is_draining = False
    served.world.engine.die()
    served.world.engine.deliver()
    assert isinstance(served.end(served.ask(request())), PrefillRefused)
    served.world.engine.come_up()


@pytest.mark.parametrize("moment", ["asked", "in the engine", "computed", "written"])
def test_of_a_prompt_that_nobody_waits_for_nothing_is_left(served: Served, moment: str) -> None:
    engine = served.world.engine
    asker = served.ask(request())
    if moment != "asked":
        engine.step()
    if moment in ("computed", "written"):
        engine.deliver()
        served.world.spin()
        assert any(isinstance(each, WriteKV) for each in engine.seen)
    if moment == "written":
        engine.step()
    served.leave(asker)
    served.until(lambda: not engine.slots)
    assert served.deleted == [True]
    counts = served.service.counts
    assert (counts.cancelled, counts.done) == (1, 0)
    assert isinstance(served.end(served.ask(request())), PrefillWritten), "the next one is computed"


def test_who_waits_for_a_place_may_leave(served: Served) -> None:
    askers = [served.ask(request(number)) for number in range(AT_ONCE + 1)]
    served.leave(askers[-1])
    assert served.service.num_prefills == AT_ONCE
    for asker in askers[:-1]:
        assert isinstance(served.end(asker), PrefillWritten)
    assert len(served.deleted) == AT_ONCE, "the last one never came to the engine"


def test_an_engine_that_dies_fails_what_it_has(served: Served) -> None:
    asker = served.ask(request())
    served.world.engine.step()
    served.world.engine.die()
    served.world.engine.deliver()
    assert isinstance(served.end(asker), PrefillRefused)
    served.world.engine.come_up()
    served.world.engine.deliver()
    assert isinstance(served.end(served.ask(request())), PrefillWritten)


def test_what_the_engine_refuses_has_failed(served: Served) -> None:
    served.world.engine.refuse_open = "server_busy"
    news = served.end(served.ask(request()))
    assert isinstance(news, PrefillRefused)
    assert news.why == "failed"


def test_a_disk_that_takes_nothing_has_failed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = served.world.manager.exits.parts.link
    written = serving.PrefillWritten

    async def nothing(*_: object, **__: object) -> PrefillWritten:
        return written(0, ())

    monkeypatch.setattr(link, "write_kv", nothing)
    news = served.end(served.ask(request()))
    assert isinstance(news, PrefillRefused)
    assert served.deleted == [True]


def test_whoever_waits_is_told_that_it_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "BEAT_S", 0.01)
    asker = served.ask(request())
    served.world.do(asyncio.sleep(0.1))
    assert len(asker.news) >= 3
    assert set(map(type, asker.news)) == {PrefillWorking}
    assert isinstance(served.end(asker), PrefillWritten)
