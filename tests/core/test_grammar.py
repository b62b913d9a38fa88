"""A form that is asked for while the model thinks holds behind its thoughts."""

from __future__ import annotations

import pytest

from session_server.core.errors import InvalidRequest
from session_server.core.grammar import GrammarCompiler
from session_server.core.sampling import Grammar
from session_server.text.answer_format import Thinking
from session_server.text.model_text import ModelText
from session_server.text.thought_grammar import thought_rules
from tests.text.local_text import load_local_text
from tests.text.tiny_models import write_model

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
HELD = {
    "json_schema": (SCHEMA, '{"a": 1}', '{"a":  1}'),
    "regex": ("a/+", "a//", "b"),
    "lark": ('start: "x" | "y"', "y", "z"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return load_local_text(write_model(tmp_path_factory.mktemp("thinking"), "thinking"))


@pytest.mark.parametrize("kind", HELD)
def test_anything_may_be_thought_before_the_form(model: ModelText, kind: str) -> None:
    text, right, wrong = HELD[kind]
    before = thought_rules(model, Thinking.OPEN)
    compiler = GrammarCompiler(
        model.tokenizer.backend_tokenizer.to_str(), eos_token_ids=model.eos_token_ids
    )
    held = compiler.compile(Grammar(kind, text, before=before))  # type: ignore[arg-type]

    def matches(said: str) -> bool:
        matcher = held.matcher.deep_copy()
        ids = model.tokenizer.encode_control(said)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    for thought in ("", "So {.\n\nAnd 🎉", wrong):
        assert matches(f"{thought}</think>\n\n{right}")
        assert not matches(f"{thought}</think>\n\n{wrong}")
        assert not matches(thought)
    assert not matches(right)
    with pytest.raises(InvalidRequest):
        compiler.compile(Grammar("lark", "start: other", before=before))
