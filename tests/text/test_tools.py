"""Tools, calls and results in chat templates: what each family's writes, token for token."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from session_server.core.errors import TokenizeFailed
from session_server.core.session_events import Message, ToolCall
from session_server.text.chat_encoder import ChatEncoder
from session_server.text.chat_template import RenderFrame
from session_server.text.model_text import ModelText
from session_server.text.template_values import MAX_JSON_DEPTH, CallForm, conversation_of
from tests.text.local_text import load_local_text, run_to_end
from tests.text.tiny_models import SPECIALS, write_model
from tests.text.tool_templates import TOOL_SPECIALS, TOOL_TEMPLATES

FRAME = RenderFrame(datetime(2025, 3, 1, 10))
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = ToolCall("abcdefghi", "weather", '{"city": "Oslo", "days": [1, 2.5, null, true]}')
CALLED = Message("assistant", "", tool_calls=(CALL,), reasoning="Where?")
RESULT = Message("tool", "Rain.", tool_call_id=CALL.id)
APPENDING = ["hermes", "thinking_tools", "llama31", "deepseek", "lfm2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelText]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: load_local_text(write_model(folder / kind, kind)) for kind in TOOL_TEMPLATES}


def chat_of(model: ModelText) -> ChatEncoder:
    assert model.chat is not None
    return model.chat


def tool_text(tool: dict[str, Any] = TOOL) -> str:
    return json.dumps(tool)


def all_of(model: ModelText, messages: list[Message], *tools: str) -> list[int]:
    chat = chat_of(model)
    return run_to_end(chat.encode_all(messages, FRAME, tools=tools), chat.renderer)


def after(model: ModelText, messages: list[Message], *tools: str) -> list[int]:
    chat = chat_of(model)
    return run_to_end(chat.encode_after_answer(messages, FRAME, tools=tools), chat.renderer)


def spell(model: ModelText, ids: list[int]) -> str:
    return model.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", TOOL_TEMPLATES)
def test_traits_are_those_of_the_template(models: dict[str, ModelText], kind: str) -> None:
    traits = chat_of(models[kind]).traits
    assert traits.takes_tools
    assert traits.can_append
    assert traits.can_append_tools == (kind in APPENDING)
    form = CallForm(no_content=None, has_objects=False) if kind == "deepseek" else CallForm()
    assert traits.call_form == form


@pytest.mark.parametrize("kind", [kind for kind in TOOL_TEMPLATES if kind != "deepseek"])
def test_a_render_with_tools_is_what_transformers_gives(kind: str, tmp_path: Path) -> None:
    import transformers

    folder = write_model(tmp_path, kind)
    ours = load_local_text(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    messages = [Message("user", "Hello"), CALLED, RESULT]
    function = {"name": CALL.name, "arguments": json.loads(CALL.arguments)}
    called = [{"id": CALL.id, "type": "function", "function": function}]
    want = theirs.apply_chat_template(
        [
            {"role": "user", "content": "Hello"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Where?",
                "tool_calls": called,
            },
            {"role": "tool", "content": "Rain.", "tool_call_id": CALL.id},
        ],
        tools=[TOOL],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert all_of(ours, messages, tool_text()) == want
    text = spell(ours, want)
    assert '"Oslo"' in text
    assert "Tell the weather." in text


@pytest.mark.parametrize("kind", APPENDING)
def test_results_behind_an_answer_with_calls_are_the_end_of_the_whole(
    models: dict[str, ModelText], kind: str
) -> None:
    model = models[kind]
    more = [RESULT, Message("tool", "Sun.", tool_call_id=CALL.id)]
    for new in ([RESULT], more, [RESULT, Message("user", "And?")], [Message("user", "And?")]):
        whole = spell(model, all_of(model, [Message("user", "Hello"), CALLED, *new], tool_text()))
        assert whole.endswith(spell(model, after(model, new, tool_text())))


def test_arguments_are_values_where_the_template_writes_them(
    models: dict[str, ModelText],
) -> None:
    for kind, written in (("hermes", '{"city": "Oslo", '), ("deepseek", CALL.arguments)):
        assert written in spell(models[kind], all_of(models[kind], [CALLED], tool_text()))
    for arguments, written in (("", "{}"), ("{oops", '"{oops"'), ("[" * 100, '"[[[[')):
        odd = Message("assistant", "", tool_calls=(ToolCall("abcdefghi", "weather", arguments),))
        text = spell(models["hermes"], all_of(models["hermes"], [Message("user", ""), odd]))
        assert f'"arguments": {written}' in text


def test_what_is_no_value_for_a_process_becomes_one() -> None:
    deep = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert conversation_of((), [deep]).tools
    for tool in ("[" + deep + "]", "{", "[" * 5000, "1" * 400):
        with pytest.raises(TokenizeFailed):
            conversation_of((), [tool])
    assert conversation_of((), ['{"big": 123456789012345678901234567890}']).tools == [
        {"big": 123456789012345678901234567890.0}
    ]


def test_thoughts_stay_where_the_template_keeps_them(models: dict[str, ModelText]) -> None:
    model = models["thinking_tools"]
    kept = spell(model, all_of(model, [Message("user", "Hello"), CALLED, RESULT], tool_text()))
    assert "<think>\nWhere?\n</think>" in kept
    talk = [Message("user", "Hello"), CALLED, RESULT, Message("user", "And?")]
    assert "Where?" not in spell(model, all_of(model, talk, tool_text()))


@pytest.mark.parametrize("kind", TOOL_TEMPLATES)
@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_nothing_that_a_client_writes_is_control(
    models: dict[str, ModelText], kind: str, data: st.DataObject
) -> None:
    model = models[kind]
    specials = model.tokenizer.special_ids
    pieces = st.sampled_from(
        [*SPECIALS, *TOOL_SPECIALS, "<", "[", "<|", "im_end|>", '"', "\\", "x"]
    )
    text = st.lists(pieces, max_size=4).map("".join)

    def conversation(draw: Any) -> tuple[list[Message], str]:
        arguments = json.dumps({"k" + draw(): [draw()], "city": draw()})
        if draw():
            arguments = arguments.replace("<", "\\u003c")
        call = ToolCall(CALL.id, "f" + draw(), arguments)
        function = {"name": "f" + draw(), "description": draw(), "parameters": {draw(): draw()}}
        tool = json.dumps({"type": "function", "function": function})
        answer = Message("assistant", "", tool_calls=(call,), reasoning="r" + draw())
        result = Message("tool", "c" + draw(), tool_call_id=CALL.id)
        return [Message("user", "u" + draw()), answer, result], tool

    plain, tool = conversation(lambda: "x")
    attacked, attacking = conversation(lambda: data.draw(text))
    for encode in (all_of, *([after] if kind in APPENDING else [])):
        messages = slice(2, 3) if encode is after else slice(0, 3)
        wanted = [each for each in encode(model, plain[messages], tool) if each in specials]
        got = [each for each in encode(model, attacked[messages], attacking) if each in specials]
        assert got == wanted
