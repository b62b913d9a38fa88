"""A server whose model lies in two processes: the same answers, whichever of them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from session_server.local_server import LocalServer
from tests.depth import at_depth
from tests.rig.processes import assert_gone, engine_pid
from tests.rig.recovery import assert_books_balance
from tests.web.wire_client import Wire, greeted
from tests.wire.conftest import SMALL

NUM_KILLS = at_depth(1, proof=50)
FLAGS = [*SMALL, "--tensor-parallel-size", "2", "--store", "none"]
QUESTIONS = ("My name is Ada.", "I live in Paris.", "What is my name?", "Where do I live?")


def turn(text: str, max_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return {"input": [{"role": "user", "content": text}], "sampling": sampling}


async def ask(wire: Wire, number: int) -> list[int]:
    end = await wire.turn(f"t{number}", **turn(QUESTIONS[number % len(QUESTIONS)], 16))
    assert end["type"] == "turn.completed", end
    return list(end["item"]["token_ids"])


def ranks_of(engine: int) -> list[int]:
    children = psutil.Process(engine).children()
    return [child.pid for child in children if "_rank" in child.cmdline()]


async def undisturbed(server: LocalServer, num_turns: int) -> list[list[int]]:
    async with greeted(server.url) as wire:
        return [await ask(wire, number) for number in range(num_turns)]


@pytest.mark.timeout(60 + 30 * NUM_KILLS)
def test_a_session_goes_on_token_for_token_after_each_kill_of_a_rank() -> None:
    async def disturbed(server: LocalServer) -> list[list[int]]:
        said = []
        async with greeted(server.url) as wire:
            for number in range(NUM_KILLS):
                said.append(await ask(wire, number))
                engine = engine_pid(server)
                (rank,) = ranks_of(engine)
                await wire.send("turn.create", turn_id=f"lost{number}", **turn("Count.", 1500))
                await wire.until("turn.delta")
                os.kill(rank, signal.SIGKILL)
                failed = await wire.until("turn.failed")
                assert failed["error"]["code"] == "engine_restarting", failed
                assert failed["retryable"] is True
                await asyncio.to_thread(assert_gone, [engine, rank])
            said.append(await ask(wire, NUM_KILLS))
            engine = engine_pid(server)
            os.kill(*ranks_of(engine), signal.SIGKILL)
            await asyncio.to_thread(assert_gone, [engine])  # though nobody computes
            said.append(await ask(wire, NUM_KILLS + 1))
        return said

    with LocalServer(FLAGS) as server:
        expected = asyncio.run(undisturbed(server, NUM_KILLS + 2))
        assert asyncio.run(disturbed(server)) == expected
        assert_books_balance(server.url)
        (rank,) = ranks_of(engine_pid(server))
        os.kill(rank, signal.SIGSTOP)  # a server ends all the same
        assert server.stop() == 0
        assert_gone([rank])


def test_what_cannot_be_split_is_refused_in_a_line() -> None:
    server = LocalServer([*SMALL, "--tp", "4"])
    told = "--tensor-parallel-size 4: 6 attention heads cannot be split in 4"
    with pytest.raises(Exception, match=told), server:
        pass
    assert server.returncode == 2
