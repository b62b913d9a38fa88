"""Measure what a token message costs the server's process, over real WebSockets.

Several sessions of a small random model answer at once. The engine is another process; what counts
is the CPU time of the one that has the sockets, journals and texts.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.bench.sheet import Sheet
from session_server.client import connect
from session_server.core.session_events import TokenInput
from session_server.local_server import LocalServer

NUM_SESSIONS: Final = 16
NUM_ROUNDS: Final = 4
NUM_TURNS: Final = NUM_SESSIONS * NUM_ROUNDS
NUM_OUTPUT: Final = 256
_PROMPT: Final = TokenInput(tuple(range(300, 316)))

SHEET: Final = Sheet(
    "WebSockets: {sockets[num_sessions]} sessions that answer at once",
    lambda report: {"": report["sockets"]},
    ("",),
    {"server CPU, us per token": "{cpu_us_per_token:.1f}", "tokens/s": "{tokens_per_s:.0f}"},
)


def measure_sockets(*, on_step: Callable[[], None]) -> dict[str, Any]:
    """Measure the CPU time of the server's process per token, each sent in a message of its own
    unless the socket was behind, and the tokens a second. Call `on_step` after each turn."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_random_checkpoint(Path(directory), RandomModel())
        flags = ["--model-path", str(model), "--log-level", "warning"]
        with LocalServer(flags) as server:
            figures = asyncio.run(_converse(server, on_step))
    return {"num_sessions": NUM_SESSIONS, "num_output": NUM_OUTPUT, **figures}


async def _converse(server: LocalServer, on_step: Callable[[], None]) -> dict[str, float]:
    sampling = {"temperature": 0, "max_tokens": NUM_OUTPUT, "ignore_eos": True}

    async def talk(num_rounds: int) -> None:
        async with await connect(server.url) as session:
            for _ in range(num_rounds):
                await session.ask(_PROMPT, sampling=sampling)
                on_step()

    begun_s, begun_cpu_s = time.perf_counter(), cpu_s(server.pid)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_SESSIONS):
            tasks.create_task(talk(NUM_ROUNDS))
    num_tokens = NUM_TURNS * NUM_OUTPUT
    return {
        "cpu_us_per_token": (cpu_s(server.pid) - begun_cpu_s) / num_tokens * 1e6,
        "tokens_per_s": num_tokens / (time.perf_counter() - begun_s),
    }


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process so far; NaN where Linux does not tell."""
    threads = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9 if threads else math.nan
