"""Measure what long prompts cost sessions that decode: one prefill and one decode replica against
two that do both, on the same two cores.

All four servers run; a round of one pair leaves the other at rest. In each round as many sessions
decode as send one long prompt each, all at once; what counts of those that decode is what they get
meanwhile. Rounds alternate, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.bench.harness import TOKEN_IDS
from session_server.bench.peers.flags import one_checkpoint
from session_server.bench.sheet import Sheet
from session_server.client import SessionClient, TurnText, connect
from session_server.core.session_events import TokenInput
from session_server.local_server import SERVE, LocalServer

BOTH: Final = "2 x both"
APART: Final = "prefill + decode"
_TAIL: Final = 0.99
_NUM_OUTPUTS: Final = 128
_MAX_CONTEXT: Final = 4096
"""Tokens after which a session that decodes is closed, and another one opened."""


@dataclass(frozen=True, slots=True)
class RolesWorkload:
    """Configure `num_rounds` rounds in which `num_sessions` decode while as many send `num_tokens`.
    `model`: a directory; None for a small random one. `store`: the URL of an empty database."""

    store: str
    num_sessions: int = 8
    num_tokens: int = 4096
    num_rounds: int = 5
    model: Path | None = None

    @property
    def total_steps(self) -> int:
        """Return the number of rounds of either kind."""
        return 2 * self.num_rounds


def workload(args: argparse.Namespace) -> RolesWorkload:
    """Return what the flags ask for.

    Raises:
        ValueError: there is no database, or no two cores, or `--model` cannot be used.
    """
    if args.shared_store is None:
        raise ValueError("bench roles needs --shared-store postgresql://, an empty database")
    if shutil.which("taskset") is None or len(os.sched_getaffinity(0)) < len(_places()):
        raise ValueError("bench roles needs two cores, and taskset")
    return RolesWorkload(store=args.shared_store, model=one_checkpoint(args))


def measure(load: RolesWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Return medians over the rounds, by kind."""
    with tempfile.TemporaryDirectory(prefix="session-server-bench-") as directory:
        model = load.model or write_random_checkpoint(Path(directory) / "model", RandomModel())
        kv = Path(directory) / "kv"
        kv.mkdir()
        flags = _flags(load, model, kv)
        with contextlib.ExitStack() as running:
            first, second = (running.enter_context(_pinned(flags, core)).url for core in _places())
            port = _free_port()
            prefill = [*flags, "--role", "prefill", "--port", str(port)]
            prefill += ["--advertise-url", f"http://127.0.0.1:{port}"]
            running.enter_context(_pinned(prefill, _places()[0]))
            decode = running.enter_context(_pinned([*flags, "--role", "decode"], _places()[1])).url
            urls = {BOTH: (first, second), APART: (decode,)}
            kinds = asyncio.run(_alternate(urls, load, on_step))
            outcomes = _outcomes(decode)
    return {
        "num_sessions": load.num_sessions,
        "num_tokens": load.num_tokens,
        "num_rounds": load.num_rounds,
        "outcomes": outcomes,
        "num_sent": sum(outcomes.values()),
        "load_average": os.getloadavg()[0],
        "kinds": kinds,
    }


SHEETS: Final = (
    Sheet(
        "{num_sessions} sessions decode, {num_sessions} send {num_tokens} tokens each: medians of "
        "{num_rounds} rounds; {outcomes[done]} of {num_sent} prompts computed apart; load "
        "{load_average:.1f}",
        lambda report: report["kinds"],
        ("",),
        {
            "between tokens p50, ms": "{inter_token_p50_ms:.1f}",
            "p99, ms": "{inter_token_p99_ms:.1f}",
            "of both": "{inter_token_p99_ratio:.2f}",
            "first token p50, ms": "{first_token_p50_ms:.0f}",
            "last, ms": "{first_token_max_ms:.0f}",
            "of both ": "{first_token_ratio:.2f}",
        },
    ),
)


class _Round(NamedTuple):
    inter_token_p50_ms: float
    inter_token_p99_ms: float
    first_token_p50_ms: float
    first_token_max_ms: float


def _places() -> tuple[int, int]:
    """Return the two cores."""
    first, second, *_ = (*sorted(os.sched_getaffinity(0)), 0, 1)
    return first, second


def _flags(load: RolesWorkload, model: Path, kv: Path) -> list[str]:
    return [
        *("--model-path", str(model), "--threads", "1", "--log-level", "warning"),
        *("--store", load.store, "--disk-kv-bytes", f"8GiB:{kv}"),
        *("--max-total-tokens", str(4 * load.num_sessions * (load.num_tokens + _MAX_CONTEXT))),
    ]


