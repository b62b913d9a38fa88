"""What waits for the engine's next step, and how much of it one step takes."""

from __future__ import annotations

import queue
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from cache.types import SessionId, TurnId
from session_server.core.batch import CompileResult, StepResult
from session_server.core.commands import CancelTurn, EngineCommand, OpenSession, SubmitTurn
from session_server.core.errors import GrammarFailed
from session_server.core.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, Grammar, SamplingParams
from session_server.engine.engine import StepOutcome
from session_server.engine_host import loop
from session_server.engine_host.inbox import Inbox, memory_bytes
from session_server.engine_host.loop import EngineLoop
from tests.engine_host.live_echo import LiveStage, assemble

TOKENS = tuple(range(1000, 2000))
ALL = {"max_items": 99, "max_bytes": 1 << 30}


def opening(name: str) -> OpenSession:
    return OpenSession(session_id=SessionId(name), tenant_salt="a", tokens=TOKENS)


@pytest.mark.parametrize(("spare", "num_taken"), [(-1, 2), (0, 2), (1, 3)])
def test_an_inbox_is_full_once_what_waits_takes_so_much_memory(spare: int, num_taken: int) -> None:
    commands = [opening(f"s_{i}") for i in range(3)]
    inbox = Inbox(2 * memory_bytes(commands[0]) + spare)
    for command in commands[:num_taken]:
        inbox.put(command, block=False)
    with pytest.raises(queue.Full):
        inbox.put(CancelTurn(turn_id=TurnId("t"), num_outputs=None), block=False)
    assert inbox.take(**ALL).commands == commands[:num_taken]
    assert not any(inbox.take(**ALL))
    inbox.put(commands[0], block=False)


def test_results_do_not_wait_behind_commands() -> None:
    inbox = Inbox(1)
    results = [StepResult(step, (), 0.0) for step in (1, 2)]
    compiled = CompileResult(TurnId("t"), GrammarFailed("no"))
    inbox.put_result(results[0])
    inbox.put(opening("s"))
    inbox.put_result(results[1])
    inbox.put_compiled(compiled)
    assert inbox.take(max_items=0, max_bytes=0) == ([], results, [compiled], [])
    assert inbox.take(**ALL) == ([opening("s")], [], [], [])


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
    assembly = assemble(msgspec.msgpack.encode(LiveStage()))
    taken: list[int] = []
    step = assembly.engine.step

    def watched(
        now_s: float, commands: Sequence[EngineCommand], *others: Any, **named: Any
    ) -> StepOutcome:
        taken.append(len(commands))
        return step(now_s, commands, *others, **named)

    monkeypatch.setattr(assembly.engine, "step", watched)
    EngineLoop(assembly, lambda events: None).take(opening(f"s_{i}") for i in range(4))
    assert taken == [num_taken, 4 - num_taken]
