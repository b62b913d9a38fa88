"""How much one tenant feels another: a quiet one alone, and beside one that floods the server.

    python -m tests.bench.tenants [--turns 240] [--rounds 6] [--flooders 24] [SERVE FLAGS]

Server processes with two keys, one for the quiet tenant alone and one for the rest. The quiet
tenant sends turns of some hundred new tokens into new sessions, and waits a little after each. The
flood, in a process of its own, opens session after session and sends each a long prompt, as fast as
the server takes them.
What is compared is the time to the first token of the quiet tenant's turns, measured by the client,
in rounds of some turns beside the flood and some alone, so that a machine that grows slower does so
for both; and how much of its history was cached afterwards. The input tokens of the flood are
counted before the quiet tenant has a session, after, and while it sends turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from tests.rig.scraped import samples_of

QUIET, FLOOD = "quiet-tenants-key", "flooding-tenants-key"
UNFINISHED = "session_server_unfinished_turns"
REST_S = 0.02
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: tokens of a quiet turn and of a flooding one, and how many flood."""

    num_turns: int
    num_rounds: int
    num_flooders: int
    quiet_len: int
    flood_len: int
    flood_answer_len: int
    flood_s: float


@contextlib.asynccontextmanager
async def serving(flags: list[str]) -> AsyncIterator[str]:
    """A server process with both keys; yields its URL."""
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.write_text(f"quiet {QUIET} metrics=1\nflood {FLOOD}\n", "utf-8")
        keys.chmod(0o600)
        command = (sys.executable, "-m", "session_server", "serve", "--port", "0")
        process = await asyncio.create_subprocess_exec(
            *command,
            "--api-key-file",
            str(keys),
            *flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                if b"listening on " in line:
                    yield line.decode().split("listening on ")[1].split()[0]
                    break
        finally:
            process.terminate()
            await process.wait()


class Tenant:
    """Send turns with one key."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits)
        self._random = random.Random(key)

    async def open(self) -> str:
        answer = await self.client.post("/v1/sessions", json={})
        answer.raise_for_status()
        return str(answer.json()["id"])

    async def turn(self, session_id: str, num_tokens: int, max_tokens: int) -> dict[str, Any]:
        ids = [self._random.randrange(300, 900) for _ in range(num_tokens)]
        sampling = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": ids, "sampling": sampling}
        answer = await self.client.post(f"/v1/sessions/{session_id}/turns", json=body)
        return dict(answer.json()) if answer.status_code < 300 else {}

    async def num_unfinished(self) -> float:
        """Turns of all tenants that the server runs, or has waiting."""
        answer = (await self.client.get("/metrics")).raise_for_status()
        return sum(sample.value for sample in samples_of(answer.text, UNFINISHED))


async def measure(quiet: Tenant, load: Load) -> list[float]:
    """Seconds to the first token of each turn, in a session of its own."""
    waits = []
    for _ in range(-(-load.num_turns // load.num_rounds)):
        session_id = await quiet.open()
        began_s = time.perf_counter()
        assert await quiet.turn(session_id, load.quiet_len, 1), "a quiet turn was refused"
        waits.append(time.perf_counter() - began_s)
        await quiet.client.delete(f"/v1/sessions/{session_id}")
        await asyncio.sleep(REST_S)
    return waits


def flood_until_killed(url: str, load: Load, num_tokens: Synchronized[int]) -> None:
    """What the flooding process runs; `num_tokens`: input of its turns that ended."""

    async def one(tenant: Tenant) -> None:
        while True:
            session_id = await tenant.open()
            if await tenant.turn(session_id, load.flood_len, load.flood_answer_len):
                num_tokens.value += load.flood_len

    async def all_of_them() -> None:
        tenant = Tenant(url, FLOOD)
        await asyncio.gather(*(one(tenant) for _ in range(load.num_flooders)))

    asyncio.run(all_of_them())


class Flood:
    """A flood that can stand still, on the server of the quiet tenant.

    Its clients have a process of their own, so that a quiet client's clock does not stand still
    while they write their requests.
    """

    def __init__(self, quiet: Tenant, load: Load) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._quiet = quiet
        self._settle_s = load.flood_s / 4
        self._num_tokens = spawn.Value("q", 0)
        self._process = spawn.Process(
            target=flood_until_killed,
            args=(str(quiet.client.base_url), load, self._num_tokens),
            daemon=True,
        )

    async def __aenter__(self) -> Self:
        self._process.start()
        while not self._num_tokens.value:
            self._assert_alive()
            await asyncio.sleep(0.1)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    async def tokens_per_s(self, during: Awaitable[T]) -> tuple[float, T]:
        """Input tokens per second of turns that end meanwhile."""
        await asyncio.sleep(self._settle_s)
        began_s, before = time.perf_counter(), self._num_tokens.value
        result = await during
        self._assert_alive()
        return (self._num_tokens.value - before) / (time.perf_counter() - began_s), result

    def _assert_alive(self) -> None:
        assert self._process.is_alive(), "the flood has ended: the server refused its clients"

    @contextlib.asynccontextmanager
    async def standing_still(self) -> AsyncIterator[None]:
        """No clients of the flood, and none of their turns, while the block runs."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            while await self._quiet.num_unfinished():
                await asyncio.sleep(0.1)
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)


async def run(load: Load, flags: list[str]) -> None:
    async with serving(flags) as at_rest, serving(flags) as flooded:
        lonely, quiet = Tenant(at_rest, QUIET), Tenant(flooded, QUIET)
        await Tenant(at_rest, FLOOD).open()
        await measure(lonely, load)  # warms up
        alone, beside, rates = [], [], []
        async with Flood(quiet, load) as flood:
            unshared, _ = await flood.tokens_per_s(asyncio.sleep(load.flood_s))
            session_id = await quiet.open()
            await quiet.turn(session_id, load.quiet_len, 1)
            shared, _ = await flood.tokens_per_s(asyncio.sleep(load.flood_s))
            for _ in range(load.num_rounds):
                rate, waits = await flood.tokens_per_s(measure(quiet, load))
                beside += waits
                rates.append(rate)
                async with flood.standing_still():
                    alone += await measure(lonely, load)
        usage = (await quiet.turn(session_id, 1, 1))["usage"]
        report(alone, beside, usage)
        print(
            f"flood, input tokens/s: alone {unshared:.0f}, beside an idle tenant {shared:.0f},"
            f" beside its turns {statistics.mean(rates):.0f}"
        )


def report(alone: list[float], beside: list[float], usage: dict[str, Any]) -> None:
    for name, at in (("p50", 50), ("p95", 95)):
        first, second = (statistics.quantiles(w, n=100)[at - 1] for w in (alone, beside))
        ratio = second / first
        print(
            f"ttft {name}: alone {first * 1e3:.1f} ms, beside {second * 1e3:.1f} ms, x{ratio:.2f}"
        )
    print(f"the history of before the flood: {usage}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--flooders", type=int, default=24)
    parser.add_argument("--quiet-len", type=int, default=256)
    parser.add_argument("--flood-len", type=int, default=1500)
    parser.add_argument("--flood-answer-len", type=int, default=32)
    parser.add_argument("--flood-s", type=float, default=10.0)
    given, flags = parser.parse_known_args()
    load = Load(
        given.turns,
        given.rounds,
        given.flooders,
        given.quiet_len,
        given.flood_len,
        given.flood_answer_len,
        given.flood_s,
    )
    asyncio.run(run(load, flags))


if __name__ == "__main__":
    main()
