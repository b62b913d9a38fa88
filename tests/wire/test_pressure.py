"""More sessions than the pool holds: nobody hangs, nobody is forgotten, no page is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from session_server.client import Refused, connect
from session_server.demo.corpus import dialogue, is_right
from session_server.local_server import LocalServer
from tests.rig.recovery import assert_books_balance

NUM_SESSIONS = 200
SESSIONS_THAT_FIT = 20
NUM_TURNS = 4
TOKENS_PER_SESSION = 112
GREEDY = {"temperature": 0, "max_tokens": 32}


@pytest.fixture(scope="module")
def small_server() -> Iterator[LocalServer]:
    """A server whose pool holds about `SESSIONS_THAT_FIT` of the conversations below."""
    tokens = SESSIONS_THAT_FIT * TOKENS_PER_SESSION
    flags = ["--max-total-tokens", str(tokens), "--context-length", "512"]
    with LocalServer([*flags, "--memory-check", "warn", "--log-level", "warning"]) as server:
        yield server
        assert server.stop() == 0


async def _talk(url: str, seed: int) -> list[tuple[str, str]]:
    """Every turn's (expected, got); a refusal shows as its error code."""
    outcomes = []
    async with await connect(url) as session:
        for exchange in dialogue(seed, NUM_TURNS).turns:
            try:
                result = await session.ask(exchange.user, sampling=GREEDY)
            except Refused as refusal:
                outcomes.append((exchange.assistant, refusal.code))
                break
            assert result.status == "completed", result.error
            outcomes.append((exchange.assistant, result.text))
    return outcomes


async def _crowd(url: str) -> list[list[tuple[str, str]]]:
    async with asyncio.timeout(240):
        return await asyncio.gather(*(_talk(url, seed) for seed in range(NUM_SESSIONS)))


@pytest.mark.timeout(300)
def test_X1_two_hundred_sessions_on_a_pool_for_twenty_all_get_right_answers(
    small_server: LocalServer,
) -> None:
    talks = asyncio.run(_crowd(small_server.url))

    outcomes = [outcome for talk in talks for outcome in talk]
    assert all(len(talk) == NUM_TURNS for talk in talks), "a turn was refused"
    num_right = sum(is_right(got, expected) for expected, got in outcomes)
    assert num_right >= 0.97 * len(outcomes)

    assert_books_balance(small_server.url, is_running=False, is_open=False)
    metrics = httpx.get(f"{small_server.url}/metrics").text
    lost = 'session_server_session_evictions_total{reason="pressure"} '
    (line,) = (line for line in metrics.splitlines() if line.startswith(lost))
    assert float(line.split()[-1]) > 0, "the pool was never short"
