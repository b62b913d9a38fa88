"""Which thread steps: whoever brings news, so that no token waits for a change of threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from cache.types import SessionId, TurnId
from session_server.core.batch import Batch, PendingStep, StepResult
from session_server.core.commands import OpenSession, Shutdown, SubmitTurn
from session_server.core.events import (
    EngineEvent,
    StepTokens,
    TokensProduced,
    TurnFinished,
    TurnStarted,
)
from session_server.core.sampling import SamplingParams
from session_server.engine_host import loop as loop_module
from session_server.engine_host.inbox import Taken
from session_server.engine_host.loop import EngineLoop
from tests.engine_host.live_echo import LiveEcho, LiveStage, assemble

NUM_OUTPUTS = 60
TOKENS = (TokensProduced, StepTokens)


class Loop(EngineLoop):
    """Write down who emits events, and how often the loop's own thread sleeps."""

    def __init__(self, stage: LiveStage) -> None:
        self.num_naps = 0
        self.emitted: list[tuple[str, EngineEvent]] = []
        self.ended: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self.settled: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.is_napping = threading.Event()
        super().__init__(assemble(msgspec.msgpack.encode(stage)), self.hear)

    def hear(self, events: list[EngineEvent]) -> None:
        for event in events:
            self.emitted.append((threading.current_thread().name, event))
            if isinstance(event, TurnFinished):
                self.ended.put(event)

    def _settle(self, result: StepResult) -> None:
        super()._settle(result)
        self.settled.put(result.step)

    def _sleep(self, wait_s: float | None) -> None:
        self.num_naps += 1
        self.is_napping.set()
        super()._sleep(wait_s)


@contextmanager
def running(stage: LiveStage) -> Iterator[Loop]:
    loop = Loop(stage)
    thread = threading.Thread(target=loop.run, name="loop")
    thread.start()
    yield loop
    loop.post(Shutdown())
    thread.join()


def begin_turn(name: str) -> tuple[OpenSession, SubmitTurn]:
    return (
        OpenSession(session_id=SessionId(name), tenant_salt="a"),
        SubmitTurn(
            session_id=SessionId(name),
            turn_id=TurnId(name),
            base_len=0,
            tokens=(1, 2, 3),
            sampling=SamplingParams(max_tokens=NUM_OUTPUTS, seed=1, ignore_eos=True),
        ),
    )


@pytest.mark.parametrize(
    ("is_device", "speaker"), [(False, "engine-launch"), (True, "engine-wait")]
)
def test_the_thread_that_has_a_result_settles_it(
    is_device: bool, speaker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_launch = threading.Event()
    launch = LiveEcho.launch

    def held(self: LiveEcho, batch: Batch) -> PendingStep:
        may_launch.wait()
        return launch(self, batch)

    monkeypatch.setattr(LiveEcho, "launch", held)
    with running(LiveStage(is_device=is_device)) as loop:
        loop.is_napping.wait()
        loop.take(begin_turn("t"))
        may_launch.set()  # nobody steps: a thread that did might find the result, and keep stepping
        loop.ended.get()
        assert loop.num_naps < 10, "nothing wakes the loop's thread for a result"
    speakers = [name for name, event in loop.emitted if isinstance(event, TOKENS)]
    assert speakers == [speaker] * NUM_OUTPUTS


def test_commands_are_handled_by_the_thread_that_brings_them() -> None:
    loop = Loop(LiveStage())
    loop.take([*begin_turn("t"), *begin_turn("u")])
    speakers = {name for name, event in loop.emitted if isinstance(event, TurnStarted)}
    assert speakers == {threading.current_thread().name}
    assert loop._progress._in_flight, "both turns are in a forward, before `run`"
    assert loop.num_naps == 0


def test_commands_that_come_during_a_step_are_left_to_the_loop() -> None:
    is_stepping, may_go_on = threading.Event(), threading.Event()
    with running(LiveStage()) as loop:
        step = loop._step

        def held(taken: Taken) -> bool:
            is_stepping.set()
            may_go_on.wait()
            return step(taken)

        loop._step = held
        first = threading.Thread(target=loop.take, args=(begin_turn("t"),))
        first.start()
        is_stepping.wait()
        loop.take(begin_turn("u"))
        may_go_on.set()
        first.join()
        assert {loop.ended.get().turn_id for _ in range(2)} == {"t", "u"}


def test_the_thread_that_computes_never_waits_for_one_that_steps() -> None:
    may_go_on = threading.Event()
    with running(LiveStage()) as loop:
        step = loop._step

        def held(taken: Taken) -> bool:
            has_launched = step(taken)
            if taken.commands:
                may_go_on.wait()
            return has_launched

        loop._step = held
        first = threading.Thread(target=loop.take, args=(begin_turn("t"),))
        first.start()
        loop.settled.get(timeout=30)  # the forward is done, and its thread is free
        assert first.is_alive(), "the step that launched it has not ended"
        may_go_on.set()
        first.join()
        assert loop.ended.get().turn_id == "t"


def test_more_commands_than_the_inbox_holds_are_taken_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "MAX_INBOX_BYTES", 1)
    with running(LiveStage()) as loop:
        loop.take([*begin_turn("t"), *begin_turn("u")])
        assert {loop.ended.get().turn_id for _ in range(2)} == {"t", "u"}


def test_what_is_raised_on_another_thread_ends_the_loop() -> None:
    loop = Loop(LiveStage())
    thread_saw: list[BaseException] = []

    def refuse(taken: object) -> None:
        raise RuntimeError("a bug on purpose")

    def run() -> None:
        with pytest.raises(RuntimeError, match="on purpose") as caught:
            loop.run()
        thread_saw.append(caught.value)

    loop._step = refuse
    thread = threading.Thread(target=run)
    thread.start()
    loop.take(begin_turn("t"))
    thread.join()
    assert thread_saw
    loop.take(begin_turn("u"))  # nothing steps any more
