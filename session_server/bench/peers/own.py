"""Measure what our sessions cost where no peer is to be compared with: overhead, growth, memory."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from session_server.bench import kept
from session_server.bench.checkpoint import Mixer, RandomModel, write_random_checkpoint
from session_server.bench.peers.cells import Figure, figure_of
from session_server.bench.peers.models import SHAPES
from session_server.bench.peers.ours import OurConversation, open_conversation
from session_server.bench.peers.rounds import Tokens
from session_server.local_server import LocalServer

NUM_TALKERS: Final = 16
_NUM_TALKED: Final = 128
_NUM_INPUT: Final = 16
_NUM_OUTPUT: Final = 8
_NUM_NEW: Final = 64
_MARGIN: Final = 4096
"""Tokens that a server holds besides the histories."""
_NUM_HOLDERS: Final = 8
_HELD_LEN: Final = 2000
_VOCAB_SIZE: Final = 1536


@dataclass(frozen=True, slots=True)
class OwnWorkload:
    """Configure how often each of our own costs is measured, and at which histories.

    `long_len`: of the overhead, which is measured on a model of two layers, beside which the caches
    of a CPU have room, and on `shape`. `kept_len`: of the time to the first token on `shape`, and
    of what a kept session is compared with.
    """

    num_rounds: int = 15
    long_len: int = 32_768
    kept_len: int = 8192
    shape: RandomModel = SHAPES["100m"]

    @property
    def total_steps(self) -> int:
        """Return the rounds of overhead, growth and talk, and the timed turns of `bench kept`."""
        return (3 + len(Mixer)) * self.num_rounds + self.kept_workload.total_steps

    @property
    def kept_workload(self) -> kept.KeptWorkload:
        """Return the load of `bench kept` that is reported here."""
        return kept.KeptWorkload(
            histories=(self.kept_len,), num_rounds=max(3, self.num_rounds // 3)
        )


def measure_own(load: OwnWorkload, *, on_step: Callable[[], None]) -> list[dict[str, Any]]:
    """Return each cost with its goal, in the order of the table."""
    with tempfile.TemporaryDirectory() as directory:
        costs: list[dict[str, Any]] = []
        for shape in (RandomModel(), load.shape):
            long = replace(shape, max_position_embeddings=load.long_len + _MARGIN)
            name = f"{shape.num_hidden_layers} layers"
            model = write_random_checkpoint(Path(directory) / name, long)
            with LocalServer(_flags(model, load.long_len + _MARGIN)) as server:
                overheads = asyncio.run(_overhead(server.url, load, on_step))
            costs += _overhead_figures(name, load.long_len, *overheads)
        model = write_random_checkpoint(Path(directory) / "held", RandomModel())
        with LocalServer(_flags(model, 8 * _MARGIN)) as server:
            held = asyncio.run(_held_over_needed(server.url))
        growth = {}
        for mixer in Mixer:
            model = write_random_checkpoint(Path(directory) / mixer.value, load.shape, mixer)
            with LocalServer(_flags(model, 2 * load.kept_len + _MARGIN)) as server:
                short_len = 0 if mixer is Mixer.FULL else load.kept_len // 8
                growth[mixer] = asyncio.run(
                    _first_token_growth(server.url, load, short_len, on_step)
                )
    resent = kept.measure(load.kept_workload, on_step=on_step)["histories"][str(load.kept_len)]
    with LocalServer(["--log-level", "warning"]) as server:
        talk = asyncio.run(_talk(server.url, load.num_rounds, on_step))
    short, eighth = (f"{length:,}" for length in (load.kept_len, load.kept_len // 8))
    return [
        *costs,
        _at_most(3.6, f"TTFT of 64 new tokens, history {short} over 0", growth[Mixer.FULL]),
        _at_most(1.05, f"the same with windows, {short} over {eighth}", growth[Mixer.WINDOW]),
        _at_most(1.05, f"the same with states, {short} over {eighth}", growth[Mixer.DELTA]),
        _at_least(1.2, f"resent as text over kept, {short}", resent["typed_over_kept"]),
        _at_least(1.2, f"resent as token ids over kept, {short}", resent["resent_over_kept"]),
        _at_least(55, f"prefilled anew over kept, {short}", resent["cold_over_kept"]),
        _at_least(4000, f"embedded model, {NUM_TALKERS} sessions, tokens/s", talk),
        _at_most(1.01, "KV bytes held over needed, pages of 16", held),
    ]


def _overhead_figures(
    model: str, long_len: int, first: _Overhead, token: _Overhead
) -> Iterator[dict[str, Any]]:
    long = f"{long_len:,}"
    yield _at_most(0.6, f"{model}: first token less its forward, ms", first.new_ms)
    yield _at_most(0.6, f"{model}: the same at history {long}, ms", first.long_ms)
    yield _at_most(
        1.10, f"{model}: a turn of one token less its forward, that history over 0", first.growth
    )
    yield _at_most(
        120,
        f"{model}: turn of {_NUM_OUTPUT} tokens less forwards, us per token",
        token.new_ms * 1e3,
    )
    yield _at_most(1.10, f"{model}: the same, history {long} over 0", token.growth)


def _at_most(goal: float, name: str, value: float) -> dict[str, Any]:
    return {"name": name, "value": value, "bound": "<=", "goal": goal, "met": value <= goal}


def _at_least(goal: float, name: str, value: float) -> dict[str, Any]:
    return {"name": name, "value": value, "bound": ">=", "goal": goal, "met": value >= goal}


class _Overhead(NamedTuple):
    """Hold what the client waits less the forwards that its turn reports, per token: medians behind
    a few tokens and at the long history."""

    new_ms: float
    long_ms: float

    @property
    def growth(self) -> float:
        """Return how many times as much it is at the long history."""
        return self.long_ms / self.new_ms


async def _overhead(url: str, load: OwnWorkload, on_step: Callable[[], None]) -> list[_Overhead]:
    """Return the overhead of turns of one token, then of `_NUM_OUTPUT`."""
    tokens = Tokens(_VOCAB_SIZE)
    long = await open_conversation(url)
    await long.prefill(tokens.draw(load.long_len, "long"))
    first: dict[str, list[float]] = {"long": [], "new": []}
    token: dict[str, list[float]] = {"long": [], "new": []}
    for number in range(load.num_rounds):
        new = await open_conversation(url)
        # Its first turn opens the session in the engine, which the long one's has done.
        await new.turn(tokens.draw(_NUM_INPUT, "first", number), 1)
        for figures, num_output in ((first, 1), (token, _NUM_OUTPUT)):
            for name, conversation in (("long", long), ("new", new)):
                figures[name].append(await _overhead_ms(conversation, tokens, number, num_output))
        await new.close()
        on_step()
    await long.close()
    return [
        _Overhead(statistics.median(each["new"]), statistics.median(each["long"]))
        for each in (first, token)
    ]


def _median_ratio(figures: Mapping[str, list[float]]) -> float:
    return statistics.median(figures["long"]) / statistics.median(figures["new"])


async def _overhead_ms(
    conversation: OurConversation, tokens: Tokens, number: int, num_output: int
) -> float:
    """Return what a turn takes besides its forwards, per token."""
    trace = await conversation.turn(tokens.draw(_NUM_INPUT, number, num_output), num_output)
    latency_ms = (trace.last_s - trace.begun_s) * 1e3
    return (latency_ms - float(conversation.last_end["timings"]["forward_ms"])) / num_output


async def _held_over_needed(url: str) -> float:
    """Return the KV that idle sessions, which share nothing, hold over what their tokens take."""
    tokens = Tokens(_VOCAB_SIZE)
    talks = [await open_conversation(url) for _ in range(_NUM_HOLDERS)]
    for number, conversation in enumerate(talks):
        await conversation.prefill(tokens.draw(_HELD_LEN + 37 * number, "held", number))
    async with httpx.AsyncClient(base_url=url) as http:
        memory = (await http.get("/v1/admin/memory")).raise_for_status().json()
    for conversation in talks:
        await conversation.close()
    sessions, page_size = memory["sessions"], memory["pools"]["full"]["page_size"]
    num_pages = sum(
        session[kind]["full"]
        for session in sessions
        for kind in ("private_pages", "protected_pages")
    )
    return float(num_pages * page_size / sum(session["committed_len"] for session in sessions))


async def _first_token_growth(
    url: str, load: OwnWorkload, short_len: int, on_step: Callable[[], None]
) -> float:
    """Return the time to the first token of 64 new ones with the whole history, over that with
    `short_len` tokens of it."""
    tokens = Tokens(_VOCAB_SIZE)
    long = await open_conversation(url)
    await long.turn(tokens.draw(load.kept_len, "kept"), 1)
    times: dict[str, list[float]] = {"long": [], "new": []}
    for number in range(load.num_rounds):
        new = await open_conversation(url)
        if short_len:
            # In a turn of one token, as those of the long one are: it is still to be computed.
            await new.turn(tokens.draw(short_len, "short", number), 1)
        for name, conversation in (("long", long), ("new", new)):
            trace = await conversation.turn(tokens.draw(_NUM_NEW, name, number), 1)
            times[name].append(trace.first_s - trace.begun_s)
        await new.close()
        on_step()
    await long.close()
    return _median_ratio(times)


async def _talk(url: str, num_rounds: int, on_step: Callable[[], None]) -> float:
    """Return the median tokens per second of many sessions that generate at once."""
    tokens = Tokens(_VOCAB_SIZE)
    speeds = []
    for number in range(num_rounds):
        talks = [await open_conversation(url) for _ in range(NUM_TALKERS)]
        turns = await asyncio.gather(
            *(
                each.turn(tokens.draw(_NUM_INPUT, number, i), _NUM_TALKED)
                for i, each in enumerate(talks)
            )
        )
        speeds.append(figure_of(Figure.TOKENS_PER_S, [turns]))
        await asyncio.gather(*(each.close() for each in talks))
        on_step()
    return statistics.median(speeds)


def _flags(model: Path, num_tokens: int) -> list[str]:
    return [
        *("--model-path", str(model), "--dtype", "float32", "--log-level", "warning"),
        *("--max-total-tokens", str(num_tokens)),
    ]
