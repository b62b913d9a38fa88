"""A session that another server goes on with finds its KV in the directory that both share.

Real servers of the embedded model over one PostgreSQL. What they say is what one server says that
has all of it in its pools; how much of a prompt was not computed is what usage tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from session_server.local_server import LocalServer
from tests.depth import IS_PROOF
from tests.rig.postgres import Postgres, running
from tests.rig.processes import engine_pid
from tests.web.wire_client import http_client
from tests.wire.test_tiers import MIB, ask, figures, served, story

pytestmark = pytest.mark.skipif(not IS_PROOF, reason="eight servers: PROVE=1")

LARGE = ("--max-total-tokens", "16384")
NAME = "shared"
LEAST_CACHED = 100
"""Tokens of the first turn that a server has which need not compute it."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running(is_synced=False) as server:
        yield server


@pytest.fixture(scope="module")
def reference() -> list[str]:
    with served(*LARGE, "--store", "none") as server:
        return asyncio.run(talk(server.url, "t1", "t2", "t3"))


async def talk(url: str, *turns: str, name: str = NAME) -> list[str]:
    """Begin a session, and return what is said in these turns."""
    async with http_client(url) as http:
        (await http.post("/v1/sessions", json={"id": name})).raise_for_status()
    return [await said(url, turn, name) for turn in turns]


async def said(url: str, turn: str, name: str = NAME) -> str:
    text = story(0) if turn == "t1" else "What is my name?"
    return str((await ask(url, name, turn, text))["item"]["content"])


async def go_on(url: str, turn: str) -> tuple[str, int]:
    """What is said in another turn, and how much of its prompt was not computed."""
    end = await ask(url, NAME, turn, "What is my name?")
    return end["item"]["content"], end["usage"]["cached_tokens"]


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


class Pair:
    """Two servers that share sessions and files."""

    def __init__(self, url: str, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory = directory
        self._flags = (*LARGE, "--store", url, "--disk-kv-bytes", f"{64 * MIB}:{directory}")
        self.first, self.second = (stack.enter_context(self.start()) for _ in range(2))

    def start(self) -> LocalServer:
        return served(*self._flags)

    def until(self, condition: Callable[[], bool], wait_s: float = 30.0) -> None:
        until_s = time.monotonic() + wait_s
        while not condition():
            assert time.monotonic() < until_s
            time.sleep(0.05)


@pytest.fixture
def pair(postgres: Postgres, tmp_path: Path) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        yield Pair(postgres.new_database(), tmp_path / "kv", stack)


@pytest.mark.timeout(240)
def test_a_session_that_moves_and_comes_back_takes_its_kv_along_and_leaves_none_when_it_is_deleted(
    pair: Pair, reference: list[str]
) -> None:
    assert asyncio.run(talk(pair.first.url, "t1")) == reference[:1]
    assert not files_in(pair.directory), "nothing is written while nobody asks for it"
    second, num_cached = asyncio.run(go_on(pair.second.url, "t2"))
    assert second == reference[1]
    assert num_cached > LEAST_CACHED
    told = asyncio.run(figures(pair.second.url))
    assert told["session_server_kv_restored_tokens_total"] > LEAST_CACHED
    third, num_cached = asyncio.run(go_on(pair.first.url, "t3"))
    assert third == reference[2]
    assert num_cached > LEAST_CACHED
    assert files_in(pair.directory)

    async def delete() -> None:
        async with http_client(pair.second.url) as http:
            (await http.delete(f"/v1/sessions/{NAME}")).raise_for_status()

    asyncio.run(delete())
    pair.until(lambda: not files_in(pair.directory))


@pytest.mark.timeout(240)
def test_a_session_is_restored_where_its_server_was_ended_and_computed_where_files_are_no_good(
    pair: Pair, reference: list[str]
) -> None:
    assert asyncio.run(talk(pair.first.url, "t1")) == reference[:1]
    os.kill(pair.first.pid, signal.SIGTERM)
    pair.first.wait(timeout_s=60)
    assert files_in(pair.directory)
    second, num_cached = asyncio.run(go_on(pair.second.url, "t2"))
    assert second == reference[1]
    assert num_cached > LEAST_CACHED
    os.kill(pair.second.pid, signal.SIGTERM)
    pair.second.wait(timeout_s=60)
    for file in files_in(pair.directory):  # by somebody who has no key
        raw = bytearray(file.read_bytes())
        raw[-100] ^= 1
        file.write_bytes(raw)
    with pair.start() as third:
        text, num_cached = asyncio.run(go_on(third.url, "t3"))
        told = asyncio.run(figures(third.url))
    assert text == reference[2]
    assert num_cached < LEAST_CACHED
    assert told["session_server_kv_refused_files_total"] >= 1


@pytest.mark.timeout(240)
def test_a_session_of_a_server_that_was_killed_is_computed_again(
    pair: Pair, reference: list[str]
) -> None:
    assert asyncio.run(talk(pair.first.url, "t1")) == reference[:1]
    # Both: an engine whose server is gone ends as it does when it is told to, and writes.
    for pid in (engine_pid(pair.first), pair.first.pid):
        os.kill(pid, signal.SIGKILL)
    pair.first.wait(timeout_s=60)
    second, num_cached = asyncio.run(go_on(pair.second.url, "t2"))
    assert second == reference[1]
    assert num_cached < LEAST_CACHED
