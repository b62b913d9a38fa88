"""Measure what a store costs: turns beside a server that has none, commits, and starts with many
stored sessions.

Rounds alternate between two servers, one of which waits for the disk with every turn, so that a
machine whose speed drifts affects both alike, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from session_server.bench.growth import ordinary_tokens
from session_server.bench.peers.flags import one_checkpoint
from session_server.bench.sheet import Sheet
from session_server.client import SessionClient, TurnText, connect
from session_server.local_server import LocalServer
from session_server.sessions.store.database import Database

PLAIN: Final = "--store none"
SQLITE: Final = "--durability turn"
SHARED: Final = "--store postgresql://"
_FEW_TURNS: Final = 4
_COMMITS: Final = "session_server_store_commit_seconds"
_P99: Final = 0.99


@dataclass(frozen=True, slots=True)
class StoreWorkload:
    """Configure `num_rounds` rounds of `num_sessions` at a time, each with `num_turns` turns of
    `num_new` tokens in and `num_outputs` out; and starts with so many `stored` sessions. `model`: a
    directory; None for the embedded one. `shared`: the URL of a database to measure as well."""

    num_sessions: int = 64
    num_turns: int = 16
    num_new: int = 16
    num_outputs: int = 8
    num_rounds: int = 9
    stored: tuple[int, ...] = (0, 1_000, 100_000)
    model: Path | None = None
    shared: str | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return which servers are measured beside each other."""
        return (SQLITE, *([SHARED] if self.shared else []), PLAIN)

    @property
    def flags(self) -> list[str]:
        """Return the flags that all servers have."""
        model = ["--model-path", str(self.model)] if self.model else []
        return ["--log-level", "warning", *model]

    @property
    def total_steps(self) -> int:
        """Return the number of rounds of either kind, and of starts."""
        return self.num_rounds * len(self.kinds) + len(self.stored)


def workload(args: argparse.Namespace) -> StoreWorkload:
    """Return what the flags ask for: of a model that is named, turns are few, and take longer.

    Raises:
        ValueError: `--model` cannot be used; the message says which would do.
    """
    model = one_checkpoint(args)
    if model is None:
        return StoreWorkload(shared=args.shared_store)
    return StoreWorkload(model=model, num_turns=_FEW_TURNS, shared=args.shared_store)


