"""Measure what drafts of input save: the time to the first token after the last key.

Sentences are typed key by key, with corrections, into sessions of a server with a random model.
With drafts, every key is a `turn.draft`; without, nothing is sent before the turn. Both sessions
get the same sentences in turn, so a machine whose speed drifts affects them alike, and must give
the same tokens.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.bench.sheet import Sheet
from session_server.client import SessionClient, connect
from session_server.local_server import LocalServer

MODEL: Final = RandomModel(
    hidden_size=768,
    num_hidden_layers=14,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=2304,
)
"""100 million parameters."""

_TEXT: Final = """
where is my city and who lost the small red house near the river when it began to rain because
nobody had told them that the train would leave before the morning paper came
"""
_WORDS: Final = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class DraftsWorkload:
    """Configure `num_sentences` of `num_words`, each answered with `num_output` tokens.

    A session has `num_turns` of them. Keys come as fast as the socket takes them, the last one when
    the draft before it is computed, as from a typist whom the server follows; the turn comes right
    behind the last key, while its draft is being computed.
    """

    num_sentences: int = 200
    num_words: int = 40
    num_output: int = 4
    num_turns: int = 5

    @property
    def total_steps(self) -> int:
        """Return the sentences."""
        return self.num_sentences


def measure(load: DraftsWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Type all sentences, with drafts and without, on a server of their own."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_random_checkpoint(Path(directory), MODEL)
        flags = ["--model-path", str(model), "--max-total-tokens", "16384"]
        with LocalServer([*flags, "--log-level", "warning"]) as server:
            typed = asyncio.run(_type_all(server.url, load, on_step))
            memory = httpx.get(f"{server.url}/v1/admin/memory?full=1", timeout=60.0).json()
    return {
        "ttft_ms": _medians(typed),
        "same_tokens": all(each["is_same"] for each in typed),
        "drafted_share": statistics.mean(each["drafted_share"] for each in typed),
        "num_keys": sum(each["num_keys"] for each in typed),
        "violations": memory["checks"]["violations"],
        "held_pages": sum(
            pool["session_held"] + pool["active"] for pool in memory["pools"].values()
        ),
    }


SHEETS: Final = (
    Sheet(
        "first token after the last key of {num_keys} (median, ms); same tokens: {same_tokens}; "
        "ledger: {violations} violations, {held_pages} pages held at the end",
        lambda report: {"": report["ttft_ms"]},
        ("",),
        {
            "without drafts": "{without:.1f}",
            "with drafts": "{with_drafts:.1f}",
            "ratio": "{ratio:.3f}",
        },
    ),
)


async def _type_all(
    url: str, load: DraftsWorkload, on_step: Callable[[], None]
) -> list[dict[str, Any]]:
    rng, typed = random.Random(0), []
    for first in range(0, load.num_sentences, load.num_turns):
        async with await connect(url) as plain, await connect(url) as drafting:
            for _ in range(first, min(first + load.num_turns, load.num_sentences)):
                keys = tuple(_keys([rng.choice(_WORDS) for _ in range(load.num_words)], rng))
                typed.append(await _type_one(plain, drafting, keys, load.num_output))
                on_step()
    return typed


async def _type_one(
    plain: SessionClient, drafting: SessionClient, keys: Sequence[str], num_output: int
) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": num_output, "ignore_eos": True}
    draft_ids = [await drafting.draft(text) for text in keys[:-1]]
    await drafting.drafted(draft_ids[-1])
    # The plain one first: behind the other one's turn it would find the sentence in the tree.
    its = await plain.ask(keys[-1], sampling=sampling)
    await drafting.draft(keys[-1])
    mine = await drafting.ask(keys[-1], sampling=sampling)
    return {
        "is_same": mine.text == its.text,
        "num_keys": len(keys),
        "drafted_share": mine.usage.drafted_tokens / mine.usage.input_tokens,
        "with_drafts": mine.timings.ttft_ms,
        "without": its.timings.ttft_ms,
    }


def _keys(words: list[str], rng: random.Random) -> Iterator[str]:
    """Yield what stands there after each key: now and then a wrong word, taken back key by key."""
    said = ""
    for word in words:
        wrong = rng.choice(_WORDS) if rng.random() < 0.1 else ""
        for end in (*range(1, len(wrong) + 1), *range(len(wrong) - 1, -1, -1)):
            yield f"{said}{wrong[:end]}" or " "
        for end in range(1, len(word) + 1):
            yield f"{said}{word[:end]}"
        said = f"{said}{word} "


def _medians(typed: list[dict[str, Any]]) -> dict[str, float]:
    without = statistics.median(each["without"] for each in typed)
    with_drafts = statistics.median(each["with_drafts"] for each in typed)
    return {"without": without, "with_drafts": with_drafts, "ratio": with_drafts / without}
