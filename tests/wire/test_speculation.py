"""Servers with drafts say what one without says, over sockets, sampled and greedy alike."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.client import connect
from session_server.demo import MODEL_DIR
from session_server.demo.corpus import dialogue
from session_server.local_server import LocalServer
from tests.depth import at_depth
from tests.rig.recovery import assert_books_balance
from tests.wire.conftest import CONTEXT_LEN, SMALL

NUM_TURNS = at_depth(4, proof=6)
SAMPLINGS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.2, "top_p": 0.95, "seed": 3},
    "held back": {"temperature": 0.7, "seed": 5, "min_tokens": 12, "frequency_penalty": 0.4},
    "stopped": {"temperature": 0, "stop": ["is"]},
}
GUESSING = {
    "ngram": ["--speculative-algorithm", "ngram", "--speculative-num-draft-tokens", "8"],
    "its own draft model": [
        *("--speculative-algorithm", "model", "--speculative-num-draft-tokens", "3"),
        *("--speculative-draft-model-path", str(MODEL_DIR)),
    ],
}


async def talk(url: str, sampling: dict[str, object], seed: int) -> list[tuple[str, int, str]]:
    """A dialogue's answers, their lengths, and why they ended."""
    async with await connect(url) as session:
        results = [
            await session.ask(exchange.user, sampling={"max_tokens": 40, **sampling})
            for exchange in dialogue(seed, NUM_TURNS).turns
        ]
    assert all(result.status == "completed" for result in results)
    return [(r.text, r.usage.output_tokens, str(r.finish_reason)) for r in results]


async def talk_all(url: str) -> dict[str, list[tuple[str, int, str]]]:
    """Every way to sample, all at the same time."""
    said = await asyncio.gather(*(talk(url, s, i) for i, s in enumerate(SAMPLINGS.values())))
    return dict(zip(SAMPLINGS, said, strict=True))


def test_drafting_shows_in_the_counters_and_nowhere_else(plain: LocalServer) -> None:
    expected = asyncio.run(talk_all(plain.url))
    reasons = {reason for said in expected.values() for _, _, reason in said}
    assert reasons == {"stop", "length"}
    for flags in GUESSING.values():
        with LocalServer([*SMALL, *flags]) as server:
            assert asyncio.run(talk_all(server.url)) == expected
            drafted, accepted = draft_counts(server.url)
            assert 0 < accepted <= drafted
            assert_books_balance(server.url)
            assert server.stop() == 0
    assert draft_counts(plain.url) == (0, 0)


def draft_counts(url: str) -> tuple[int, int]:
    """Tokens guessed and guessed right, from the metrics."""
    lines = httpx.get(f"{url}/metrics", timeout=30.0).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    kinds = ("draft", "accepted")
    drafted, accepted = (
        values[f"session_server_spec_decode_num_{kind}_tokens_total"] for kind in kinds
    )
    return int(float(drafted)), int(float(accepted))


@pytest.mark.timeout(120)
def test_a_draft_model_that_does_not_fit_keeps_the_server_from_starting(tmp_path: Path) -> None:
    draft = write_random_checkpoint(tmp_path, RandomModel(max_position_embeddings=CONTEXT_LEN // 2))
    flags = ["--speculative-algorithm", "model", "--speculative-draft-model-path", str(draft)]
    server = LocalServer([*SMALL, *flags])
    with pytest.raises(Exception, match="cannot draft for the one in"), server:
        pass
    assert "Traceback" not in server.last_lines