def measure(load: StoreWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Return medians over the rounds, by kind, the times of commits, and those of starts."""
    with tempfile.TemporaryDirectory(prefix="session-server-bench-") as directory:
        stores = {SQLITE: str(Path(directory) / "store"), SHARED: load.shared or "", PLAIN: "none"}
        with contextlib.ExitStack() as running:
            urls = {
                kind: running.enter_context(LocalServer([*load.flags, "--store", stores[kind]])).url
                for kind in load.kinds
            }
            kinds = asyncio.run(_alternate(urls, load, on_step))
            commits = {kind: _commits(urls[kind]) for kind in load.kinds if kind != PLAIN}
        starts = {}
        for number in load.stored:
            starts[f"{number:,}"] = {
                "ready_s": _start_s(Path(directory) / str(number), number, load)
            }
            on_step()
    return {
        "num_sessions": load.num_sessions,
        "num_rounds": load.num_rounds,
        "kinds": kinds,
        "commits": commits,
        "starts": starts,
    }


SHEETS: Final = (
    Sheet(
        "{num_sessions} turns at a time, medians of {num_rounds} rounds",
        lambda report: report["kinds"],
        ("",),
        {
            "turns/s": "{turns_per_s:.0f}",
            "of without": "{turns_ratio:.3f}",
            "of SQLite": "{turns_of_sqlite:.3f}",
            "first token, ms": "{first_token_ms:.1f}",
            "as long as without": "{first_token_ratio:.3f}",
        },
    ),
    Sheet(
        "commits",
        lambda report: report["commits"],
        ("",),
        {"number": "{number}", "mean, ms": "{mean_ms:.2f}", "p99 below, ms": "{p99_ms:g}"},
    ),
    Sheet(
        "a server starts",
        lambda report: report["starts"],
        ("stored sessions",),
        {"ready after, s": "{ready_s:.2f}"},
    ),
)


class _Round(NamedTuple):
    turns_per_s: float
    first_token_ms: float


async def _alternate(
    urls: dict[str, str], load: StoreWorkload, on_step: Callable[[], None]
) -> dict[str, Any]:
    for url in urls.values():
        await _round(url, load, 0)  # warms up
    rounds: dict[str, list[_Round]] = {kind: [] for kind in load.kinds}
    for number in range(load.num_rounds):
        for kind in load.kinds if number % 2 else reversed(load.kinds):
            rounds[kind].append(await _round(urls[kind], load, 1 + number))
            on_step()
    plain, sqlite = rounds[PLAIN], rounds[SQLITE]
    return {kind: _figures(values, plain, sqlite) for kind, values in rounds.items()}


def _figures(rounds: list[_Round], plain: list[_Round], sqlite: list[_Round]) -> dict[str, float]:
    pairs = list(zip(rounds, plain, strict=True))
    return {
        "turns_of_sqlite": statistics.median(
            a.turns_per_s / b.turns_per_s for a, b in zip(rounds, sqlite, strict=True)
        ),
        "turns_per_s": statistics.median(each.turns_per_s for each in rounds),
        "turns_ratio": statistics.median(a.turns_per_s / b.turns_per_s for a, b in pairs),
        "first_token_ms": statistics.median(each.first_token_ms for each in rounds),
        "first_token_ratio": statistics.median(
            a.first_token_ms / b.first_token_ms for a, b in pairs
        ),
    }


async def _round(url: str, load: StoreWorkload, number: int) -> _Round:
    """Hold all conversations at once. Sessions are opened before and closed behind it, untimed."""
    sessions = [await connect(url) for _ in range(load.num_sessions)]
    begin_s = time.perf_counter()
    places = range(number * load.num_sessions, (number + 1) * load.num_sessions)
    talks = [_talk(*each, load) for each in zip(sessions, places, strict=True)]
    waits_ms = [wait for waits in await asyncio.gather(*talks) for wait in waits]
    elapsed_s = time.perf_counter() - begin_s
    for session in sessions:
        await session.close()
    return _Round(len(waits_ms) / elapsed_s, statistics.median(waits_ms))


async def _talk(session: SessionClient, place: int, load: StoreWorkload) -> list[float]:
    """Return the milliseconds to the first token of each turn."""
    sampling = {"temperature": 0, "max_tokens": load.num_outputs, "ignore_eos": True}
    clock, waits_ms = asyncio.get_running_loop().time, []
    for index in range(load.num_turns):
        begin_s = clock()
        new = ordinary_tokens(place * load.num_turns + index, load.num_new)
        turn = await session.start(new, sampling=sampling)
        times = [event.received_s async for event in turn if isinstance(event, TurnText)]
        result = await turn.result()
        assert result.status == "completed", result.error
        assert result.is_durable is not False, "the disk of this machine fails"
        waits_ms.append((times[0] - begin_s) * 1e3)
    return waits_ms


def _commits(url: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    (family,) = (each for each in families if each.name == _COMMITS)
    classes = sorted(
        (float(sample.labels["le"]), sample.value)
        for sample in family.samples
        if "le" in sample.labels
    )
    (sum_s,) = (each.value for each in family.samples if each.name == f"{_COMMITS}_sum")
    number = classes[-1][1]
    return {
        "number": int(number),
        "mean_ms": sum_s / number * 1e3,
        "p99_ms": next(le for le, count in classes if count >= _P99 * number) * 1e3,
    }


def _start_s(store: Path, num_sessions: int, load: StoreWorkload) -> float:
    """Return the seconds until a server is ready that has so many sessions stored, one of which
    then goes on."""
    flags = [*load.flags, "--store", str(store)]
    session_id = None
    if num_sessions:
        with LocalServer(flags) as server:
            session_id = asyncio.run(_say(server.url, None))
        _multiply(store, num_sessions)
    begin_s = time.perf_counter()
    with LocalServer(flags) as server:
        ready_s = time.perf_counter() - begin_s
        asyncio.run(_say(server.url, session_id))
    return ready_s


async def _say(url: str, session_id: str | None) -> str:
    client = await connect(url, session_id=session_id)
    result = await client.ask(ordinary_tokens(0, 16), sampling={"max_tokens": 8})
    assert result.is_durable, "it is on disk"
    await client.leave()
    return client.session_id


def _multiply(store: Path, num_sessions: int) -> None:
    """Store the one session that is there again under other ids, until there are so many."""
    with contextlib.closing(Database(store)) as database, database.transaction():
        (row,) = database.walk(None)
        entries = database.entries(row.number)
        for number in range(row.number + 1, row.number + num_sessions):
            name = f"{row.session_id}-{number}"
            database.put(structs.replace(row, number=number, session_id=name), *entries)
