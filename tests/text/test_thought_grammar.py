"""What an answer held to a grammar may think before it, against what is read of the same answer."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tokenizers import AddedToken

from session_server.core.grammar import GrammarCompiler
from session_server.core.sampling import Grammar
from session_server.text.answer_format import AnswerFormat, Thinking
from session_server.text.answer_parser import HARMONY_MARKERS
from session_server.text.call_grammar import call_grammar
from session_server.text.model_text import ModelText
from session_server.text.thought_grammar import thought_rules
from tests.text.local_text import load_local_text
from tests.text.test_call_grammar import ONE, TOOLS, written
from tests.text.tiny_models import write_model

ANSWER = '{"a": 1}'
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
KINDS = (
    Grammar("json_schema", json.dumps(SCHEMA | {"additionalProperties": False})),
    Grammar("regex", r"\{\"a\": 1\}"),
    Grammar("lark", 'start: "{" rest\nrest: "\\"a\\": 1}"'),
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return load_local_text(write_model(tmp_path_factory.mktemp("models"), "thinking_tools"))


def with_format(model: ModelText, template: str, specials: frozenset[str]) -> ModelText:
    """The same tokenizer, under a template with these marks."""
    values = {name: getattr(model, name) for name in ModelText.__dataclass_fields__}
    return ModelText(**values | {"answer_format": AnswerFormat.of(template, specials)})


def matches(model: ModelText, thinking: Thinking, grammar: Grammar, *pieces: str) -> bool:
    """Whether an answer may be these texts, each tokenized by itself, and end with them."""
    compiler = GrammarCompiler(
        model.tokenizer.backend_tokenizer.to_str(), eos_token_ids=model.eos_token_ids
    )
    has_form, has_calls = bool(grammar.text), bool(grammar.calls)
    before = thought_rules(model, thinking, has_form=has_form, has_calls=has_calls)
    whole = msgspec.structs.replace(grammar, before=before)
    matcher = compiler.compile(whole).matcher.deep_copy()
    ids = [token for piece in pieces for token in model.tokenizer.encode_control(piece)]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def text_of(model: ModelText, thinking: Thinking, *pieces: str) -> str:
    """What a client reads as the answer behind the thought."""
    parser = model.answer_format.parser(
        has_tools=False,
        starts_in_reasoning=thinking is Thinking.OPEN,
        new_call_id=lambda: "call",
    )
    return "".join(part.text for part in (*map(parser.feed, pieces), parser.finish()))


THOUGHT = ("So: {}, or [1]?\n",)
SPELLED = (*THOUGHT, "</thi", "nk>")
MARKED = (*THOUGHT, "</think>")
CONTROL = ("a", "<s>", "[TOOL_CALLS]", "<think>", "b", "</think>")
ENDED = ("a", "<|im_end|>", "</think>")


@pytest.mark.parametrize("grammar", KINDS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("gap", ["", "\n", "\n\n"])
def test_a_thought_is_free_and_what_follows_is_not(
    thinking: ModelText, grammar: Grammar, gap: str
) -> None:
    for thought in (MARKED, SPELLED, CONTROL, ("</think>",)):
        for where, begun in (
            (Thinking.OPEN, thought),
            (Thinking.OPEN, ("<think>", *thought)),
            (Thinking.POSSIBLE, ("<think>", *thought)),
        ):
            said = (*begun, gap, ANSWER)
            assert matches(thinking, where, grammar, *said), said
            assert text_of(thinking, where, *said) == ANSWER
            for wrong in (("b",), (*thought, ANSWER), ()):
                assert not matches(thinking, where, grammar, *begun, gap, *wrong)
        assert not matches(thinking, Thinking.OVER, grammar, *thought, gap, ANSWER)
        assert not matches(thinking, Thinking.POSSIBLE, grammar, *thought, gap, ANSWER)


@pytest.mark.parametrize("grammar", KINDS, ids=lambda grammar: grammar.kind)
def test_where_no_thought_comes_first(thinking: ModelText, grammar: Grammar) -> None:
    assert matches(thinking, Thinking.OVER, grammar, ANSWER)
    assert matches(thinking, Thinking.POSSIBLE, grammar, ANSWER), "it need not think"
    assert not matches(thinking, Thinking.OPEN, grammar, ANSWER), "it has begun to"
    assert not matches(thinking, Thinking.OPEN, grammar, *ENDED, ANSWER), "nor end in it"


def test_marks_that_are_no_tokens_are_spelled(thinking: ModelText) -> None:
    model = with_format(thinking, "[THINK][/THINK]", frozenset())
    for where, said in (
        (Thinking.OPEN, ("So.[/TH", "INK]\n", ANSWER)),
        (Thinking.POSSIBLE, ("[THINK]", "So.[/THINK]", ANSWER)),
    ):
        assert matches(model, where, KINDS[0], *said)
        assert text_of(model, where, *said) == ANSWER
        assert not matches(model, where, KINDS[0], *said, ANSWER)


@pytest.mark.parametrize("form", [None, KINDS[0], KINDS[1], KINDS[2]], ids=str)
def test_calls_come_behind_the_thought(thinking: ModelText, form: Grammar | None) -> None:
    """Calls that must come, or may come instead of a form."""
    calls = call_grammar(thinking, TOOLS, name=None, is_one=form is not None)
    grammar = msgspec.structs.replace(form or Grammar("lark", ""), calls=calls)
    call = written("thinking_tools", ONE)
    for said, is_allowed in (
        (call, True),
        (ANSWER, form is not None),
        (call + ANSWER, False),
        (ANSWER + call, False),
        (f"{call}\n{call}", form is None),
        ("Hello", False),
    ):
        assert matches(thinking, Thinking.OPEN, grammar, *MARKED, "\n\n", said) == is_allowed
        assert matches(thinking, Thinking.POSSIBLE, grammar, said) == is_allowed
        assert matches(thinking, Thinking.OVER, grammar, said) == is_allowed
        assert not matches(thinking, Thinking.OPEN, grammar, said)


def test_channels_before_the_last_one_are_free(tmp_path: Path) -> None:
    marks = tuple(AddedToken(text, special=True) for text in sorted(HARMONY_MARKERS))
    model = load_local_text(write_model(tmp_path / "model", "chatml", extra=marks))
    model = with_format(model, "<|channel|>", HARMONY_MARKERS)
    final = "<|channel|>final<|message|>"
    note = "<|channel|>analysis<|message|>I think {"
    between = "<|end|><|start|>assistant"
    typed = "<|channel|>final <|constrain|>json<|message|>"
    aloud = "<|channel|>commentary<|message|>I look."
    for where, said in (
        (Thinking.OPEN, ("I think {", between, final, ANSWER)),
        (Thinking.OPEN, ("", between, note, between, typed, ANSWER)),
        (Thinking.POSSIBLE, (final, ANSWER)),
        (Thinking.POSSIBLE, (note, between, final, ANSWER)),
        (Thinking.OVER, (ANSWER,)),
    ):
        assert matches(model, where, KINDS[0], *said), said
        assert text_of(model, where, *said) == ANSWER
        assert not matches(model, where, KINDS[0], *said[:-1], "b")
    assert matches(model, Thinking.POSSIBLE, KINDS[0], aloud, between, final, ANSWER)
    assert not matches(model, Thinking.POSSIBLE, KINDS[0], ANSWER)
    calls = call_grammar(model, TOOLS, name=None, is_one=False)
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": ""}'
    for form in (Grammar("lark", ""), KINDS[0]):
        both = msgspec.structs.replace(form, calls=calls)
        for where, said in (
            (Thinking.OPEN, ("I think {", between)),
            (Thinking.POSSIBLE, (aloud, between)),
            (Thinking.POSSIBLE, ()),
        ):
            assert matches(model, where, both, *said, call), said
            assert not matches(model, where, both, *said, call, between, final, ANSWER)
            assert matches(model, where, both, *said, final, ANSWER) == bool(form.text)
        assert matches(model, Thinking.OVER, both, ANSWER) == bool(form.text)
        assert matches(model, Thinking.OVER, both, '{"a"', between, call) != bool(form.text)
