"""What waits for the engine's next step, and how much of it one step takes."""

from __future__ import annotations

import queue
import sys

import msgspec
import pytest

from cache.types import SessionId, TurnId
from session_server.core.batch import StepResult
from session_server.core.commands import CancelTurn, OpenSession, SubmitTurn
from session_server.core.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, Grammar, SamplingParams
from session_server.engine_host import loop
from session_server.engine_host.inbox import Inbox, memory_bytes
from session_server.engine_host.loop import EngineLoop
from tests.engine_host.live_echo import LiveStage, assemble

TOKENS = tuple(range(1000, 2000))


def opening(name: str) -> OpenSession:
    return OpenSession(session_id=SessionId(name), tenant_salt="a", tokens=TOKENS)


@pytest.mark.parametrize(("spare", "num_taken"), [(-1, 2), (0, 2), (1, 3)])
def test_an_inbox_is_full_once_what_waits_takes_so_much_memory(spare: int, num_taken: int) -> None:
    commands = [opening(f"s_{i}") for i in range(3)]
    inbox = Inbox(2 * memory_bytes(commands[0]) + spare)
    for command in commands[:num_taken]:
        inbox.put_nowait(command)
    with pytest.raises(queue.Full):
        inbox.put_nowait(CancelTurn(turn_id=TurnId("t"), num_outputs=None))
    assert [inbox.get_nowait() for _ in range(num_taken)] == commands[:num_taken]
    with pytest.raises(queue.Empty):
        inbox.get_nowait()


def test_results_of_forwards_do_not_wait_behind_commands() -> None:
    inbox = Inbox(1 << 20)
    results = [StepResult(step, (), 0.0) for step in (1, 2)]
    for item in (opening("s"), results[0], opening("t"), results[1]):
        inbox.put_nowait(item)
    items = [inbox.get_nowait() for _ in range(4)]
    assert items == [*results, opening("s"), opening("t")]


@pytest.mark.parametrize(
    "grammar", [Grammar("regex", "é" * 99_999), Grammar("lark", "", calls="é" * 99_999)]
)
def test_the_memory_of_a_command_is_not_underestimated(grammar: Grammar) -> None:
    sampling = SamplingParams(
        stop_token_ids=tuple(range(1000, 1000 + MAX_STOP_TOKEN_IDS)),
        logit_bias=tuple((1000 + i, i + 0.5) for i in range(MAX_LOGIT_BIAS)),
        grammar=grammar,
    )
    command = SubmitTurn(
        session_id=SessionId("s"), turn_id=TurnId("t"), base_len=0, tokens=TOKENS, sampling=sampling
    )
    objects: list[object] = [command, sampling, grammar.text, grammar.calls]
    for values in (command.tokens, sampling.stop_token_ids, sampling.logit_bias):
        objects += [values, *values]
    objects += [value for pair in sampling.logit_bias for value in pair]
    assert memory_bytes(command) >= sum(map(sys.getsizeof, objects))


@pytest.mark.parametrize(("spare", "num_taken"), [(-1, 2), (0, 2), (1, 3)])
def test_one_step_takes_no_more_commands_than_its_bytes_allow(
    monkeypatch: pytest.MonkeyPatch, spare: int, num_taken: int
) -> None:
    bound = 2 * memory_bytes(opening("s_0")) + spare
    monkeypatch.setattr(loop, "MAX_BYTES_PER_STEP", bound)
    engine_loop = EngineLoop(assemble(msgspec.msgpack.encode(LiveStage())), lambda events: None)
    for i in range(4):
        engine_loop.post(opening(f"s_{i}"))
    taken = [len(engine_loop._drain(is_blocked=False)[0]) for _ in range(2)]
    assert taken == [num_taken, 4 - num_taken]
