"""What a random model says behind its thoughts fits, and is the same however it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from session_server.local_server import LocalServer
from tests.depth import at_depth
from tests.oracle.checkpoints import write_checkpoint
from tests.rig.recovery import assert_books_balance
from tests.text.local_text import load_local_text
from tests.text.tiny_models import write_model
from tests.wire.conftest import FLAGS

NUM_SEEDS = 5
NUM_THOUGHTS = at_depth(3, proof=5)
ROOM = ["--max-total-tokens", "16384"]
CHUNKED = ["--disable-overlap-schedule", "--chunked-prefill-size", "8"]
DISTURBED = ["--speculative-algorithm", "ngram", "--debug-retract-interval", "3"]
WAYS = at_depth(
    ([], [*CHUNKED, *DISTURBED]), proof=([], CHUNKED, DISTURBED, [*CHUNKED, *DISTURBED])
)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
Answer = dict[str, Any]


def read(answer: Answer) -> str:
    """The JSON text that an answer, or its only call, must fit."""
    calls = answer.get("tool_calls")
    text: str = calls[0]["function"]["arguments"] if calls else answer["content"]
    return text


@pytest.mark.parametrize("kind", ["lfm2", "deepseek", "thinking_tools"])
def test_a_random_model_calls_or_answers_in_the_form(tmp_path: Path, kind: str) -> None:
    model_dir = tmp_path / "model"
    write_checkpoint("qwen3", model_dir, num_hidden_layers=1, vocab_size=448)
    tokenizer = load_local_text(write_model(model_dir, kind)).tokenizer
    # It calls about as often as not, and says little before.
    marks = {"<think>": -20.0, "<": 3.0, "<｜tool▁calls▁begin｜>": 4.0}
    bias = {str(tokenizer.token_to_id(mark)): by for mark, by in marks.items()}
    one = {"tools": [TOOL], "parallel_tool_calls": False}
    asked = [one | {"response_format": FORM}, one | {"tool_choice": "required"}]
    said = answers(model_dir, [], bias, asked)
    for answer in said:
        jsonschema.validate(json.loads(read(answer)), SCHEMA)
    called = [bool(answer.get("tool_calls")) for answer in said]
    assert any(called[:NUM_SEEDS])
    assert not all(called[:NUM_SEEDS])
    assert all(called[NUM_SEEDS:])


@pytest.mark.parametrize("kind", ["thinking", "thinking_tools"])
def test_what_follows_a_thought_fits(tmp_path: Path, kind: str) -> None:
    """The first template begins the thought, with the second the model may."""
    model_dir = tmp_path / "model"
    write_checkpoint("qwen3", model_dir, num_hidden_layers=1, vocab_size=448)
    tokenizer = load_local_text(write_model(model_dir, kind)).tokenizer
    bias = {str(tokenizer.token_to_id(mark)): 4.0 for mark in ("<think>", "</think>")}
    asked: list[dict[str, Any]] = [{"response_format": FORM}]
    if kind == "thinking_tools":
        asked.append({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False})
    said, *others = [
        answers(model_dir, flags, bias, asked, num_seeds=NUM_THOUGHTS) for flags in WAYS
    ]
    assert all(other == said for other in others)
    for answer in said:
        jsonschema.validate(json.loads(read(answer)), SCHEMA)
    assert sum(bool(answer.get("reasoning_content")) for answer in said) > NUM_THOUGHTS // 2


def answers(
    model_dir: Path,
    flags: list[str],
    bias: dict[str, float],
    asked: list[dict[str, Any]],
    *,
    num_seeds: int = NUM_SEEDS,
) -> list[Answer]:
    """The answers of a server with these flags; ids of calls are left out."""
    said: list[Answer] = []
    with (
        LocalServer(["--model-path", str(model_dir), *FLAGS, *ROOM, *flags]) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60.0) as http,
    ):
        for options in asked:
            for seed in range(num_seeds):
                hello = [{"role": "user", "content": "Hello."}]
                body = {"messages": hello, "seed": seed, "max_tokens": 600, "logit_bias": bias}
                answer = http.post("/v1/chat/completions", json=body | options)
                choice = answer.raise_for_status().json()["choices"][0]
                assert choice["finish_reason"] in ("stop", "tool_calls")
                message = choice["message"]
                for call in message.get("tool_calls") or ():
                    del call["id"]
                said.append(message)
        assert_books_balance(server.url)
    return said
