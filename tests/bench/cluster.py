"""Measure what a cluster costs beside one plain server, over the same store.

`python -m tests.bench.cluster`: rounds alternate between a plain server and three replicas under
Ray Serve, all over echo engines and one PostgreSQL, so that a machine whose speed drifts affects
both alike. Then sessions are visited through Ray's proxy, over HTTP and sockets: which of them were
in the same replica each time, and what PostgreSQL has counted for each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from session_server.deploy.routing import tag_in
from tests.chaos.crashes import FLAGS
from tests.deploy.cluster import running_cluster
from tests.rig.echo_cluster import PROGRAM
from tests.rig.echo_replica import echo_replica
from tests.rig.postgres import Postgres, running
from tests.web.wire_client import greeted, http_client

LEASE_S = 6.0
NUM_REPLICAS = 3
AT_ONCE = 8
"""Sessions that are visited at a time."""

COUNTED_S = 12.0
"""How long PostgreSQL may take to show what connections that are idle now have done."""

_COUNTERS = {
    "commits": "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()",
    "log entries": "SELECT n_tup_ins FROM pg_stat_user_tables WHERE relname = 'entries'",
    "updates of sessions": "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'sessions'",
    "renewals of leases": "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'replicas'",
}


def body_of(turn_id: str) -> dict[str, Any]:
    """Return a turn of 8 tokens in and 8 out."""
    sampling = {"max_tokens": 8, "seed": 1, "ignore_eos": True}
    return {"turn_id": turn_id, "input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "sampling": sampling}


async def turns_s(url: str, num: int) -> dict[str, float]:
    """Return the median seconds of so many turns over HTTP, of as many over a socket, and of a
    request that runs none; each in a session of its own."""
    took: dict[str, list[float]] = {"a turn over HTTP": [], "a turn over a socket": [], "GET": []}
    async with http_client(url) as http:
        path = await _opened(http)
        for number in range(num):
            begun_s = time.perf_counter()
            answer = await http.post(f"{path}/turns", json=body_of(f"t{number}"))
            took["a turn over HTTP"].append(time.perf_counter() - begun_s)
            assert answer.json()["durable"] is True, answer.text
            begun_s = time.perf_counter()
            assert (await http.get(path)).status_code == 200
            took["GET"].append(time.perf_counter() - begun_s)
        await http.delete(path)
        async with greeted(url) as wire:
            for number in range(num):
                begun_s = time.perf_counter()
                await wire.send("turn.create", **body_of(f"t{number}"))
                await wire.until("turn.completed")
                took["a turn over a socket"].append(time.perf_counter() - begun_s)
        await http.delete(f"/v1/sessions/{wire.hello['session_id']}")
    return {kind: statistics.median(seconds) for kind, seconds in took.items()}


async def _opened(http: httpx.AsyncClient) -> str:
    answer = await http.post("/v1/sessions", json={})
    assert answer.status_code == 201, answer.text
    return f"/v1/sessions/{answer.json()['id']}"


async def alternate(urls: dict[str, str], num_rounds: int, num_turns: int) -> dict[str, Any]:
    """Return medians over rounds of both, in ms, with the difference and the ratio."""
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(num_rounds):
        rounds.append({name: await turns_s(url, num_turns) for name, url in urls.items()})
    found: dict[str, Any] = {}
    for kind in rounds[0]["plain"]:
        plain, cluster = ([each[name][kind] for each in rounds] for name in ("plain", "cluster"))
        pairs = [*zip(plain, cluster, strict=True)]
        found[kind] = {
            "plain_ms": round(1e3 * statistics.median(plain), 2),
            "cluster_ms": round(1e3 * statistics.median(cluster), 2),
            "more_ms": round(1e3 * statistics.median(b - a for a, b in pairs), 2),
            "ratio": round(statistics.median(b / a for a, b in pairs), 2),
        }
    return found


class Visits:
    """Open sessions, half of them over HTTP and half over sockets, and visit each over both."""

    def __init__(self, url: str, num_visits: int) -> None:
        self.url, self.num_visits = url, num_visits
        self.tags: Counter[str] = Counter()
        self.visits: Counter[str] = Counter()
        self._turnstile = asyncio.Semaphore(AT_ONCE)

    async def visit(self, number: int) -> None:
        """Open one session, and visit it."""
        async with self._turnstile, http_client(self.url) as http:
            if number % 2:
                path = await _opened(http)
            else:
                async with greeted(self.url) as wire:
                    path = f"/v1/sessions/{wire.hello['session_id']}"
            name = path.rpartition("/")[2]
            self.tags[tag_in(name) or "none"] += 1
            for at in range(self.num_visits):
                kind = ("HTTP", "sockets")[at % 2]
                self.visits[kind] += 1
                await self._turn(http, name, kind, f"t{at}")

    async def _turn(self, http: httpx.AsyncClient, name: str, kind: str, turn_id: str) -> None:
        if kind == "HTTP":
            answer = await http.post(f"/v1/sessions/{name}/turns", json=body_of(turn_id))
            assert answer.status_code == 200, answer.text
            return
        async with greeted(self.url, name) as wire:
            await wire.send("turn.create", **body_of(turn_id))
            await wire.until("turn.completed")


async def visited(
    postgres: Postgres, store_url: str, url: str, *, num_sessions: int, num_visits: int
) -> dict[str, Any]:
    """Return how many turns found a session where it was, by the epochs of the store, and what each
    turn cost there."""
    await asyncio.sleep(COUNTED_S)
    before, begun_s = _counted(postgres, store_url), time.monotonic()
    visits = Visits(url, num_visits)
    await asyncio.gather(*map(visits.visit, range(num_sessions)))
    took_s = time.monotonic() - begun_s
    await asyncio.sleep(COUNTED_S)
    after, whole_s = _counted(postgres, store_url), time.monotonic() - begun_s
    await asyncio.sleep(COUNTED_S)
    idle, idle_s = _counted(postgres, store_url), time.monotonic() - begun_s - whole_s
    num_turns = visits.visits.total()
    moved = postgres.run(
        "SELECT coalesce(sum(epoch - 1), 0) FROM session_server.sessions", store_url
    )
    per_turn = {}
    for name in _COUNTERS:
        at_rest = (idle[name] - after[name]) / idle_s  # leases are renewed, and so on
        per_turn[name] = round((after[name] - before[name] - at_rest * whole_s) / num_turns, 2)
    return {
        "sessions": num_sessions,
        "turns": num_turns,
        "seconds": round(took_s, 1),
        "in the same replica": 1 - int(moved[0][0]) / num_turns,
        "opened by": dict(visits.tags),
        "for each turn": per_turn,
        "each second without turns": {
            name: round((idle[name] - after[name]) / idle_s, 2) for name in _COUNTERS
        },
    }


def _counted(postgres: Postgres, store_url: str) -> dict[str, int]:
    return {name: int(postgres.run(query, store_url)[0][0]) for name, query in _COUNTERS.items()}


def measure(num_rounds: int, num_turns: int, num_sessions: int, num_visits: int) -> dict[str, Any]:
    """Run all of it."""
    with ExitStack() as opened:
        state = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        postgres = opened.enter_context(running())
        store_url = postgres.new_database()
        cluster = opened.enter_context(running_cluster(state, PROGRAM))
        flags = ("--replicas", str(NUM_REPLICAS), "--replica-cpus", "0.5", "--store", store_url)
        done = cluster.run("up", *FLAGS, *flags)
        assert done.returncode == 0, done.stderr
        with echo_replica(store_url, FLAGS, lease_s=LEASE_S) as plain:
            urls = {"plain": plain.url, "cluster": cluster.url}
            took = asyncio.run(alternate(urls, num_rounds, num_turns))
        costs = asyncio.run(
            visited(
                postgres, store_url, cluster.url, num_sessions=num_sessions, num_visits=num_visits
            )
        )
    return {"rounds": num_rounds, "turns a round": num_turns, **took, "visits": costs}


def main() -> int:
    """Run it, print what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--visits", type=int, default=6)
    args = parser.parse_args()
    print(json.dumps(measure(args.rounds, args.turns, args.sessions, args.visits), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
