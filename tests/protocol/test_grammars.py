"""What an answer must match, under every name that clients have for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.sampling import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from session_server.protocol.chat_completions import ChatBody, parse_chat
from session_server.protocol.messages import SamplingBody, sampling_params
from session_server.protocol.sglang import GenerateBody, parse_generation

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
HELD = Grammar("json_schema", TEXT)
OBJECT = Grammar("json_schema", '{"type":"object"}')
NAMED = {"name": "answer", "strict": True, "schema": SCHEMA}


def chat(**fields: Any) -> Grammar | None:
    body = msgspec.convert({"messages": [{"role": "user", "content": "a"}], **fields}, ChatBody)
    call = parse_chat(body, turn_id="t", hint="", defaults=SamplingParams())
    return call.request.sampling.grammar


def bare(grammar: Grammar | None) -> Grammar | None:
    """It without the field that it came in."""
    return None if grammar is None else msgspec.structs.replace(grammar, param="")


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, HELD),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, OBJECT),
        ({"structured_outputs": {"json": SCHEMA}}, HELD),
        ({"structured_outputs": {"json": TEXT}}, HELD),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, Grammar("lark", r'start: "a" | "b\""')),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Grammar("lark", "start: /a/")),
        ({"guided_json": SCHEMA}, HELD),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a"]}, Grammar("lark", 'start: "a"')),
        ({"guided_grammar": "start: /a/"}, Grammar("lark", "start: /a/")),
        ({"json_schema": TEXT}, HELD),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({}, None),
    ],
)
def test_chat_knows_the_names_of_openai_vllm_and_sglang(
    fields: dict[str, Any], grammar: Grammar | None
) -> None:
    asked = chat(**fields)
    assert bare(asked) == grammar
    if asked is not None:
        assert asked.param.startswith(next(iter(fields)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "guided_regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {"regex": "a", "json": "{}"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs.structural_tag"),
        ({"json_schema": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}, "json_schema"),
        ({"guided_choice": ["\u20ac" * (MAX_GRAMMAR_BYTES // 3)]}, "guided_choice"),
        ({"regex": "\ud800"}, "regex"),
        ({"json_schema": {"enum": ["\ud800"]}}, "json_schema"),
    ],
)
def test_what_is_malformed_or_too_large_is_refused_by_its_name(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_a_text_of_just_so_many_bytes_is_read() -> None:
    text = "\u20ac" * (MAX_GRAMMAR_BYTES // 3)
    assert bare(chat(regex=text)) == Grammar("regex", text)


def test_the_native_protocol_has_three_names() -> None:
    def grammar(**fields: Any) -> Grammar | None:
        asked = sampling_params(SamplingBody(**fields), defaults=SamplingParams()).grammar
        assert asked is None or asked.param == f"sampling.{next(iter(fields))}"
        return bare(asked)

    assert grammar(json_schema=SCHEMA) == HELD
    assert grammar(json_schema=TEXT) == HELD
    assert grammar(regex="a+") == Grammar("regex", "a+")
    assert grammar(grammar="start: /a/") == Grammar("lark", "start: /a/")
    assert grammar() is None
    with pytest.raises(InvalidRequest, match=r"sampling.json_schema and sampling.grammar"):
        grammar(json_schema=SCHEMA, grammar="start: /a/")


def test_generate_has_sglangs_names() -> None:
    def grammar(**fields: Any) -> Grammar | None:
        body = msgspec.convert({"text": "a", "sampling_params": fields}, GenerateBody)
        return bare(parse_generation(body, rid="r", turn_id="t").request.sampling.grammar)

    assert grammar(json_schema=TEXT) == HELD
    assert grammar(regex="a+") == Grammar("regex", "a+")
    for name in ("ebnf", "structural_tag"):
        with pytest.raises(UnsupportedOperation, match=name):
            grammar(**{name: "root ::= [a-z]"})
