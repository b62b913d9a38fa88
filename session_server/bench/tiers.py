"""Measure more sessions than memory holds: what their next turns cost with KV in host memory, on
disk, and computed again; and after a restart.

The same sessions are held on three servers, whose pools hold a few of them. After a first turn of
each, every session says one thing more, in another order, for one token: that is timed, and what
the servers say is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.bench.harness import TOKEN_IDS
from session_server.bench.peers.flags import one_checkpoint
from session_server.bench.sheet import Sheet
from session_server.client import connect
from session_server.core.session_events import TokenInput
from session_server.local_server import LocalServer

WAYS: Final = ("host", "disk", "none")
NAMES: Final = ("sessions", "resident", "kept", "host_mib", "compared")
"""Of the flags that are this benchmark's alone, in the parsed arguments."""

_MIB: Final = 1 << 20
_SHAPE: Final = RandomModel(
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=768,
)
_NUM_NEW: Final = 16
_SECOND_TURNS: Final = 1_000_000
"""What their prompts are numbered from."""
_PLENTY_MIB: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class TiersWorkload:
    """Configure `num_sessions` of `num_tokens` each on pools for `num_resident` of them.

    `history`: of the session that is timed after a restart. `model`: a directory; None for a small
    random model. `ways`: of `WAYS`, "none" among them. `host_mib`: host memory before the disk.
    `num_compared`: sessions that are computed again; None for all.
    """

    num_sessions: int = 200
    num_tokens: int = 1024
    num_resident: int = 20
    history: int = 8192
    num_restarts: int = 3
    model: Path | None = None
    ways: tuple[str, ...] = WAYS
    host_mib: int = 256
    num_compared: int | None = None

    @property
    def total_steps(self) -> int:
        """Return the number of turns, and of servers started again."""
        return 2 * sum(map(self.num_held, self.ways)) + 1 + 2 * self.num_restarts

    def num_held(self, way: str) -> int:
        """Return how many sessions are held on the server that keeps KV in this way."""
        return self.num_compared or self.num_sessions if way == "none" else self.num_sessions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, all of them None where they are not given."""
    group = parser.add_argument_group(
        "tiers",
        "Flags of the benchmark `tiers`, which also knows --model (one; default: a\n"
        "small random one) and --work-dir, as `store` does.",
    )
    group.add_argument("--sessions", type=int, metavar="N", help="how many (default: 200)")
    group.add_argument(
        "--resident", type=int, metavar="N", help="how many of them the pools hold (default: 20)"
    )
    group.add_argument(
        "--kept",
        nargs="+",
        choices=WAYS[:-1],
        help="where KV is kept, against nowhere (default: host disk)",
    )
    group.add_argument(
        "--host-mib", type=int, metavar="N", help="host memory before the disk (default: 256)"
    )
    group.add_argument(
        "--compared",
        type=int,
        metavar="N",
        help="how many are computed again, and must say the same (default: all)",
    )


def workload(args: argparse.Namespace) -> TiersWorkload:
    """Return what the flags ask for.

    Raises:
        ValueError: a flag has a value that cannot be used; the message says which would do.
    """
    default = TiersWorkload()
    num_sessions = default.num_sessions if args.sessions is None else args.sessions
    num_resident = default.num_resident if args.resident is None else args.resident
    if not 1 <= num_resident < num_sessions:
        raise ValueError(
            f"--resident {num_resident} --sessions {num_sessions}: at least 1, and fewer than all"
        )
    if args.compared is not None and not num_resident < args.compared <= num_sessions:
        raise ValueError(
            f"--compared {args.compared}: more than --resident {num_resident}, which are not "
            f"computed again, and at most --sessions {num_sessions}"
        )
    host_mib = default.host_mib if args.host_mib is None else args.host_mib
    if host_mib < 1:
        raise ValueError(f"--host-mib {host_mib}: 1 or more, KV goes to disk by way of it")
    return TiersWorkload(
        num_sessions=num_sessions,
        num_resident=num_resident,
        model=one_checkpoint(args),
        ways=(*(args.kept or WAYS[:-1]), "none"),
        host_mib=host_mib,
        num_compared=args.compared,
    )


def measure(load: TiersWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Measure next turns of sessions that memory does not hold, and first ones after a restart."""
    with tempfile.TemporaryDirectory(prefix="session-server-bench-") as directory:
        model = load.model or write_random_checkpoint(Path(directory) / "model", _SHAPE)
        flags = ["--model-path", str(model), "--log-level", "warning", "--session-ttl", "86400"]
        figures, said = {}, {}
        for way in load.ways:
            with ExitStack() as stack:
                store = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
                server = stack.enter_context(
                    LocalServer([*flags, *_pool(load), *_tiers_of(way, store, load)])
                )
                num_held = load.num_held(way)
                figures[way], said[way] = asyncio.run(_crowd(server.url, load, num_held, on_step))
        with tempfile.TemporaryDirectory(dir=directory) as store:
            restarts = _restarts([*flags, *_tiers_of("disk", store, load)], load, on_step)
    slow = figures["none"]
    for each in figures.values():
        each["p50_ratio"] = slow["p50_ms"] / each["p50_ms"]
        each["p95_ratio"] = slow["p95_ms"] / each["p95_ms"]
        each["num_wrong"] = 0
    for way in load.ways:
        pairs = zip(said[way], said["none"], strict=False)
        figures[way]["num_wrong"] = sum(mine != its for mine, its in pairs)
    return {
        "num_sessions": load.num_sessions,
        "num_tokens": load.num_tokens,
        "num_resident": load.num_resident,
        "num_compared": load.num_held("none"),
        "history": load.history,
        "ways": figures,
        "restart": restarts,
    }


