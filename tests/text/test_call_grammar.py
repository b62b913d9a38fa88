"""Grammars of answers that must call, against what the same model writes and what is read of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from session_server.core.errors import InvalidRequest, SessionServerError, UnsupportedOperation
from session_server.core.grammar import GrammarCompiler
from session_server.core.sampling import Grammar
from session_server.core.session_events import ToolCall
from session_server.text.answer_format import AnswerFormat, Thinking
from session_server.text.answer_parser import HARMONY_MARKERS
from session_server.text.call_grammar import call_grammar
from session_server.text.model_text import ModelText
from session_server.text.thought_grammar import thought_rules
from tests.text.local_text import load_local_text
from tests.text.test_answer_parser import HARMONY, LLAMA, OLMO3, PHI, XML
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
V3 = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
HEAD = "<|channel|>commentary to=functions."
NOTATIONS: dict[str, tuple[str, str | None, str, str]] = {
    "hermes": (
        "{}",
        "\n",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    ),
    "llama31": (
        "{}",
        None,
        '{"name": "weather", "parameters": {"city": "Oslo"}}',
        '{"name": "time", "parameters": {}}',
    ),
    "mistral": (
        "[TOOL_CALLS] [{}]",
        ", ",
        '{"name": "weather", "arguments": {"city": "Oslo"}}',
        '{"name": "time", "arguments": {}}',
    ),
    "mistral_named": (
        "{}",
        "",
        '[TOOL_CALLS]weather[CALL_ID]abcdefgh1[ARGS]{"city": "Oslo"}',
        "[TOOL_CALLS]time[ARGS]{}",
    ),
    "phi": (
        "<|tool_call|>[{}]<|/tool_call|>",
        ", ",
        '{"name": "weather", "arguments": {"city": "Oslo"}}',
        '{"name": "time", "arguments": {}}',
    ),
    "xml": (
        "{}",
        "\n",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
        "</tool_call>",
        "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    ),
    "lfm2": (
        "<|tool_call_start|>[{}]<|tool_call_end|>",
        ", ",
        'weather(city="Oslo")',
        "time()",
    ),
    "olmo3": ("<function_calls>\n{}\n</function_calls>", "\n", 'weather(city="Oslo")', "time()"),
    "deepseek": (
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        "",
        V3.replace("{}", 'weather<｜tool▁sep｜>{"city": "Oslo"}'),
        V3.replace("{}", "time<｜tool▁sep｜>{}"),
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        "\n",
        V3.replace("{}", 'function<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n```'),
        V3.replace("{}", "function<｜tool▁sep｜>time\n```json\n{}\n```"),
    ),
    "harmony": (
        "{}",
        None,
        HEAD + 'weather <|constrain|>json<|message|>{"city": "Oslo"}',
        HEAD + "time<|message|>{}",
    ),
}
"""Of each notation, what encloses calls and parts them, if it has several, and two calls."""

TEMPLATES = {"xml": XML, "olmo3": OLMO3, "phi": PHI, "harmony": HARMONY, "llama31": LLAMA}
KINDS = {"mistral_named": "mistral", "deepseek_v3": "deepseek"}
MARKS = ("[ARGS]", "[CALL_ID]")

CITY = {"$ref": "#/$defs/city"}
RICH: dict[str, Any] = {
    "$defs": {"city": {"type": "object", "properties": {"name": {"type": "string"}}}},
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Anything."},
        "kind": {"enum": ["cat", "a dog", "true"]},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
        "code": {"type": "string", "pattern": "^[a-c]{2}/[0-9]$"},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
        "count": {"type": "integer", "minimum": -3, "maximum": 12},
        "flag": {"type": "boolean"},
        "none": {"type": ["integer", "null"], "maximum": 9, "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "where": CITY,
    },
    "required": ["text", "kind", "code", "flag"],
    "additionalProperties": False,
}


def tool(name: str, schema: dict[str, Any]) -> str:
    return json.dumps({"type": "function", "function": {"name": name, "parameters": schema}})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelText]:
    return dict(written_models(tmp_path_factory.mktemp("models")))


def written_models(folder: Path) -> Iterator[tuple[str, ModelText]]:
    for name in (*NOTATIONS, "thinking_tools", "plain"):
        marks = HARMONY_MARKERS if name == "harmony" else MARKS if name == "mistral_named" else ()
        extra = tuple(AddedToken(text, special=True) for text in sorted(marks))
        kind = "chatml" if name in TEMPLATES or name == "plain" else KINDS.get(name, name)
        model = load_local_text(write_model(folder / name, kind, extra=extra))
        if name in TEMPLATES:
            values = {key: getattr(model, key) for key in ModelText.__dataclass_fields__}
            own = AnswerFormat.of(TEMPLATES[name], frozenset(marks))
            model = ModelText(**values | {"answer_format": own})
        yield name, model


def matcher_of(model: ModelText, calls: str, form: Grammar | None = None) -> LLMatcher:
    """What an answer is held to that must call, or may have a form instead; behind its thought."""
    where = Thinking.POSSIBLE if model.answer_format.is_harmony else Thinking.OVER
    before = thought_rules(model, where, has_form=form is not None, has_calls=True)
    held = msgspec.structs.replace(form or Grammar("lark", ""), before=before, calls=calls)
    compiler = GrammarCompiler(
        model.tokenizer.backend_tokenizer.to_str(), eos_token_ids=model.eos_token_ids
    )
    return compiler.compile(held).matcher.deep_copy()


def matches(
    model: ModelText,
    text: str,
    *,
    name: str | None = None,
    is_one: bool = False,
    tools: tuple[str, ...] = TOOLS,
    form: Grammar | None = None,
) -> bool:
    """Whether an answer that must call may be this, and end with it."""
    matcher = matcher_of(model, call_grammar(model, tools, name=name, is_one=is_one), form)
    ids = model.tokenizer.encode_control(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(kind: str, *calls: str) -> str:
    form, between, key = FORMS[kind]
    each = [form.replace("{}", call.replace("KEY", key)) for call in calls]
    text = (between or "").join(each)
    return f"[TOOL_CALLS] [{text}]" if kind == "mistral" else text


def read(model: ModelText, text: str, tools: tuple[str, ...]) -> tuple[str, tuple[ToolCall, ...]]:
    """The text and the calls that are read of an answer."""
    new_id = partial(next, map(str, count()))
    parser = model.answer_format.parser(
        has_tools=True, starts_in_reasoning=False, new_call_id=new_id, tools=tools
    )
    pieces = (parser.feed(text), parser.finish())
    return "".join(piece.text for piece in pieces), parser.tool_calls


@pytest.mark.parametrize("name", NOTATIONS)
def test_calls_of_the_tools_and_nothing_else(models: dict[str, ModelText], name: str) -> None:
    model, (form, between, one, other) = models[name], NOTATIONS[name]
    whole = partial(form.replace, "{}")
    assert matches(model, whole(one))
    assert matches(model, whole(other))
    assert matches(model, whole(one), name="weather")
    assert not matches(model, whole(other), name="weather")
    assert not matches(model, whole(one.replace("city", "town")))
    assert not matches(model, whole(one.replace("weather", "other")))
    assert not matches(model, "Hello")
    assert not matches(model, "")
    said = [("weather", {"city": "Oslo"}), ("time", {})]
    if between is not None:
        both = whole(one + between + other)
        assert matches(model, both)
        assert not matches(model, both, is_one=True)
        text, calls = read(model, both, TOOLS)
        assert (text, [(call.name, json.loads(call.arguments)) for call in calls]) == ("", said)
    else:
        assert not matches(model, whole(one) + whole(other))


@pytest.mark.parametrize("name", NOTATIONS)
def test_whatever_is_allowed_is_read_as_arguments_that_fit(
    models: dict[str, ModelText], name: str
) -> None:
    model, tools = models[name], (tool("f", RICH), tool("g.h", SCHEMA), tool("i", {}))
    start = matcher_of(model, call_grammar(model, tools, name=None, is_one=False))
    schemas = {"f": RICH, "g.h": SCHEMA, "i": {"type": "object"}}
    names = set[str]()
    num_whole = num_compared = 0
    for seed in range(24):
        said = walked(model, start.deep_copy(), Random(seed))
        if said is None:
            continue
        num_whole += 1
        text, calls = read(model, said, tools)
        assert not text or name == "harmony", said  # which may say what it is about to do
        assert calls, said
        for call in calls:
            names.add(call.name)
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        if name == "xml" and said.count("</parameter>") == said.count("<parameter="):
            num_compared += 1
            assert [json.loads(call.arguments) for call in calls] == list(tagged(said)), said
    assert num_whole >= 16
    assert num_compared >= 4 or name != "xml"
    assert names == schemas.keys()


@pytest.mark.parametrize(
    "form", [Grammar("json_schema", '{"type":"object"}'), Grammar("regex", "a+")], ids=str
)
@pytest.mark.parametrize("name", NOTATIONS)
def test_an_answer_calls_or_has_the_form(
    models: dict[str, ModelText], name: str, form: Grammar
) -> None:
    model, (frame, between, one, other) = models[name], NOTATIONS[name]
    calls = frame.replace("{}", one)
    right = "aa" if form.kind == "regex" else '{"a": [1]}'
    text = f"<|channel|>final<|message|>{right}" if name == "harmony" else right
    allows = partial(matches, model, form=form)
    assert allows(calls)
    assert allows(text)
    assert not allows(text.replace(right, "b"))
    assert not allows(text + calls)
    assert not allows(calls + text)
    if between is not None:
        assert allows(frame.replace("{}", one + between + other))
        assert not allows(frame.replace("{}", one + between + other), is_one=True)


HINTS = ('"', "]", "}", ")", "\n</parameter>", "</parameter>", "</tool_call>", "<|end|>")


def walked(model: ModelText, matcher: LLMatcher, rng: Random) -> str | None:
    """A text of random tokens that are allowed, with a bent to the end; None: there was none."""
    hints = [model.tokenizer.encode_control(hint) for hint in HINTS]
    ids: list[int] = []
    while len(ids) < 2000:
        if matcher.is_accepting() and rng.random() < 0.5:
            return model.tokenizer.decode(ids, skip_special_tokens=False)
        steps = [hint for hint in hints if matcher.validate_tokens(hint) == len(hint)]
        if steps and rng.random() < 0.3:
            step = rng.choice(steps)
        else:
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            tokens = [one for one in allowed.tolist() if one not in model.eos_token_ids]
            if not tokens:
                assert matcher.is_accepting()
                return model.tokenizer.decode(ids, skip_special_tokens=False)
            step = [rng.choice(tokens)]
        assert matcher.consume_tokens(step)
        ids += step
    return None


def tagged(said: str) -> Iterator[dict[str, Any]]:
    """Arguments in tags, as one reads them who knows the schema."""
    for name, body in re.findall(r"(?s)<function=([\w.]+)>\n(.*?)</function>\n</tool_call>", said):
        schema = {"f": RICH, "g.h": SCHEMA}.get(name, {"properties": {}})["properties"]
        pairs = re.findall(r"(?s)<parameter=(\w+)>\n(.*?)\n?</parameter>", body)
        yield {key: value_of(schema[key], text) for key, text in pairs}


def value_of(schema: dict[str, Any], text: str) -> Any:
    is_text = schema.get("type") == "string" or "enum" in schema
    if is_text or ("anyOf" in schema and text not in ("null", "None")):
        return text
    return None if text == "None" else json.loads(text)


def test_python_writes_its_own_words(models: dict[str, ModelText]) -> None:
    schema = {
        "properties": {
            "a": {"type": "boolean"},
            "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "c": {"const": True},
        },
        "required": ["b"],
    }
    for arguments, is_allowed in (
        ("a=True, b=None, c=true", True),
        ("a=false, b=1", True),
        ("b=null", True),
        ("b=1, c=True", False),
        ("b=True", False),
        ("a=True", False),
        ("b=1, a=True", False),
        ("", False),
    ):
        text = f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>"
        assert matches(models["lfm2"], text, tools=(tool("f", schema),)) == is_allowed, text


def test_text_in_tags_is_held_to_its_bounds(models: dict[str, ModelText]) -> None:
    cases: tuple[tuple[dict[str, Any], list[str], list[str]], ...] = (
        ({"type": "string", "maxLength": 3}, ["", "a\nb", "<b>"], ["abcd"]),
        ({"type": "string", "pattern": "a/b$"}, ["xa/b"], ["a/bx", "b"]),
        ({"type": "string", "pattern": "^a\\$"}, ["a$b"], ["ab", "xa$"]),
        ({"type": "string", "enum": ["a", "", "null"]}, ["a", "", "null"], ["b"]),
        ({"const": "a"}, ["a"], ["b"]),
        ({"enum": ["a", None]}, ["a", "null"], ["b"]),
        ({"type": ["string", "null"], "maxLength": 1}, ["a", "null"], ["nu"]),
        ({"type": "integer"}, ["1"], ["a", '"1"']),
        ({"type": ["string", "integer"]}, ["1", '"a"'], ["a"]),
        (True, ["1", '"a"', '{"a": [1]}'], ["a"]),
    )
    form, _, one, _ = NOTATIONS["xml"]
    for schema, right, wrong in cases:
        tools = (tool("weather", {"properties": {"city": schema}, "required": ["city"]}),)
        for value in (*right, *wrong):
            text = form.replace("{}", one.replace("Oslo", value))
            assert matches(models["xml"], text, tools=tools) == (value in right), (schema, value)


def test_references_lead_to_what_a_tool_defines(models: dict[str, ModelText]) -> None:
    schema = {"$defs": {"x": {"const": 1}}, "properties": {"a": {"$ref": "#/$defs/x"}}}
    call = '<tool_call>\n{"name": "f", "arguments": {"a": NUMBER}}\n</tool_call>'
    tools = (tool("f", schema),)
    assert matches(models["hermes"], call.replace("NUMBER", "1"), tools=tools)
    assert not matches(models["hermes"], call.replace("NUMBER", "2"), tools=tools)


def test_space_within_json_has_an_end(models: dict[str, ModelText]) -> None:
    form, _, call, _ = NOTATIONS["deepseek"]
    whole = form.replace("{}", call)
    assert matches(models["deepseek"], whole.replace('"city": ', '"city":\n  '))
    assert not matches(models["deepseek"], whole.replace('"city": ', '"city":  '))


def test_what_cannot_be_asked_for_is_refused(models: dict[str, ModelText]) -> None:
    hermes = partial(call_grammar, models["hermes"], is_one=False)
    with pytest.raises(InvalidRequest):
        hermes(TOOLS, name="other")
    with pytest.raises(InvalidRequest):
        hermes((), name=None)
    deep = TOOLS[0].replace('"object"', "[" * 5000 + "]" * 5000)
    with pytest.raises(InvalidRequest, match="too deeply"):
        hermes((deep,), name=None)
    with pytest.raises(InvalidRequest, match="too large"):
        hermes((tool("f", {"description": "a" * (1 << 17)}),), name=None)
    with pytest.raises(UnsupportedOperation):
        call_grammar(models["plain"], TOOLS, name=None, is_one=False)


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"anyOf": [SCHEMA]}, UnsupportedOperation),
        ({"required": ["a"]}, UnsupportedOperation),
        ({"properties": {"an a": {}}}, UnsupportedOperation),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, UnsupportedOperation),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, UnsupportedOperation),
        ({"type": "array"}, InvalidRequest),
        ({"properties": []}, InvalidRequest),
        ({"properties": {"a": {"type": "string", "maxLength": "1"}}}, InvalidRequest),
    ],
    ids=str,
)
def test_what_tags_cannot_be_held_to_is_refused(
    models: dict[str, ModelText], schema: dict[str, Any], error: type[SessionServerError]
) -> None:
    with pytest.raises(error) as refused:
        call_grammar(models["xml"], (tool("f", schema),), name=None, is_one=False)
    assert refused.value.param == "tools"
