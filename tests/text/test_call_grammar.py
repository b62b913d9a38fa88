"""Grammars of answers that must call, against what the same model writes and what is read of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.grammar import GrammarCompiler
from session_server.text.call_grammar import call_grammar
from session_server.text.model_text import ModelText
from tests.text.local_text import load_local_text
from tests.text.tiny_models import write_model

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (
    json.dumps({"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}),
    json.dumps({"type": "function", "function": {"name": "time"}}),
)
ONE = '{"name": "weather", "KEY": {"city": "Oslo"}}'
OTHER = '{"name": "time", "KEY": {}}'
FORMS = {
    "hermes": ("<tool_call>\n{}\n</tool_call>", "\n", "arguments"),
    "thinking_tools": ("<tool_call>\n{}\n</tool_call>", "\n", "arguments"),
    "mistral": ("{}", ", ", "arguments"),
    "llama31": ("{}", None, "parameters"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelText]:
    folder: Path = tmp_path_factory.mktemp("models")
    return {
        kind: load_local_text(write_model(folder / kind, kind)) for kind in (*FORMS, "deepseek")
    }


def matches(model: ModelText, text: str, *, name: str | None = None, is_one: bool = False) -> bool:
    """Whether an answer that must call may be this, and end with it."""
    ends = model.eos_token_ids
    compiler = GrammarCompiler(model.tokenizer.backend_tokenizer.to_str(), eos_token_ids=ends)
    grammar = call_grammar(model, TOOLS, name=name, is_one=is_one)
    matcher = compiler.compile(grammar).matcher.deep_copy()
    ids = model.tokenizer.encode_control(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(kind: str, *calls: str) -> str:
    form, between, key = FORMS[kind]
    each = [form.replace("{}", call.replace("KEY", key)) for call in calls]
    text = (between or "").join(each)
    return f"[TOOL_CALLS] [{text}]" if kind == "mistral" else text


@pytest.mark.parametrize("kind", FORMS)
def test_calls_of_the_tools_and_nothing_else(models: dict[str, ModelText], kind: str) -> None:
    model = models[kind]
    assert matches(model, written(kind, ONE))
    assert matches(model, written(kind, OTHER))
    assert matches(model, written(kind, ONE), name="weather")
    assert not matches(model, written(kind, OTHER), name="weather")
    assert not matches(model, written(kind, ONE.replace("city", "town")))
    assert not matches(model, written(kind, ONE.replace("weather", "other")))
    assert not matches(model, "Hello")
    if FORMS[kind][1] is not None:
        assert matches(model, written(kind, ONE, OTHER))
        assert not matches(model, written(kind, ONE, OTHER), is_one=True)


def test_what_cannot_be_asked_for_is_refused(models: dict[str, ModelText]) -> None:
    with pytest.raises(InvalidRequest):
        call_grammar(models["hermes"], TOOLS, name="other", is_one=False)
    with pytest.raises(InvalidRequest):
        call_grammar(models["hermes"], (), name=None, is_one=False)
    deep = TOOLS[0].replace('"object"', "[" * 5000 + "]" * 5000)
    with pytest.raises(InvalidRequest, match="too deeply"):
        call_grammar(models["hermes"], (deep,), name=None, is_one=False)
    with pytest.raises(UnsupportedOperation):
        call_grammar(models["deepseek"], TOOLS, name=None, is_one=False)
