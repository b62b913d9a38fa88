"""Compiled grammars are kept within a bound, and the estimates of their size hold."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.grammar import GrammarCompiler, compiled_bytes
from session_server.core.sampling import MAX_GRAMMAR_BYTES, Grammar
from session_server.runner.grammar_cache import MAX_CACHED_BYTES, GrammarCache
from tests.text.embedded import EOS_TOKEN_IDS, TOKENIZER

SOURCE = TOKENIZER.backend_tokenizer.to_str()
COMPILER = GrammarCompiler(SOURCE, eos_token_ids=EOS_TOKEN_IDS)


def test_the_latest_used_are_kept_up_to_the_bound() -> None:
    grammars = [Grammar("regex", f"a{i}") for i in range(4)]
    each = compiled_bytes(grammars[0])
    cache = GrammarCache(COMPILER, 3 * each)
    first = [cache.compile(grammar) for grammar in grammars[:3]]
    assert cache.num_bytes == 3 * each
    assert cache.compile(grammars[0]) is first[0]
    cache.compile(grammars[3])
    assert cache.num_bytes == 3 * each
    assert cache.compile(grammars[0]) is first[0]
    assert cache.compile(grammars[2]) is first[2]
    assert cache.compile(grammars[1]) is not first[1], "it was used longest ago"


def test_one_that_alone_exceeds_the_bound_is_compiled_and_not_kept() -> None:
    cache = GrammarCache(COMPILER, 1)
    assert cache.compile(Grammar("regex", "a")).matcher.is_accepting() is False
    assert cache.num_bytes == 0
    assert compiled_bytes(Grammar("regex", "a" * MAX_GRAMMAR_BYTES)) < MAX_CACHED_BYTES


def test_a_failure_is_not_kept() -> None:
    cache = GrammarCache(COMPILER)
    with pytest.raises(InvalidRequest):
        cache.compile(Grammar("regex", "("))
    assert cache.num_bytes == 0


def test_a_model_without_an_end_takes_no_grammar() -> None:
    compiler = GrammarCompiler(SOURCE, eos_token_ids=())
    with pytest.raises(UnsupportedOperation, match="no token that ends"):
        compiler.compile(Grammar("regex", "a"))


def test_a_text_is_bounded_in_bytes() -> None:
    with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR_BYTES)):
        COMPILER.compile(Grammar("regex", "\u20ac" * (MAX_GRAMMAR_BYTES // 3 + 1)))


@pytest.mark.parametrize("kind", ["alternatives", "enum", "properties", "short"])
def test_a_compiled_grammar_takes_no_more_than_the_estimate(kind: str) -> None:
    texts = {
        "alternatives": Grammar("regex", "|".join(f"word{i}x{i * 7}" for i in range(7000))),
        "enum": Grammar("json_schema", json.dumps({"enum": [f"value {i}" for i in range(8000)]})),
        "properties": Grammar(
            "json_schema",
            json.dumps(
                {
                    "type": "object",
                    "properties": {f"p{i}": {"type": "string"} for i in range(200)},
                    "required": [f"p{i}" for i in range(200)],
                }
            ),
        ),
        "short": Grammar("regex", "[a-z]{1,9}"),
    }
    grammar = texts[kind]
    COMPILER.compile(grammar)  # what is allocated once
    gc.collect()
    before = _resident_bytes()
    copies = [COMPILER.compile(grammar) for _ in range(4)]
    assert _resident_bytes() - before <= len(copies) * compiled_bytes(grammar)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
