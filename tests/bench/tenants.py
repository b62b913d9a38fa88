"""How much one tenant feels another: a quiet one alone, and beside one that floods the server.

    python -m tests.bench.tenants [--turns 60] [--flooders 24] [SERVE FLAGS]

Server processes with two keys, one for the quiet tenant alone and one for the rest. The quiet
tenant sends turns of some hundred new tokens into new sessions, and waits a little after each. The
flood opens session after session and sends each a long prompt, as fast as the server takes them.
What is compared is the time to the first token of the quiet tenant's turns, measured by the client,
and how much of its history was cached afterwards. The input tokens of the flood are counted before
the quiet tenant has a session, after, and while it sends turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

QUIET, FLOOD = "quiet-tenants-key", "flooding-tenants-key"
REST_S = 0.02
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: tokens of a quiet turn and of a flooding one, and how many flood."""

    num_turns: int
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
        keys.write_text(f"quiet {QUIET}\nflood {FLOOD}\n", "utf-8")
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
        self.num_input_tokens = 0

    async def open(self) -> str:
        answer = await self.client.post("/v1/sessions", json={})
        answer.raise_for_status()
        return str(answer.json()["id"])

    async def turn(self, session_id: str, num_tokens: int, max_tokens: int) -> dict[str, Any]:
        ids = [self._random.randrange(300, 900) for _ in range(num_tokens)]
        sampling = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": ids, "sampling": sampling}
        answer = await self.client.post(f"/v1/sessions/{session_id}/turns", json=body)
        self.num_input_tokens += num_tokens if answer.status_code < 300 else 0
        return dict(answer.json()) if answer.status_code < 300 else {}


async def measure(quiet: Tenant, load: Load) -> list[float]:
    """Seconds to the first token of each turn, in a session of its own."""
    waits = []
    for _ in range(load.num_turns):
        session_id = await quiet.open()
        began_s = time.perf_counter()
        assert await quiet.turn(session_id, load.quiet_len, 1), "a quiet turn was refused"
        waits.append(time.perf_counter() - began_s)
        await quiet.client.delete(f"/v1/sessions/{session_id}")
        await asyncio.sleep(REST_S)
    return waits


async def flood(tenant: Tenant, load: Load) -> None:
    while True:
        session_id = await tenant.open()
        await tenant.turn(session_id, load.flood_len, load.flood_answer_len)


async def tokens_per_s(tenant: Tenant, during: Awaitable[T]) -> tuple[float, T]:
    """Input tokens per second of a tenant's turns that end meanwhile."""
    began_s, num_tokens = time.perf_counter(), tenant.num_input_tokens
    result = await during
    rate = (tenant.num_input_tokens - num_tokens) / (time.perf_counter() - began_s)
    return rate, result


async def run(load: Load, flags: list[str]) -> None:
    async with serving(flags) as url:
        quiet = Tenant(url, QUIET)
        await Tenant(url, FLOOD).open()
        for _ in range(2):  # the first of both is warmed up and thrown away
            alone = await measure(quiet, load)
    async with serving(flags) as url:
        quiet, other = Tenant(url, QUIET), Tenant(url, FLOOD)
        flooders = [asyncio.create_task(flood(other, load)) for _ in range(load.num_flooders)]
        await asyncio.sleep(load.flood_s / 2)
        unshared, _ = await tokens_per_s(other, asyncio.sleep(load.flood_s))
        session_id = await quiet.open()
        await quiet.turn(session_id, load.quiet_len, 1)
        shared, _ = await tokens_per_s(other, asyncio.sleep(load.flood_s))
        busy, beside = await tokens_per_s(other, measure(quiet, load))
        for task in flooders:
            task.cancel()
        await asyncio.gather(*flooders, return_exceptions=True)
        usage = (await quiet.turn(session_id, 1, 1))["usage"]
        report(alone, beside, usage)
        print(
            f"flood, input tokens/s: alone {unshared:.0f}, beside an idle tenant {shared:.0f},"
            f" beside its turns {busy:.0f}"
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
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--flooders", type=int, default=24)
    parser.add_argument("--quiet-len", type=int, default=256)
    parser.add_argument("--flood-len", type=int, default=1500)
    parser.add_argument("--flood-answer-len", type=int, default=32)
    parser.add_argument("--flood-s", type=float, default=10.0)
    given, flags = parser.parse_known_args()
    load = Load(
        given.turns,
        given.flooders,
        given.quiet_len,
        given.flood_len,
        given.flood_answer_len,
        given.flood_s,
    )
    asyncio.run(run(load, flags))


if __name__ == "__main__":
    main()