SHEETS: Final = (
    Sheet(
        "{num_sessions} sessions of {num_tokens} tokens, pools for {num_resident}, {num_compared} "
        "compared: next turn, ms",
        lambda report: report["ways"],
        ("KV kept",),
        {
            "p50": "{p50_ms:.1f}",
            "p95": "{p95_ms:.1f}",
            "faster, p50": "{p50_ratio:.1f}x",
            "faster, p95": "{p95_ratio:.1f}x",
            "of prompts cached": "{cached_share:.0%}",
            "wrong": "{num_wrong}",
        },
    ),
    Sheet(
        "a session of {history} tokens, its next turn: ms to its token",
        lambda report: report["restart"],
        ("when",),
        {"ms": "{ms:.1f}", "of resident": "{ratio:.2f}x"},
    ),
)


def _pool(load: TiersWorkload) -> list[str]:
    num_tokens = load.num_resident * (load.num_tokens + 4 * _NUM_NEW)
    return ["--max-total-tokens", str(num_tokens)]


def _tiers_of(way: str, store: str, load: TiersWorkload) -> list[str]:
    host = {"host": _PLENTY_MIB, "disk": load.host_mib, "none": 0}[way]
    flags = ["--host-kv-bytes", str(host * _MIB)]
    if way == "disk":
        return [*flags, "--store", store, "--disk-kv-bytes", str(_PLENTY_MIB * _MIB)]
    return [*flags, "--store", "none"]


async def _crowd(
    url: str, load: TiersWorkload, num_held: int, on_step: Callable[[], None]
) -> tuple[dict[str, Any], list[str]]:
    """Return the times of second turns, and what was said in them, by session."""
    session_ids = []
    for index in range(num_held):
        client = await connect(url)
        session_ids.append(client.session_id)
        await _ask(client, index, load.num_tokens)
        await client.leave()
        on_step()
    order = list(range(num_held))
    random.Random(0).shuffle(order)
    said = [""] * num_held
    times, num_cached, num_prompt = [], 0, 0
    clock = asyncio.get_running_loop().time
    for index in order:
        client = await connect(url, session_id=session_ids[index])
        begin = clock()
        result = await _ask(client, _SECOND_TURNS + index, _NUM_NEW)
        times.append((clock() - begin) * 1e3)
        said[index] = result.text
        num_cached += result.usage.cached_tokens
        num_prompt += result.usage.input_tokens
        await client.leave()
        on_step()
    figures = {
        "p50_ms": float(np.percentile(times, 50)),
        "p95_ms": float(np.percentile(times, 95)),
        "cached_share": num_cached / num_prompt,
    }
    return figures, said


def _restarts(
    flags: list[str], load: TiersWorkload, on_step: Callable[[], None]
) -> Mapping[str, Mapping[str, float]]:
    """Return the times of a turn of a long session: resident, after a restart with its KV on disk,
    and computed again."""
    flags = [*flags, "--max-total-tokens", str(2 * load.history)]
    with LocalServer(flags) as server:
        session_id, _ = asyncio.run(_one(server.url, None, load.history, 0))
        resident = [
            asyncio.run(_one(server.url, session_id, _NUM_NEW, 1 + index))[1]
            for index in range(load.num_restarts)
        ]
        on_step()
    restored = []
    for index in range(load.num_restarts):
        with LocalServer(flags) as server:
            restored.append(asyncio.run(_one(server.url, session_id, _NUM_NEW, 100 + index))[1])
            on_step()
    cold = []
    for index in range(load.num_restarts):
        with LocalServer([*flags, "--disk-kv-bytes", "0"]) as server:
            cold.append(asyncio.run(_one(server.url, session_id, _NUM_NEW, 200 + index))[1])
            on_step()
    medians = {
        "resident": float(np.median(resident)),
        "after a restart": float(np.median(restored)),
        "computed again": float(np.median(cold)),
    }
    return {when: {"ms": ms, "ratio": ms / medians["resident"]} for when, ms in medians.items()}


async def _one(url: str, session_id: str | None, num_tokens: int, number: int) -> tuple[str, float]:
    clock = asyncio.get_running_loop().time
    client = await connect(url, session_id=session_id)
    begin = clock()
    await _ask(client, number, num_tokens)
    ms = (clock() - begin) * 1e3
    await client.leave()
    return client.session_id, ms


async def _ask(client: Any, number: int, num_tokens: int) -> Any:
    sampling = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
    rng = np.random.default_rng(number)
    tokens = TokenInput(tuple(rng.integers(*TOKEN_IDS, num_tokens).tolist()))
    return await client.ask(tokens, sampling=sampling)
