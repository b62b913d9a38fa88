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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from session_server.bench.sheet import Sheet
from session_server.client import TurnResult, connect
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
    def total_steps(self) -> int:
        """Return how many times a workload runs on a server."""
        return len(WORKLOADS) * self.num_rounds * len(self.variants)


class Visit(NamedTuple):
    """Add up the turns of one workload on one server."""

    tokens_per_forward: float
    """The forwards of prompts are included."""
    tokens_per_s: float
    """From the first token of each turn on."""
    num_outputs: int
    answers: tuple[str, ...]


def measure(load: SpeculationWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Return medians over the rounds, by workload and drafts; call `on_step` after each run."""
    with contextlib.ExitStack() as stack:
        urls = {n: stack.enter_context(LocalServer(_flags(n))).url for n in load.variants}
        return asyncio.run(_visit_all(urls, load, on_step))


async def _visit_all(
    urls: Mapping[int, str], load: SpeculationWorkload, on_step: Callable[[], None]
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
                visits[workload][num_drafts].append(_add_up(turns))
                on_step()
    return {
        "num_rounds": load.num_rounds,
        "num_sessions": load.num_sessions,
        "workloads": {
            workload: {str(n): _figures(rounds, by_drafts[0]) for n, rounds in by_drafts.items()}
            for workload, by_drafts in visits.items()
        },
    }


SHEETS: Final = (
    Sheet(
        "n-gram drafts, medians of {num_rounds} rounds",
        lambda report: report["workloads"],
        ("", "drafts"),
        {
            "tokens / forward": "{tokens_per_forward:.2f}",
            "tokens / s": "{tokens_per_s:.0f}",
            "speed ratio": "{speed_ratio:.2f}",
            "range": "{speed_ratio_range[0]:.2f}-{speed_ratio_range[1]:.2f}",
            "different": "{different_answers}",
        },
    ),
)


def _add_up(turns: Sequence[TurnResult]) -> Visit:
    assert all(turn.status == "completed" for turn in turns), "a turn failed"
    num_outputs = sum(turn.usage.output_tokens for turn in turns)
    num_decoded = sum(max(0, turn.usage.output_tokens - 1) for turn in turns)
    return Visit(
        tokens_per_forward=num_outputs / sum(turn.timings.num_steps for turn in turns),
        tokens_per_s=num_decoded / sum(turn.timings.decode_ms for turn in turns) * 1e3,
        num_outputs=num_outputs,
        answers=tuple(turn.text for turn in turns),
    )


def _figures(rounds: Sequence[Visit], plain: Sequence[Visit]) -> dict[str, Any]:
    pairs = list(zip(rounds, plain, strict=True))
    ratios = [visit.tokens_per_s / beside.tokens_per_s for visit, beside in pairs]
    return {
        "tokens_per_forward": statistics.median(visit.tokens_per_forward for visit in rounds),
        "tokens_per_s": statistics.median(visit.tokens_per_s for visit in rounds),
        "speed_ratio": statistics.median(ratios),
        "speed_ratio_range": [min(ratios), max(ratios)],
        "num_outputs": sum(visit.num_outputs for visit in rounds),
        "different_answers": sum(
            one != other
            for visit, beside in pairs
            for one, other in zip(visit.answers, beside.answers, strict=True)
        ),
    }


async def _visit(
    url: str, workload: str, load: SpeculationWorkload, number: int
) -> list[TurnResult]:
    """Run the sessions of one workload and round; the same ones on every server."""
    first_seed = _FIRST_SEED + number * load.num_sessions
    seeds = range(first_seed, first_seed + load.num_sessions)
    if workload == "repeated text":
        passages = [TextInput(_PASSAGE * _NUM_PASSAGES)]
        lengths = {"max_tokens": load.num_repeated, "ignore_eos": True}
        talks = [_converse(url, passages, lengths) for _ in seeds]
    else:
        lengths = {"max_tokens": MAX_ANSWER_TOKENS}
        dialogues = (dialogue(seed, load.num_turns).turns for seed in seeds)
        talks = [_converse(url, [turn.user for turn in turns], lengths) for turns in dialogues]
    if workload == "crowd":
        return [turn for turns in await asyncio.gather(*talks) for turn in turns]
    return [turn for talk in talks for turn in await talk]


async def _converse(
    url: str, contents: Iterable[str | TurnInput], sampling: Mapping[str, object]
) -> list[TurnResult]:
    greedy = {"temperature": 0, **sampling}
    async with await connect(url) as session:
        return [await session.ask(content, sampling=greedy) for content in contents]


def _flags(num_drafts: int) -> list[str]:
    quiet = ["--log-level", "warning"]
    if num_drafts == 0:
        return quiet
    drafting = ["--speculative-algorithm", "ngram"]
    return [*quiet, *drafting, "--speculative-num-draft-tokens", str(num_drafts)]