@contextlib.contextmanager
def _pinned(flags: Sequence[str], core: int) -> Iterator[LocalServer]:
    """Run a server all of whose threads and processes are on one core."""
    with LocalServer(flags, program=("taskset", "-c", str(core), *SERVE)) as server:
        yield server


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _outcomes(url: str) -> dict[str, int]:
    """Return what has become of the prompts that others were to compute for a server."""
    text = httpx.get(f"{url}/metrics").text
    samples = (each for family in text_string_to_metric_families(text) for each in family.samples)
    return {
        each.labels["outcome"]: int(each.value)
        for each in samples
        if each.name == "session_server_prefills_total"
    }


async def _alternate(
    urls: Mapping[str, Sequence[str]], load: RolesWorkload, on_step: Callable[[], None]
) -> dict[str, Any]:
    rounds: dict[str, list[_Round]] = {kind: [] for kind in urls}
    for number in range(load.num_rounds + 1):
        for kind in urls if number % 2 else reversed(list(urls)):
            measured = await _round(urls[kind], load, 2 * number + (kind == BOTH))
            if number:  # the first one warms up
                rounds[kind].append(measured)
                on_step()
    return {
        kind: {name: _median(values, name) for name in _Round._fields}
        | {
            "inter_token_p99_ratio": _ratio(values, rounds[BOTH], "inter_token_p99_ms"),
            "first_token_ratio": _ratio(values, rounds[BOTH], "first_token_p50_ms"),
        }
        for kind, values in rounds.items()
    }


def _median(rounds: Sequence[_Round], name: str) -> float:
    return float(statistics.median(getattr(each, name) for each in rounds))


def _ratio(rounds: Sequence[_Round], base: Sequence[_Round], name: str) -> float:
    pairs = zip(rounds, base, strict=True)
    return float(statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs))


async def _round(urls: Sequence[str], load: RolesWorkload, number: int) -> _Round:
    """Have sessions decode, then others send their prompts, evenly over the servers."""
    is_over = asyncio.Event()
    places = [urls[index % len(urls)] for index in range(load.num_sessions)]
    begun = [asyncio.Event() for _ in places]
    decoding = [
        asyncio.create_task(_decode(url, index, begun[index], is_over))
        for index, url in enumerate(places)
    ]
    await asyncio.gather(*(each.wait() for each in begun))
    begun_s = time.monotonic()
    first = number * load.num_sessions
    prompts = [_prompt(url, first + index, load.num_tokens) for index, url in enumerate(places)]
    waits_ms = await asyncio.gather(*prompts)
    is_over.set()
    times = await asyncio.gather(*decoding)
    gaps = [gap for each in times for gap in _gaps_ms(each, begun_s)]
    return _Round(
        inter_token_p50_ms=statistics.median(gaps),
        inter_token_p99_ms=statistics.quantiles(gaps, n=100)[int(_TAIL * 100) - 1],
        first_token_p50_ms=statistics.median(waits_ms),
        first_token_max_ms=max(waits_ms),
    )


def _gaps_ms(turns: Sequence[Sequence[float]], begun_s: float) -> Iterator[float]:
    """Yield the milliseconds between tokens of one turn that came after a moment."""
    for times in turns:
        for before, after in itertools.pairwise(times):
            if after >= begun_s:
                yield (after - before) * 1e3


async def _decode(
    url: str, index: int, has_begun: asyncio.Event, is_over: asyncio.Event
) -> list[list[float]]:
    """Return when each piece of each turn came, in seconds, until the round is over: a token, or
    several where the server or this process was late."""
    sampling = {"temperature": 0, "max_tokens": _NUM_OUTPUTS, "ignore_eos": True}
    turns: list[list[float]] = []
    while not is_over.is_set():
        session, num_tokens = await connect(url), 0
        while num_tokens < _MAX_CONTEXT and not is_over.is_set():
            turn, times = await session.start(_tokens(index, 16), sampling=sampling), list[float]()
            async for event in turn:
                if isinstance(event, TurnText):
                    times.append(event.received_s)
                    has_begun.set()
            await turn.result()
            turns.append(times)
            num_tokens += _NUM_OUTPUTS + 16
        await session.close()
    return turns


def _tokens(number: int, num_tokens: int) -> TokenInput:
    """Return ordinary token ids, of which no two numbers share a page."""
    rng = random.Random(number)
    return TokenInput(tuple(rng.randrange(*TOKEN_IDS) for _ in range(num_tokens)))


async def _prompt(url: str, number: int, num_tokens: int) -> float:
    """Return the milliseconds to the first token behind a long prompt of a new session."""
    session: SessionClient = await connect(url)
    begun_s = time.monotonic()
    prompt, sampling = _tokens(1_000 + number, num_tokens), {"temperature": 0, "max_tokens": 1}
    turn = await session.start(prompt, sampling=sampling)
    await turn.result()
    waited_ms = (time.monotonic() - begun_s) * 1e3
    await session.close()
    return waited_ms
