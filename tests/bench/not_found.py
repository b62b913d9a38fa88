"""`python -m tests.bench.not_found`: can a client tell what another key owns by the time it takes?

Requests for another key's id and for an id that nothing has, in random order, answered by the
application in this process: a network adds noise and no difference. An order of 0.5 says that the
one is as often slower than the other as it is faster. What is the client's own is asked for too,
to show which differences would be seen.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from session_server.bench.sheet import Sheet
from session_server.web.keys import KeyRing
from tests.web.other_keys import OURS, THEIRS, hold, unknown_like
from tests.web.serving import serving

PATHS = (
    "/v1/sessions/{session_id}",
    "/v1/sessions/{session_id}/turns/{turn_id}",
    "/v1/responses/{response_id}",
    "/v1/conversations/{conversation_id}/items",
)
KINDS = ("foreign", "unknown", "own")


@dataclass(frozen=True, slots=True)
class NotFoundWorkload:
    """Ask `num_requests` times for each path and kind of id; `seed`: of their order."""

    num_requests: int = 4000
    seed: int = 1


def measure(load: NotFoundWorkload) -> dict[str, Any]:
    """Time the workload."""
    return asyncio.run(_measure(load))


async def _measure(load: NotFoundWorkload) -> dict[str, Any]:
    async with serving(keys=KeyRing.of("secret", "other")) as this:
        ours, theirs = await hold(this, OURS), await hold(this, THEIRS)
        transport = httpx.ASGITransport(app=this.app)
        ids_of = {"foreign": ours.ids, "own": theirs.ids, "unknown": unknown_like(ours.ids)}
        order = list(KINDS) * load.num_requests
        random.Random(load.seed).shuffle(order)
        async with httpx.AsyncClient(transport=transport, base_url=this.url) as http:
            return {path: await _compare(http, path, ids_of, order) for path in PATHS}


async def _compare(
    http: httpx.AsyncClient,
    path: str,
    ids_of: Mapping[str, Mapping[str, str]],
    order: Sequence[str],
) -> dict[str, Any]:
    times_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    gc.disable()
    for kind in order:
        request = http.build_request("GET", path.format(**ids_of[kind]), headers=THEIRS)
        began_s = time.perf_counter()
        answer = await http.send(request)
        times_s[kind].append(time.perf_counter() - began_s)
        assert answer.status_code == (200 if kind == "own" else 404), answer.text
    gc.enable()
    return {
        "median_us": {kind: statistics.median(times_s[kind]) * 1e6 for kind in KINDS},
        "order": {kind: order_of(times_s[kind], times_s["unknown"]) for kind in ("foreign", "own")},
        "noise": 2 * (len(KINDS) / 6 / len(order)) ** 0.5,
    }


def order_of(first: list[float], second: list[float]) -> float:
    """Return how often a time of `first` is above one of `second`: 0.5 where nothing differs."""
    ranked = sorted([(t, 0) for t in first] + [(t, 1) for t in second])
    ranks = sum(rank for rank, (_, kind) in enumerate(ranked, 1) if kind == 0)
    return (ranks - len(first) * (len(first) + 1) / 2) / (len(first) * len(second))


SHEETS = (
    Sheet(
        title="the time of a 404",
        rows=lambda report: report,
        keys=("path",),
        columns={
            "foreign, µs": "{median_us[foreign]:.0f}",
            "unknown, µs": "{median_us[unknown]:.0f}",
            "order": "{order[foreign]:.3f}",
            "noise": "± {noise:.3f}",
            "own, µs": "{median_us[own]:.0f}",
            "its order": "{order[own]:.3f}",
        },
    ),
)


if __name__ == "__main__":
    report = measure(NotFoundWorkload())
    Console().print(*(sheet.table(report) for sheet in SHEETS))
