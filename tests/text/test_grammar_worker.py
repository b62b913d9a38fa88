"""Grammars are checked where they can do no harm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest

from session_server.core.errors import InvalidRequest, ServerBusy
from session_server.core.sampling import Grammar
from session_server.text.grammar_worker import MAX_KNOWN, CheckLimits, GrammarWorker
from tests.depth import at_depth
from tests.text.embedded import EOS_TOKEN_IDS, TOKENIZER

_NUM_RULES = 4000

HOSTILE = {
    "a chain of rules that overflows a stack": Grammar(
        "lark",
        "\n".join(
            [
                "start: " + " | ".join(f"r{i}" for i in range(_NUM_RULES)),
                *(f'r{i}: "x" r{(i + 1) % _NUM_RULES} "y{i}"' for i in range(_NUM_RULES)),
            ]
        ),
    ),
    "a remainder with a million states": Grammar(
        "json_schema", '{"type": "integer", "multipleOf": 1000003}'
    ),
    "nested too deep": Grammar("json_schema", '{"items":' * 9000 + "{}" + "}" * 9000),
    "references in a circle": Grammar(
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            }
        ),
    ),
    "thousands of optional properties": Grammar(
        "json_schema",
        json.dumps(
            {"type": "object", "properties": {f"p{i}": {"maxLength": 9} for i in range(4000)}}
        ),
    ),
    "every combination of alternatives": Grammar(
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}{j}": {"type": "null"}}} for j in range(5)]}
                    for i in range(12)
                ]
            }
        ),
    ),
}
BAD = {
    "a schema of no type": Grammar("json_schema", '{"type": "objec"}'),
    "no JSON": Grammar("json_schema", '{"type":'),
    "a keyword that would not be held": Grammar("json_schema", '{"not": {}}'),
    "a reference to nothing": Grammar("json_schema", '{"$ref": "#/$defs/a"}'),
    "a reference to another machine": Grammar("json_schema", '{"$ref": "http://localhost/a"}'),
    "an open group": Grammar("regex", "(a"),
    "a rule that is not there": Grammar("lark", 'start: "a" b'),
    "a class of no characters": Grammar("regex", r"[^\x00-\U0010FFFF]"),
}


@contextlib.asynccontextmanager
async def checker(limits: CheckLimits | None = None) -> AsyncIterator[GrammarWorker]:
    worker = GrammarWorker(TOKENIZER, EOS_TOKEN_IDS, limits)
    try:
        yield worker
    finally:
        await worker.close()


def test_what_cannot_be_compiled_is_refused_and_the_next_is_checked() -> None:
    async def check() -> None:
        async with checker() as worker:
            assert worker.pid is None, "it starts with the first grammar"
            for name in at_depth((*BAD, *list(HOSTILE)[:3]), proof=(*BAD, *HOSTILE)):
                grammar = {**BAD, **HOSTILE}[name]
                with pytest.raises(InvalidRequest) as refused:
                    await worker.check(grammar)
                assert refused.value.param == "grammar", name
                assert len(refused.value.message) < 400
                assert not worker.knows(grammar)
            good = Grammar("json_schema", '{"type": "object"}')
            await worker.check(good)
            assert worker.knows(good)

    asyncio.run(check())


def test_a_grammar_that_was_checked_needs_no_process() -> None:
    async def check() -> None:
        async with checker() as worker:
            grammar = Grammar("regex", "a+")
            await worker.check(grammar)
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)
            await worker.check(grammar)
            assert worker.knows(grammar)
            assert not worker.knows(Grammar("lark", "a+")), "another kind is another grammar"

    asyncio.run(check())


def test_a_process_that_is_stopped_is_not_blamed_on_the_grammar() -> None:
    async def check() -> None:
        async with checker(CheckLimits(deadline_s=0.5)) as worker:
            await worker.check(Grammar("regex", "a+"))
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)
            with pytest.raises(ServerBusy, match=r"longer than 0\.5 s"):
                await worker.check(Grammar("regex", "b+"))
            await worker.check(Grammar("regex", "b+"))

    asyncio.run(check())


def test_it_remembers_so_many_grammars() -> None:
    async def check() -> None:
        async with checker() as worker:
            grammars = [Grammar("regex", f"a{i}") for i in range(MAX_KNOWN + 1)]
            for grammar in grammars[:-1]:
                await worker.check(grammar)
            await worker.check(grammars[0])
            await worker.check(grammars[-1])
            assert worker.knows(grammars[0]), "used since"
            assert not worker.knows(grammars[1]), "used longest ago"

    asyncio.run(check())
