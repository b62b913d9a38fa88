"""Write the grammar of an answer that must call a tool, in a model's own notation.

Of the notations, those that are JSON can be held to: calls in `<tool_call>` (Hermes, Qwen), behind
`[TOOL_CALLS]` (Mistral), and bare ones (Llama).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.sampling import Grammar
from session_server.text.model_text import ModelText
from session_server.text.thought_grammar import marker_of


def call_grammar(
    model: ModelText, tools: Sequence[str], *, name: str | None, is_one: bool
) -> Grammar:
    """Return the grammar of an answer that calls tools and says nothing else.

    Args:
        model: whose notation it is.
        tools: JSON texts of those that may be called.
        name: of the only one; None: any of them.
        is_one: whether it may call only once.

    Raises:
        UnsupportedOperation: the notation of this model is no JSON.
        InvalidRequest: no such tool was given, or one is nested too deeply.
    """
    try:
        return _grammar(model, tools, name=name, is_one=is_one)
    except RecursionError:
        raise InvalidRequest("The tools are nested too deeply.", param="tools") from None


def _grammar(model: ModelText, tools: Sequence[str], *, name: str | None, is_one: bool) -> Grammar:
    functions = [json.loads(tool)["function"] for tool in tools]
    wanted = [each for each in functions if name is None or each["name"] == name]
    if not wanted:
        raise InvalidRequest("tool_choice names none of the tools.", param="tool_choice")
    markers = model.answer_format.call_markers
    if "<tool_call>" in markers:
        key = "arguments"
        whole = (
            f'{marker_of(model, "<tool_call>")} "\\n" call "\\n" {marker_of(model, "</tool_call>")}'
        )
        calls = whole if is_one else f'{whole} ("\\n" {whole})*'
    elif "[TOOL_CALLS]" in markers and "[ARGS]" not in markers:
        key = "arguments"
        more = "" if is_one else '(", " call)*'
        calls = f'{marker_of(model, "[TOOL_CALLS]")} " "? "[" call {more} "]"'
    elif model.answer_format.has_bare_calls:
        key, calls = "parameters", "call"
    else:
        raise UnsupportedOperation(
            "tool_choice is not supported with this model: its calls are no JSON.",
            param="tool_choice",
        )
    rules = [f"call_{number}: %json {_schema(each, key)}" for number, each in enumerate(wanted)]
    call = " | ".join(f"call_{number}" for number in range(len(wanted)))
    return Grammar("lark", "\n".join([f"start: {calls}", f"call: {call}", *rules]))


def _schema(function: dict[str, Any], key: str) -> str:
    parameters = function.get("parameters") or {"type": "object"}
    properties = {"name": {"const": function["name"]}, key: parameters}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["name", key],
        "additionalProperties": False,
    }
    return json.dumps(schema)
