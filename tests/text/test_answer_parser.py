"""Answers are parted into text, reasoning and calls, however they are cut into pieces."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any, Final

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from session_server.core.session_events import ToolCall, ToolCallDelta
from session_server.text.answer_format import AnswerFormat, Thinking
from session_server.text.answer_literals import MAX_DEPTH, MAX_SCALAR_CHARS
from session_server.text.answer_parser import AnswerParser
from session_server.text.answer_pieces import AnswerPieces
from tests.depth import at_depth

HERMES = "<tool_call>"
XML = "<tool_call>\n<function="
LLAMA = "<|python_tag|>"
MISTRAL = "[TOOL_CALLS]"
DEEPSEEK = "<｜tool▁calls▁begin｜>"
LFM2 = "<|tool_call_start|>"
OLMO3 = "<function_calls>"
PHI = "<|tool_call|>"
HARMONY = "<|channel|><|message|>"
THINK = "<think></think>"
FORMATS: Final = (HERMES, XML, LLAMA, MISTRAL, DEEPSEEK, LFM2, OLMO3, PHI, HARMONY, THINK)

EVERY_MARKER: Final = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>"),
    *("<function=", "</function>", "<parameter=", "</parameter>", "<|tool_call|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<function_calls>", "</function_calls>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "```json", "\n", ">", "<"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "analysis", "final"),
    *("assistant", "commentary to=functions.f ", "f", "(", ")", "x=", "[", "]", "{", "}", ";"),
    *('{"name": "f", "arguments": {', '"x": ', '"', "'", "\\", "\\u12", ", ", ":", "1", "-0.5e3"),
    *("true", "None", "nul", " ", "é", "plain words", '{"arguments": {}, "name": "g"}'),
)


def parser(template: str, **options: Any) -> AnswerParser:
    numbers = count()
    options = {"has_tools": True, "starts_in_reasoning": False} | options
    return AnswerFormat.of(template, ()).parser(
        new_call_id=lambda: f"call_{next(numbers)}", **options
    )


def parse(template: str, pieces: Sequence[str], **options: Any) -> tuple[str, str, list[ToolCall]]:
    """Return text, reasoning and calls as a client that reads only pieces puts them together."""
    reader = parser(template, **options)
    return joined(reader, [*(reader.feed(piece) for piece in pieces), reader.finish()])


def joined(
    reader: AnswerParser, everything: Sequence[AnswerPieces]
) -> tuple[str, str, list[ToolCall]]:
    calls: list[ToolCall] = []
    for delta in (delta for pieces in everything for delta in pieces.tool_calls):
        if delta.index == len(calls):
            assert delta.id
            assert delta.name
            calls.append(ToolCall(delta.id, delta.name, ""))
        else:
            assert not delta.id
            assert not delta.name
        last = calls[delta.index]
        calls[delta.index] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
    assert tuple(calls) == reader.tool_calls
    text = "".join(pieces.text for pieces in everything)
    return text, "".join(pieces.reasoning for pieces in everything), calls


def only(arguments: str, *head: str) -> tuple[ToolCallDelta]:
    return (ToolCallDelta(0, arguments, *head),)


def said(calls: Sequence[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


ANSWERS: Final = (
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>'),
    (HERMES, "<tool_call>{'name': 'f', 'arguments': {'x': 1,},}</tool_call>".replace(",}<", "}<")),
    (HERMES, '<tool_call>[{"name": "f", "parameters": {"x": 1}}]</tool_call>'),
    (XML, "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"),
    (XML, "<function=f><parameter=x>1</parameter></function>"),
    (XML, "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</tool_call>"),
    (LLAMA, '{"name": "f", "parameters": {"x": 1}}'),
    (LLAMA, '\n{"type": "function", "name": "f", "parameters": {"x": 1}}'),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"x": 1}}'),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]'),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x": 1}'),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}'),
    (MISTRAL, '[TOOL_CALLS]f{"x": 1}'),
    (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
    ),
    (LFM2, "<|tool_call_start|>[f(x=1)]<|tool_call_end|>"),
    (OLMO3, "<function_calls>\nf(x=1)\n</function_calls>"),
    (PHI, '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<|/tool_call|>'),
    (PHI, '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]'),
    (
        HARMONY,
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
    ),
    (HARMONY, '<|start|>assistant to=functions.f<|channel|>commentary<|message|>{"x": 1}<|call|>'),
    # The prompt ends within a head, which may go on with the recipient.
    (HARMONY, ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'),
)


@pytest.mark.parametrize(("template", "answer"), ANSWERS)
def test_a_call_is_read_in_every_notation(template: str, answer: str) -> None:
    text, reasoning, calls = parse(template, answer)
    assert (text, reasoning, said(calls)) == ("", "", [("f", {"x": 1})])
    assert parse(template, [answer]) == (text, reasoning, calls)


@pytest.mark.parametrize(("template", "answer"), ANSWERS)
def test_a_call_that_is_cut_loses_nothing(template: str, answer: str) -> None:
    """Up to the begin of its arguments it is text; from there on a call with what came of them."""
    for end in range(len(answer)):
        text, _, calls = parse(template, answer[:end])
        if calls:
            assert calls[0].name == "f"
            assert text in answer[:end]
        elif template != HARMONY:
            assert text == answer[:end]


@pytest.mark.parametrize(("template", "answer"), ANSWERS)
def test_without_tools_a_call_is_text(template: str, answer: str) -> None:
    text, reasoning, calls = parse(template, answer, has_tools=False)
    assert (reasoning, calls) == ("", [])
    assert text == answer.removesuffix("<|call|>")


def test_several_calls_and_the_text_around_them() -> None:
    answer = (
        'I look.\n<tool_call>\n{"name": "f", "arguments": {"x": "é\\n"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\nDone.\n'
    )
    text, _, calls = parse(HERMES, answer)
    assert text == "I look.Done.\n"
    assert calls == [ToolCall("call_0", "f", '{"x": "é\\n"}'), ToolCall("call_1", "g", "{}")]
    for template, several in (
        (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'),
        (LLAMA, '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}"),
        (LFM2, "<|tool_call_start|>[f(), g()]<|tool_call_end|>"),
        (OLMO3, "<function_calls>\nf()\ng()\n</function_calls>"),
        (PHI, '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": null}]'),
        (XML, "<tool_call><function=f></function></tool_call>\n<function=g></function>"),
    ):
        text, _, calls = parse(template, several)
        assert (text, said(calls)) == ("", [("f", {}), ("g", {})])


def test_arguments_come_as_they_are_written() -> None:
    reader = parser(HERMES)
    assert reader.feed('<tool_call>{"name": "f", "arguments": {"x": "on') == AnswerPieces(
        tool_calls=only('{"x": "on', "call_0", "f")
    )
    assert reader.feed("e t") == AnswerPieces(tool_calls=only("e t"))
    assert reader.feed('wo"}}') == AnswerPieces(tool_calls=only('wo"}'))
    assert reader.feed("</tool_call>") == reader.finish() == AnswerPieces()


@pytest.mark.parametrize(
    ("template", "answer", "text"),
    [
        (HERMES, "a < b <tool", "a < b <tool"),
        (HERMES, "<tool_call>\nnot a call", "<tool_call>\nnot a call"),
        (HERMES, '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>'),
        (HERMES, '<tool_call>{"name": "a b", "arguments": {}}', None),
        (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}', None),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', None),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        (HERMES, '<tool_call>{"name": "f", "arguments": 1}</tool_call>', None),
        (LLAMA, '{"name": "Ada", "age": 36}', None),
        (LLAMA, '{"answer": {"name": "f", "parameters": {}}}', None),
        (LLAMA, '{"name": "f"}', None),
        (LLAMA, "<|python_tag|>print(1)", None),
        (LFM2, "<|tool_call_start|>[f(1)]<|tool_call_end|>", None),
        (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f", None),
        (XML, "<function=>", None),
        (XML, "<function=f>text</function>", None),
    ],
)
def test_what_is_no_call_is_text(template: str, answer: str, text: str | None) -> None:
    assert parse(template, answer) == (text or answer, "", [])


def test_a_call_is_found_behind_one_that_went_wrong() -> None:
    answer = '<tool_call> <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(HERMES, answer)[0] == "<tool_call> "
    assert said(parse(HERMES, answer)[2]) == [("f", {})]


def test_arguments_that_go_wrong_end_there() -> None:
    text, _, calls = parse(HERMES, '<tool_call>{"name": "f", "arguments": {"x": oops}}')
    assert (text, calls) == ("oops}}", [ToolCall("call_0", "f", '{"x": ')])
    deep = "[" * MAX_DEPTH
    text, _, calls = parse(HERMES, '<tool_call>{"name": "f", "arguments": {"x": ' + deep)
    assert (text, calls[0].arguments) == ("[", '{"x": ' + deep[1:])
    digits = "1" * (MAX_SCALAR_CHARS + 1)
    text, _, calls = parse(HERMES, '<tool_call>{"name": "f", "arguments": {"x": ' + digits + "}}")
    assert (text, calls[0].arguments) == ("1}}", '{"x": ' + digits[1:])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{'x': 'it\\'s \"so\"', 'y': (True, None,)}", '{"x": "it\'s \\"so\\"", "y": [true,null]}'),
        ('{"x": "a\nb\tc\\d\\x41\\u00e9\\uzz"}', '{"x": "a\\nb\\tc\\\\d\\u0041\\u00e9\\\\uzz"}'),
        ('{ "x" : [ ] , "y":{ } , "z":-0.5e+3 }', '{ "x" : [ ] , "y":{ } , "z":-0.5e+3 }'),
    ],
)
def test_arguments_become_json(written: str, arguments: str) -> None:
    call = '<tool_call>{"name": "f", "arguments": ' + written + "}</tool_call>"
    got = parse(HERMES, call)[2][0].arguments
    assert json.loads(got) == json.loads(arguments)


def test_parameters_without_quotes_have_the_declared_type() -> None:
    answer = (
        "<function=f><parameter=zip>90210</parameter><parameter=n>\n5\n</parameter>"
        "<parameter=on>True</parameter><parameter=code>\n\nif x:\n  y\n\n</parameter></function>"
    )
    tool = {"name": "f", "parameters": {"properties": {"zip": {"type": "string"}, "n": {}}}}
    tools = (json.dumps({"type": "function", "function": tool}), '{"type": "other"}', "1")
    expected = {"zip": "90210", "n": 5, "on": True, "code": "\nif x:\n  y\n"}
    assert said(parse(XML, answer, tools=tools)[2]) == [("f", expected)]
    assert said(parse(XML, answer)[2]) == [("f", expected | {"zip": 90210})]
    cut = parse(XML, "<function=f><parameter=x>\nhalf a")[2]
    assert cut == [ToolCall("call_0", "f", '{"x": "half a')]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "90210", "90210"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "90210", "90210"),
        ({"type": ["string", "null"]}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "1"}, "1", "1"),
        ({"type": "string"}, "null", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1", 1),
        ({"type": ["string", "integer"]}, "1", 1),
        ({"enum": ["1", 2]}, "1", 1),
        ({"anyOf": []}, "1", 1),
        ({"type": "object"}, "{'a': [True, None, 'it']}", {"a": [True, None, "it"]}),
        ({"type": "array"}, "[1, 2,]", [1, 2]),
        ({"type": "object"}, "{'a': oops}", "{'a': oops}"),
        ({"type": "array"}, "[1] and more", "[1] and more"),
        ({}, "'a'", "'a'"),
        ({}, "(1)", "(1)"),
        ({}, "NaN", "NaN"),
        ({}, ' "a" ', "a"),
    ],
)
def test_a_parameter_is_what_its_schema_admits(schema: Any, written: str, value: Any) -> None:
    properties = {"properties": {"x": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": properties}}
    answer = f"<function=f><parameter=x>\n{written}\n</parameter></function>"
    assert said(parse(XML, answer, tools=(json.dumps(tool),))[2]) == [("f", {"x": value})]


@pytest.mark.parametrize(("start", "end"), [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_reasoning_ends_before_the_answer(start: str, end: str) -> None:
    template = start + end
    answer = f"\n{start}\nI think\n\nso.\n{end}\n\nYes.\n"
    assert parse(template, answer) == ("Yes.\n", "I think\n\nso.", [])
    assert parse(template, f"I think{end}\n\nYes.", starts_in_reasoning=True) == (
        "Yes.",
        "I think",
        [],
    )
    assert parse(template, f"{start}I think", starts_in_reasoning=True)[1] == "I think"
    assert parse(template, f"{start}\n\n{end}\n\n") == ("", "", [])
    assert parse(template, f"Then {start} x {end}") == (f"Then {start} x {end}", "", [])
    assert parse(template, " \nThen") == (" \nThen", "", [])
    where = AnswerFormat.of(template, ()).thinking_after
    assert where(f"assistant\n{start}\n") is Thinking.OPEN
    assert where(f"assistant\n{start}{end}\n\n") is Thinking.OVER
    assert where("assistant\n") is Thinking.POSSIBLE


def test_a_call_in_reasoning_is_reasoning() -> None:
    answer = '<think>a <tool_call>{"name": "f", "arguments": {}}</tool_call></think>b'
    text, reasoning, calls = parse(THINK + HERMES, answer)
    assert (text, calls) == ("b", [])
    assert reasoning.startswith("a <tool_call>")


def test_a_tag_within_a_string_of_json_ends_no_parameter() -> None:
    form = "<function=f><parameter=x>\n{}</parameter><parameter=y>\n2\n</parameter></function>"
    for written, read in (
        ('["</parameter>", 1]\n', ["</parameter>", 1]),
        (
            '{"</parameter>": "\\"</parameter></parameter>"}',
            {"</parameter>": '"</parameter></parameter>'},
        ),
        ('"a</parameter>"', "a</parameter>"),
        ('["a, b]\n', '["a, b]'),
        ('["a", b', '["a", b'),
        ("'a", "'a"),
        ("12", 12),
    ):
        for pieces in ([form.replace("{}", written)], list(form.replace("{}", written))):
            text, _, (call,) = parse(XML, pieces)
            assert text == ""
            assert json.loads(call.arguments) == {"x": read, "y": 2}


def test_a_function_that_is_called_in_reasoning_ends_it() -> None:
    """Qwen3.5 may call without having closed its thoughts; mentioned markers end nothing."""
    call = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    mentioned = "I use <tool_call> or <tool_call>\n<fun, then"
    answer = f"{mentioned}\n{call}\nDone."
    text, reasoning, calls = parse(THINK + XML, answer, starts_in_reasoning=True)
    assert (text, reasoning, said(calls)) == ("Done.", mentioned, [("f", {"x": 1})])
    assert parse(THINK + XML, [answer], starts_in_reasoning=True) == (text, reasoning, calls)
    assert parse(THINK + XML, f"<think>{call}") == ("", "", calls)
    kept = parse(THINK + XML, call, starts_in_reasoning=True, has_tools=False)
    assert kept == ("", call, [])


def test_channels_of_harmony() -> None:
    answer = (
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    )
    assert parse(HARMONY, answer) == ("I look.\nYes.", "I think.\nMore.", [])
    assert parse(HARMONY, "x<|end|>", starts_in_reasoning=True) == ("", "x", [])
    assert parse(HARMONY, "<|channel|>analysis")[0] == "<|channel|>analysis"
    assert parse(HARMONY, " to=you<|channel|>final<|message|>Yes.") == ("Yes.", "", [])
    assert parse(HARMONY, " to=you") == (" to=you", "", [])
    where = AnswerFormat.of(HARMONY, ()).thinking_after
    assert where("<|channel|>analysis<|message|>") is Thinking.OPEN
    assert where("<|channel|>final<|message|>") is Thinking.OVER
    assert where("<|start|>assistant") is Thinking.POSSIBLE
    assert AnswerFormat().thinking_after("assistant\n<think>") is Thinking.OVER


def test_a_template_without_markup_passes_everything_on_at_once() -> None:
    reader = parser("{{ messages }}")
    for piece in ("<think>", "\n\n", "<tool_call>", '{"name"'):
        assert reader.feed(piece) == AnswerPieces(piece)
    assert reader.finish() == AnswerPieces()


def test_special_tokens_that_are_markup_are_told() -> None:
    special = ("<think>", "</think>", "<tool_call>", "<|im_end|>", "[ARGS]", "<|channel|>")
    assert AnswerFormat.of(THINK, special).control_texts == {"<think>", "</think>"}
    assert AnswerFormat.of(HERMES, special).control_texts == {"<tool_call>", "[ARGS]"}
    assert AnswerFormat.of(HARMONY, special).control_texts == {"<|channel|>"}
    assert not AnswerFormat.of("{{ messages }}", special).control_texts


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


@settings(max_examples=at_depth(300, proof=20_000), deadline=None)
@given(
    template=st.sampled_from([*FORMATS, THINK + HERMES, THINK + XML, "[THINK]" + MISTRAL]),
    answer=st.one_of(
        st.lists(st.sampled_from(EVERY_MARKER), max_size=24).map("".join),
        st.tuples(
            st.sampled_from([answer for _, answer in ANSWERS]),
            st.integers(0, 200),
            st.sampled_from(EVERY_MARKER),
        ).map(lambda drawn: drawn[0][: drawn[1]] + drawn[2] + drawn[0][drawn[1] :]),
    ),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    has_tools=st.booleans(),
    starts_in_reasoning=st.booleans(),
)
def test_how_an_answer_is_cut_does_not_matter(
    *, template: str, answer: str, cuts: list[int], has_tools: bool, starts_in_reasoning: bool
) -> None:
    options = {"has_tools": has_tools, "starts_in_reasoning": starts_in_reasoning}
    whole = parse(template, [answer], **options)
    assert parse(template, list(answer), **options) == whole
    assert parse(template, cut(answer, cuts), **options) == whole
    if not has_tools:
        assert not whole[2]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.sampled_from(["'", '"', "\\", "</x>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text("abcxyz_0", min_size=1, max_size=8)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES, JSON_VALUES, max_size=3)), min_size=1, max_size=3
)

RENDERS: Final = {
    "qwen": (
        "{{ content }}{% for c in calls %}\n<tool_call>\n"
        '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}"
    ),
    "llama": (
        "{% for c in calls %}{% if loop.first %}<|python_tag|>{% else %}; {% endif %}"
        '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% endfor %}'
    ),
    "mistral": (
        "{{ content }}[TOOL_CALLS] [{% for c in calls %}"
        '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, "id": "abcdefghi"}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]"
    ),
    "mistral_args": (
        "{{ content }}{% for c in calls %}[TOOL_CALLS]{{ c.name }}[ARGS]"
        "{{ c.arguments | tojson }}{% endfor %}"
    ),
    "deepseek_v3": (
        "{{ content }}<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>function"
        "<｜tool▁sep｜>{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>"
        "{% if not loop.last %}\n{% endif %}{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "deepseek_v3_1": (
        "{{ content }}<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>{{ c.name }}"
        "<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
        "<｜tool▁calls▁end｜>"
    ),
    "lfm2": (
        "<|tool_call_start|>[{% for c in calls %}{{ c.name }}({% for k, v in c.arguments.items() %}"
        "{{ k }}={{ v | pprint }}{% if not loop.last %}, {% endif %}{% endfor %})"
        "{% if not loop.last %}, {% endif %}{% endfor %}]<|tool_call_end|>{{ content }}"
    ),
    "phi": (
        "{{ content }}<|tool_call|>[{% for c in calls %}"
        '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]<|/tool_call|>"
    ),
}


@pytest.mark.parametrize("name", RENDERS)
@settings(max_examples=at_depth(25, proof=2_000), deadline=None)
@given(calls=CALLS, content=st.sampled_from(["", "I look.", "5 < 6"]))
def test_what_a_template_writes_is_read_back(
    name: str, calls: list[tuple[str, dict[str, Any]]], content: str
) -> None:
    template = RENDERS[name]
    environment = jinja2.Environment(autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters["pprint"] = repr
    written = environment.from_string(template).render(
        content=content, calls=[{"name": name, "arguments": given} for name, given in calls]
    )
    text, reasoning, got = parse(template, [written])
    assert (text, reasoning) == ("" if name == "llama" else content, "")
    assert said(got) == calls


GROWTH: Final = {
    "markers": (HERMES, "<tool_call>"),
    "near markers": (HERMES, "<tool_cal"),
    "newlines": (HERMES, "\n"),
    "newlines in reasoning": (THINK, "\n"),
    "objects": (HERMES, '<tool_call>{"x": '),
    "brackets": (LLAMA, "["),
    "arguments before the name": (HERMES, "x", '<tool_call>{"arguments": {"x": "'),
    "escapes": (HERMES, "\\u12", '<tool_call>{"name": "f", "arguments": {"x": "'),
    "digits": (HERMES, "1", '<tool_call>{"name": "f", "arguments": {"x": '),
    "members": (HERMES, '"x": {},', '<tool_call>{"name": "f", "y": {'),
    "parameters": (XML, "<parameter=x></paramete", "<function=f>"),
    "heads": (HARMONY, "<|channel|>"),
    "names": (MISTRAL, "a", "[TOOL_CALLS]"),
    "spaces": (LLAMA, " "),
    "calls": (LFM2, "f(),", "<|tool_call_start|>["),
}


@pytest.mark.parametrize("case", GROWTH)
def test_work_is_linear_in_the_answer(case: str) -> None:
    num_chars = at_depth(2_000, proof=500_000 if case == "near markers" else 40_000)
    template, repeated, *start = GROWTH[case]
    text = "".join(start) + repeated * (num_chars // len(repeated))
    once, twice = num_calls(template, text), num_calls(template, text + text[len(text) // 2 :] * 2)
    assert twice <= 2.2 * once + 2_000


def num_calls(template: str, text: str) -> int:
    """Count the calls that parsing makes, functions written in C included, a character a piece;
    what each may touch is bounded by what is held of the text unread."""
    reader = parser(template)
    num = 0

    def profile(_: object, event: str, __: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        for char in text:
            reader.feed(char)
            assert len(reader._source._rest) <= 64
        reader.finish()
    finally:
        sys.setprofile(None)
    return num
