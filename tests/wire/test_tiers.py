"""More sessions of the embedded model than its pool holds, on real servers: what they say, with KV
in host memory and on disk, is what they say with plenty of memory.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from session_server import cli
from session_server.local_server import LocalServer
from tests.rig.processes import engine_pid
from tests.web.wire_client import greeted, http_client

NUM_SESSIONS = 8
POOL = ("--max-total-tokens", "512")
"""Of about two of the sessions."""

PLENTY = ("--max-total-tokens", "16384", "--host-kv-bytes", "0")
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
MIB = 1 << 20
ON_DISK = ("--disk-kv-bytes", str(256 * MIB))


def served(*flags: str) -> LocalServer:
    return LocalServer(["--log-level", "warning", *flags])


def story(number: int) -> str:
    return f"My name is {number}. " + "I live in a house with a garden and a dog. " * 12


async def ask(url: str, session_id: str, turn_id: str, text: str) -> dict[str, Any]:
    async with greeted(url, session_id) as wire:
        content = [{"role": "user", "content": text}]
        end = await wire.turn(turn_id, input=content, sampling=GREEDY)
    assert end["type"] == "turn.completed", end
    return end


def alike(number: int) -> str:
    return "I live in a house with a garden and a dog. " * 12 + f"My name is {number}. " * 12


async def begin(url: str, told: Callable[[int], str] = story) -> tuple[list[str], list[str]]:
    """The ids of sessions, and what was said in the first turn of each."""
    session_ids, said = [], []
    async with http_client(url) as http:
        for number in range(NUM_SESSIONS):
            session_ids.append((await http.post("/v1/sessions", json={})).json()["id"])
            end = await ask(url, session_ids[-1], "t1", told(number))
            said.append(end["item"]["content"])
    return session_ids, said


async def go_on(url: str, session_ids: list[str], turn_id: str) -> tuple[list[str], int]:
    """What is said in the next turn of each, and how much of their prompts was not computed."""
    said, num_cached = [], 0
    for session_id in session_ids:
        end = await ask(url, session_id, turn_id, "What is my name?")
        said.append(end["item"]["content"])
        num_cached += end["usage"]["cached_tokens"]
    return said, num_cached


async def figures(url: str) -> dict[str, float]:
    async with http_client(url) as http:
        text = (await http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return {s.name: s.value for family in families for s in family.samples if not s.labels}


@dataclass(frozen=True)
class Kept:
    """A store with all KV of sessions that have had one turn, and what that said."""

    store: Path
    session_ids: list[str]
    said: list[str]

    def copy_to(self, directory: Path) -> tuple[str, str]:
        """Flags for a server that has it."""
        shutil.copytree(self.store, directory)
        return "--store", str(directory)


def keep(store: Path, *flags: str) -> Kept:
    """Have a server with these flags write it as it ends."""
    with served(*flags, "--store", str(store), *ON_DISK) as server:
        session_ids, said = asyncio.run(begin(server.url))
        assert server.stop(timeout_s=60) == 0
    return Kept(store, session_ids, said)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return keep(tmp_path_factory.mktemp("kept") / "store", *PLENTY)


@pytest.fixture(scope="module")
def reference(plain: LocalServer) -> list[list[str]]:
    session_ids, said = asyncio.run(begin(plain.url))
    others = [asyncio.run(go_on(plain.url, session_ids, turn))[0] for turn in ("t2", "t3")]
    return [said, *others]


@pytest.mark.timeout(180)
def test_sessions_that_memory_does_not_hold_go_on_from_host_memory(
    reference: list[list[str]],
) -> None:
    with served(*POOL, "--store", "none", "--host-kv-bytes", str(256 * MIB)) as server:
        session_ids, first = asyncio.run(begin(server.url))
        second, num_cached = asyncio.run(go_on(server.url, session_ids, "t2"))
        told = asyncio.run(figures(server.url))
    assert [first, second] == reference[:2]
    assert told["session_server_kv_hits_total"] >= NUM_SESSIONS - 2
    assert told["session_server_kv_restored_tokens_total"] > 50 * NUM_SESSIONS
    assert told["session_server_kv_failed_copies_total"] == 0
    assert num_cached > 50 * NUM_SESSIONS


@pytest.mark.timeout(240)
def test_a_session_that_is_opened_again_has_its_kv_before_its_turn_comes(
    tmp_path: Path, kept: Kept, reference: list[list[str]]
) -> None:
    store = kept.copy_to(tmp_path / "store")
    num_restored = 0.0
    with served(*PLENTY, *store, *ON_DISK) as server:
        for number, is_asked in enumerate((False, True)):
            opened = open_again(
                server.url, kept.session_ids[number], num_restored, is_asked=is_asked
            )
            end, before, after = asyncio.run(opened)
            assert end["item"]["content"] == reference[1][number]
            assert before - num_restored > 100
            assert after == before
            assert end["usage"]["cached_tokens"] >= before - num_restored
            num_restored = after
        server.stop()
    assert kept.said == reference[0]


async def open_again(
    url: str, session_id: str, num_restored: float, *, is_asked: bool
) -> tuple[dict[str, Any], float, float]:
    """How a turn of a session ended that was warmed, by request or because it was attached to; how
    many tokens had been restored before the turn and after it.

    Args:
        num_restored: how many had been before.
    """

    async def restored() -> float:
        while (now := await num_restored_now()) == num_restored:
            await asyncio.sleep(0.05)
        return now

    async def num_restored_now() -> float:
        return (await figures(url))["session_server_kv_restored_tokens_total"]

    if is_asked:
        async with http_client(url) as http:
            answer = await http.post(f"/v1/sessions/{session_id}/warm")
            assert answer.json()["state"] == "cold"
        await restored()  # before anybody attaches
    async with greeted(url, session_id) as wire:
        before = await restored()
        content = [{"role": "user", "content": "What is my name?"}]
        end = await wire.turn("t2", input=content, sampling=GREEDY)
    return end, before, await num_restored_now()


@pytest.mark.timeout(240)
def test_sessions_go_on_from_files_after_a_kill_and_after_an_end(
    tmp_path: Path, reference: list[list[str]]
) -> None:
    kv = tmp_path / "store" / "kv"
    store = ("--store", str(kv.parent), *ON_DISK)
    with served(*POOL, *store) as server:
        session_ids, first = asyncio.run(begin(server.url))
        os.kill(server.pid, signal.SIGKILL)
        server.wait(timeout_s=60)
    # The engine of a server that was killed ends by itself, and writes before it does.
    wait_until(lambda: bool(files_in(kv)))
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files_in(kv))
    said = [first]
    # What was not written before a kill is computed.
    for turn_id, num_at_least in (("t2", 50), ("t3", 50 * NUM_SESSIONS)):
        with served(*POOL, *store) as server:
            said.append(asyncio.run(go_on(server.url, session_ids, turn_id))[0])
            told = asyncio.run(figures(server.url))
            if turn_id == "t3":
                asyncio.run(close(server.url, session_ids))
            server.stop(timeout_s=60)
        assert told["session_server_kv_refused_files_total"] == 0
        assert told["session_server_kv_restored_tokens_total"] > num_at_least
        # Nothing is left of sessions that were closed.
        assert bool(files_in(kv)) == (turn_id == "t2")
    assert said == reference


@pytest.mark.timeout(240)
def test_files_of_sessions_that_are_deleted_untouched_go_and_those_of_others_stay(
    tmp_path: Path, plain: LocalServer
) -> None:
    kv = tmp_path / "store" / "kv"
    store = ("--store", str(kv.parent), *ON_DISK)
    session_ids, first = asyncio.run(begin(plain.url, alike))
    reference = first, asyncio.run(go_on(plain.url, session_ids[-1:], "t2"))[0]
    with served(*POOL, *store) as server:
        session_ids, first = asyncio.run(begin(server.url, alike))
        server.stop()
    num_files = len(files_in(kv))
    assert num_files >= NUM_SESSIONS
    with served(*POOL, *store) as server:
        asyncio.run(close(server.url, session_ids[:-2]))
        os.kill(server.pid, signal.SIGKILL)  # the next one does what this one has not
        server.wait(timeout_s=60)
    assert cli.main(["sessions", "delete", session_ids[-2], "--store", str(kv.parent)]) == 0
    with served(*POOL, *store) as server:
        # Those of the last one, and the one that they follow, which begins as all do.
        wait_until(lambda: len(files_in(kv)) <= num_files - NUM_SESSIONS + 2)
        last, num_cached = asyncio.run(go_on(server.url, session_ids[-1:], "t2"))
        told = asyncio.run(figures(server.url))
        asyncio.run(close(server.url, session_ids[-1:]))
        wait_until(lambda: not files_in(kv))
    assert (first, last) == reference
    assert told["session_server_kv_restored_tokens_total"] > 100
    assert num_cached > 100


@pytest.mark.timeout(180)
def test_a_deletion_that_was_durable_leaves_no_file_where_the_engine_is_killed(
    tmp_path: Path,
) -> None:
    kv = tmp_path / "store" / "kv"
    store = ("--store", str(kv.parent), *ON_DISK)
    with served(*POOL, *store) as server:
        session_ids, _ = asyncio.run(begin(server.url))
        server.stop()
    num_files = len(files_in(kv))
    with served(*POOL, *store) as server:
        asyncio.run(go_on(server.url, session_ids, "t2"))  # the engine knows them
        engine = engine_pid(server)
        os.kill(engine, signal.SIGSTOP)
        asyncio.run(close(server.url, session_ids))
        assert len(files_in(kv)) >= num_files
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: not files_in(kv))
        server.stop()


@pytest.mark.timeout(180)
def test_a_server_that_keeps_no_kv_on_disk_removes_what_another_one_left(
    tmp_path: Path, kept: Kept, reference: list[list[str]]
) -> None:
    """It forgets sessions for good, and would leave what was said in them."""
    kv, store = tmp_path / "store" / "kv", kept.copy_to(tmp_path / "store")
    (kv / "refused" / files_in(kv)[0].name).write_bytes(files_in(kv)[0].read_bytes())
    with served(*PLENTY, *store) as server:
        wait_until(lambda: not list(kv.rglob("*.safetensors")))
        asyncio.run(close(server.url, kept.session_ids[1:]))
        server.stop()
    with served(*PLENTY, *store, *ON_DISK) as server:
        (second,), _ = asyncio.run(go_on(server.url, kept.session_ids[:1], "t2"))
        server.stop()
    assert [kept.said, second] == [reference[0], reference[1][0]]
    assert len(files_in(kv)) == 1


def files_in(directory: Path) -> list[Path]:
    return list(directory.glob("*.safetensors"))


def wait_until(is_so: Callable[[], bool]) -> None:
    """Files are written beside the turns."""
    deadline_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.01)


async def close(url: str, session_ids: list[str]) -> None:
    async with http_client(url) as http:
        for session_id in session_ids:
            answer = await http.delete(f"/v1/sessions/{session_id}")
            assert answer.status_code < 300
            assert answer.json()["durable"] is True
