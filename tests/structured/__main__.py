"""`make structured`: answers to random JSON schemas are valid, and the same however they are made.

The model is the embedded one at a high temperature: it says what the schemas let it. The same
turns run on servers that differ in overlap, chunks, drafts and retractions, and on one whose engine
is killed in the middle of them. Then hostile grammars arrive beside a conversation.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import jsonschema

from session_server.client import connect
from session_server.client.errors import Refused
from session_server.local_server import LocalServer
from tests.rig.processes import engine_pid
from tests.rig.recovery import assert_books_balance
from tests.structured.schemas import schema_of
from tests.text.test_grammar_worker import HOSTILE

AT_A_TIME = 16
FLAGS = ["--log-level", "error", "--threads", "1", "--max-total-tokens", "65536"]
WAYS = {
    "overlap": [],
    "no overlap, chunks of 8": ["--disable-overlap-schedule", "--chunked-prefill-size", "8"],
    "drafts from the text": ["--speculative-algorithm", "ngram"],
    "drafts, retracted every 3rd forward": [
        *("--speculative-algorithm", "ngram", "--debug-retract-interval", "3")
    ],
    "retracted every 5th forward": ["--debug-retract-interval", "5"],
}
GRACE_MS = 50.0
"""What hostile grammars may add to the time between two tokens of others."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; return 1 if anything does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.structured", description=__doc__)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    schemas = [schema_of(Random(args.seed * 1_000_003 + i)) for i in range(args.schemas)]
    first: list[str] | None = None
    for name, flags in WAYS.items():
        began = time.monotonic()
        with LocalServer([*FLAGS, *flags]) as server:
            texts = asyncio.run(answers(server.url, schemas))
            assert_books_balance(server.url)
        num_wrong = sum(not is_valid(*each) for each in zip(texts, schemas, strict=True))
        first = texts if first is None else first
        num_other = sum(a != b for a, b in zip(texts, first, strict=True))
        took = time.monotonic() - began
        print(f"{name}: {len(texts)} answers, {num_wrong} invalid, {num_other} other, {took:.0f} s")
        if num_wrong or num_other:
            return 1
    assert first is not None
    few = min(len(schemas), 64)
    with LocalServer(FLAGS) as server:
        texts = asyncio.run(killed(server, schemas[:few]))
        print(f"engine killed under {few} turns: {'same' if texts == first[:few] else 'OTHER'}")
        free_ms, beside_ms = asyncio.run(hostile(server.url))
        print(f"hostile grammars: a token takes up to {beside_ms:.0f} ms, {free_ms:.0f} without")
    return int(texts != first[:few] or beside_ms > free_ms + GRACE_MS)


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON that fits a schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"{text!r} does not fit {json.dumps(schema)}: {str(error).splitlines()[0]}")
        return False
    return True


async def answers(url: str, schemas: Sequence[dict[str, Any]]) -> list[str]:
    """The answers to all schemas, so many at a time."""
    gate = asyncio.Semaphore(AT_A_TIME)

    async def one(index: int) -> str:
        async with gate, await connect(url) as session:
            return await answer(session, index, schemas[index])

    return list(await asyncio.gather(*(one(index) for index in range(len(schemas)))))


async def answer(session: Any, index: int, schema: dict[str, Any]) -> str:
    """The answer of one session to one schema; again, where the engine was killed under it."""
    sampling = {"seed": index, "temperature": 1.5, "max_tokens": 1500, "json_schema": schema}
    while True:
        try:
            done = await session.ask(f"Number {index}.", sampling=sampling)
        except Refused as error:
            if error.code != "engine_unavailable":
                raise
            await asyncio.sleep(0.2)
            continue
        if done.status == "completed":
            assert done.finish_reason == "stop", (index, schema, done.text)
            return str(done.text)
        assert done.error is not None
        assert done.error.code == "engine_restarting", done.error


async def killed(server: LocalServer, schemas: Sequence[dict[str, Any]]) -> list[str]:
    """The answers where the engine is killed while it writes them."""
    running = asyncio.create_task(answers(server.url, schemas))
    await asyncio.sleep(0.7)
    os.kill(engine_pid(server), signal.SIGKILL)
    return await running


async def hostile(url: str) -> tuple[float, float]:
    """The longest of the usual times between two tokens, alone and beside hostile grammars."""

    async def gaps() -> float:
        sampling = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}
        async with await connect(url) as session:
            turn = await session.start("Hello.", sampling=sampling)
            times = [time.monotonic() async for _ in turn]
        waits = [(b - a) * 1e3 for a, b in itertools.pairwise(times[1:])]
        return statistics.quantiles(waits, n=100)[98]

    async def attack() -> None:
        codes: list[str] = []
        async with await connect(url) as session:
            for grammar in HOSTILE.values():
                key = "grammar" if grammar.kind == "lark" else grammar.kind
                try:
                    await session.ask("Hello.", sampling={key: grammar.text, "max_tokens": 20})
                except Refused as error:
                    codes.append(error.code)
        assert codes == ["invalid_request"] * len(HOSTILE), codes

    await gaps()
    free_ms = await gaps()
    attacking = asyncio.create_task(attack())
    beside_ms = await gaps()
    await attacking
    return free_ms, beside_ms


if __name__ == "__main__":
    sys.exit(main())
