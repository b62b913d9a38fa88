"""Measure speculation: tokens per forward and speed of an answer, with and without drafts.

Servers that differ only in their drafts run side by side: the embedded model, overlap on, drafts
from the session's own text. Workloads and servers are interleaved, round by round, and ratios are
taken within a round, so that a machine whose speed drifts affects them alike. Answers are greedy,
and compared: drafts must not change them.

`dialogues` are those of the demo, one after the other; `crowd` runs all of them at the same time,
where rows share a forward and a rejected draft slows the others; `repeated text` continues a
passage that has occurred several times.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from session_server.client import SessionClient, TurnResult, connect
from session_server.core.session_events import TextInput, TurnInput
from session_server.demo.corpus import dialogue
from session_server.local_server import LocalServer

WORKLOADS: Final = ("dialogues", "crowd", "repeated text")
MAX_ANSWER_TOKENS: Final = 48
_FIRST_SEED: Final = 9_000

_PASSAGE: Final = (
    "The old king asked the small bird about the river. The river runs to the sea, said the bird, "
    "and the sea keeps every name it hears. Then tell it mine, said the king. "
)
_NUM_PASSAGES: Final = 4


@dataclass(frozen=True, slots=True)
class SpeculationWorkload:
    """Configure the workloads.

    `drafts`: the variants besides 0. `num_sessions` sessions of `num_turns` turns run in each
    workload and round; a turn of repeated text generates `num_repeated` tokens.
    """

    drafts: tuple[int, ...] = (2, 4, 8)
    num_rounds: int = 7
    num_sessions: int = 6
    num_turns: int = 12
    num_repeated: int = 96

    @property
    def variants(self) -> tuple[int, ...]:
        """Return all numbers of drafts, 0 first."""
        return (0, *self.drafts)

    @property
    def num_visits(self) -> int:
        """Return how many times a workload runs on a server."""
        return len(WORKLOADS) * self.num_rounds * len(self.variants)


@dataclass(frozen=True, slots=True)
class Visit:
    """Add up the turns of one workload on one server.

    `num_decoded`: tokens after the first of each turn, which took `decode_s`.
    """

    num_outputs: int
    num_forwards: int
    num_decoded: int
    decode_s: float
    answers: tuple[str, ...]

    @classmethod
    def of(cls, turns: Sequence[TurnResult]) -> Visit:
        """Add up turns that have all completed."""
        assert all(turn.status == "completed" for turn in turns), "a turn failed"
        return cls(
            num_outputs=sum(turn.usage.output_tokens for turn in turns),
            num_forwards=sum(turn.timings.num_steps for turn in turns),
            num_decoded=sum(max(0, turn.usage.output_tokens - 1) for turn in turns),
            decode_s=sum(turn.timings.decode_ms for turn in turns) / 1e3,
            answers=tuple(turn.text for turn in turns),
        )

    @property
    def tokens_per_forward(self) -> float:
        """Return output tokens per forward, the forwards of prompts included."""
        return self.num_outputs / self.num_forwards

    @property
    def tokens_per_s(self) -> float:
        """Return decoded tokens per second, counted from the first token of each turn."""
        return self.num_decoded / self.decode_s


def measure_speculation(
    load: SpeculationWorkload, *, on_visit: Callable[[], None]
) -> dict[str, Any]:
    """Return medians over the rounds, by workload and drafts; call `on_visit` after each run."""
    with contextlib.ExitStack() as stack:
        urls = {n: stack.enter_context(LocalServer(_flags(n))).url for n in load.variants}
        return asyncio.run(_measure(urls, load, on_visit))


async def _measure(
    urls: Mapping[int, str], load: SpeculationWorkload, on_visit: Callable[[], None]
) -> dict[str, Any]:
    visits: dict[str, dict[int, list[Visit]]] = {
        workload: {num_drafts: [] for num_drafts in urls} for workload in WORKLOADS
    }
    for number in range(load.num_rounds):
        for workload in WORKLOADS:
            # Each round starts with another server: the first one runs on a rested machine.
            order = [load.variants[(number + i) % len(urls)] for i in range(len(urls))]
            for num_drafts in order:
                turns = await _visit(urls[num_drafts], workload, load, number)
                visits[workload][num_drafts].append(Visit.of(turns))
                on_visit()
    workloads = {workload: _figures(by_drafts) for workload, by_drafts in visits.items()}
    return {
        "num_rounds": load.num_rounds,
        "num_sessions": load.num_sessions,
        "workloads": workloads,
    }


def _figures(visits: Mapping[int, Sequence[Visit]]) -> dict[str, Any]:
    figures = {}
    for num_drafts, rounds in visits.items():
        pairs = list(zip(rounds, visits[0], strict=True))
        ratios = [visit.tokens_per_s / plain.tokens_per_s for visit, plain in pairs]
        figures[str(num_drafts)] = {
            "tokens_per_forward": statistics.median(visit.tokens_per_forward for visit in rounds),
            "tokens_per_s": statistics.median(visit.tokens_per_s for visit in rounds),
            "speed_ratio": statistics.median(ratios),
            "speed_ratio_range": [min(ratios), max(ratios)],
            "num_outputs": sum(visit.num_outputs for visit in rounds),
            "different_answers": sum(
                one != other
                for visit, plain in pairs
                for one, other in zip(visit.answers, plain.answers, strict=True)
            ),
        }
    return figures


async def _visit(
    url: str, workload: str, load: SpeculationWorkload, number: int
) -> list[TurnResult]:
    """Run the sessions of one workload and round; the same ones on every server."""
    if workload == "repeated text":
        talks = [_continue(url, load) for _ in range(load.num_sessions)]
    else:
        first_seed = _FIRST_SEED + number * load.num_sessions
        seeds = range(first_seed, first_seed + load.num_sessions)
        talks = [_converse(url, seed, load.num_turns) for seed in seeds]
    if workload == "crowd":
        return [turn for turns in await asyncio.gather(*talks) for turn in turns]
    return [turn for talk in talks for turn in await talk]


async def _converse(url: str, seed: int, num_turns: int) -> list[TurnResult]:
    async with await connect(url) as session:
        return [
            await _ask(session, exchange.user, max_tokens=MAX_ANSWER_TOKENS)
            for exchange in dialogue(seed, num_turns).turns
        ]


async def _continue(url: str, load: SpeculationWorkload) -> list[TurnResult]:
    async with await connect(url) as session:
        passages = TextInput(_PASSAGE * _NUM_PASSAGES)
        return [await _ask(session, passages, max_tokens=load.num_repeated, ignore_eos=True)]


async def _ask(session: SessionClient, content: str | TurnInput, **sampling: object) -> TurnResult:
    return await session.ask(content, sampling={"temperature": 0, **sampling})


def _flags(num_drafts: int) -> list[str]:
    quiet = ["--log-level", "warning"]
    if num_drafts == 0:
        return quiet
    drafting = ["--speculative-algorithm", "ngram"]
    return [*quiet, *drafting, "--speculative-num-draft-tokens", str(num_drafts)]
