"""A checkpoint that gives NaN for one token, on a real server: one turn fails, none else does."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from session_server.demo import MODEL_DIR
from session_server.local_server import LocalServer
from tests.rig.decisions import Decisions
from tests.rig.history import ENDS
from tests.rig.recovery import assert_books_balance
from tests.web.wire_client import http_client, open_wire
from tests.wire.conftest import SMALL

POISON = 700
"""A token whose embedding is NaN; it is in prompts only when a test puts it there."""

NUM_GOOD = 6
NUM_BAD = 3
NUM_TURNS = 12
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def poisoned_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with NaN in one embedding. Its output head is untied first: it would turn
    every logit of that token into NaN otherwise."""
    directory = tmp_path_factory.mktemp("model") / "poisoned"
    shutil.copytree(MODEL_DIR, directory)
    (weights,) = directory.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["lm_head.weight"] = tensors[EMBEDDING].copy()
    tensors[EMBEDDING][POISON] = np.nan
    save_file(tensors, weights)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return directory


def body(chance: Decisions, turn_id: str) -> dict[str, Any]:
    """A turn of words that harm nobody; the length may need several chunks of prefill."""
    sampling = {"temperature": 0, "max_tokens": chance.between(4, 24), "ignore_eos": True}
    length = chance.pick((3, 20, 70))
    input_ids = [chance.between(100, 600) for _ in range(length)]
    return {"turn_id": turn_id, "input_ids": input_ids, "sampling": sampling}


async def converse(url: str, number: int) -> list[list[int]]:
    """A conversation without poison: its answers."""
    chance, answers = Decisions(21, number), []
    async with open_wire(url) as wire:
        await wire.receive()
        total = 0
        for index in range(NUM_TURNS):
            asked = body(chance, f"t{index}")
            await wire.send("turn.create", **asked)
            end = await wire.until(*ENDS)
            assert end["type"] == "turn.completed", end
            assert end["usage"]["input_tokens"] == total + len(asked["input_ids"])
            total = end["usage"]["total_tokens"]
            answers.append(end["item"]["token_ids"])
    return answers


async def poisoned_conversation(url: str, number: int) -> tuple[list[list[int]], int]:
    """The same conversation with a poisoned turn before each of its turns: the answers to the good
    ones, and how many bad ones failed."""
    chance, poison, answers, num_failed = Decisions(21, number), Decisions(22, number), [], 0
    async with open_wire(url) as wire:
        await wire.receive()
        for index in range(NUM_TURNS):
            bad = body(poison, f"bad{index}")
            bad["input_ids"][poison.below(len(bad["input_ids"]))] = POISON
            await wire.send("turn.create", **bad)
            failed = await wire.until(*ENDS)
            assert failed["error"]["code"] == "numerical_error", failed
            assert failed["retryable"] is True
            num_failed += 1
            await wire.send("turn.create", **body(chance, f"t{index}"))
            end = await wire.until(*ENDS)
            assert end["type"] == "turn.completed", end
            answers.append(end["item"]["token_ids"])
    return answers, num_failed


@pytest.fixture(scope="module")
def server(poisoned_model: Path) -> Iterator[LocalServer]:
    flags = ["--model-path", str(poisoned_model), *SMALL, "--chunked-prefill-size", "32"]
    with LocalServer(flags) as running:
        yield running
        assert_books_balance(running.url)
        assert running.stop() == 0


def test_A13_NaN_in_one_row_fails_that_turn_and_is_in_nobody_elses_way(server: LocalServer) -> None:
    async def scenario() -> None:
        url = server.url
        alone = await asyncio.gather(*(converse(url, number) for number in range(NUM_GOOD)))
        beside, poisoned = await asyncio.gather(
            asyncio.gather(*(converse(url, number) for number in range(NUM_GOOD))),
            asyncio.gather(*(poisoned_conversation(url, n) for n in range(NUM_BAD))),
        )
        assert beside == alone
        for number, (answers, num_failed) in enumerate(poisoned):
            assert num_failed == NUM_TURNS
            assert answers == alone[number], "a failed turn leaves no trace"
        async with http_client(url) as http:
            metrics = (await http.get("/metrics")).text
            failures = f'turn_failures_total{{code="numerical_error"}} {NUM_BAD * NUM_TURNS}.0'
            assert failures in metrics

    asyncio.run(asyncio.wait_for(scenario(), 280))
