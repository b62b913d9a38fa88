"""Write the grammar of calls of tools, in a model's own notation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.sampling import MAX_GRAMMAR_BYTES
from session_server.text.answer_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_END,
    DEEPSEEK_SEP,
    FUNCTION,
    MISTRAL_ARGS,
    MISTRAL_ID,
    string_parameters,
)
from session_server.text.call_arguments import (
    DEFINITIONS,
    json_value,
    keyword_arguments,
    literal,
    tagged_arguments,
)
from session_server.text.model_text import ModelText
from session_server.text.thought_grammar import marker_of

_LINE: Final = literal("\n")
_COMMA: Final = literal(", ")

_Arguments = Callable[[str, dict[str, Any]], list[str]]
"""The rules of a function's arguments; the first has the name given."""


def call_grammar(model: ModelText, tools: Sequence[str], *, name: str | None, is_one: bool) -> str:
    """Return the Lark grammar of an answer that calls tools and says nothing else.

    Args:
        model: whose notation it is.
        tools: JSON texts of those that may be called.
        name: of the only one; None: any of them.
        is_one: whether it may call only once.

    Raises:
        UnsupportedOperation: calls in this model's notation cannot be held to a tool's schema.
        InvalidRequest: no such tool was given, or they are nested too deeply or too large.
    """
    try:
        functions = [json.loads(tool)["function"] for tool in tools]
        wanted = [each for each in functions if name is None or each["name"] == name]
        if not wanted:
            raise InvalidRequest("tool_choice names none of the tools.", param="tool_choice")
        grammar = "\n".join(_Notation(model, wanted, is_one=is_one).rules())
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"A tool's schema is malformed: {error}", param="tools") from error
    except RecursionError:
        raise InvalidRequest("The tools are nested too deeply.", param="tools") from None
    if len(grammar.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest("The tools are too large for calls to be held to.", param="tools")
    return grammar


def _json_arguments(rule: str, schema: dict[str, Any]) -> list[str]:
    return [f"{rule}: {json_value(schema)}"]


class _Notation:
    """Write calls of `functions` as a model does."""

    def __init__(
        self, model: ModelText, functions: Sequence[dict[str, Any]], *, is_one: bool
    ) -> None:
        self._model = model
        self._functions = functions
        self._is_one = is_one

    def rules(self) -> list[str]:
        """Return all rules; `start` is the first."""
        markers = self._model.answer_format.call_markers
        if self._model.answer_format.is_harmony:
            return self._harmony()
        if FUNCTION in markers:
            return self._tagged(in_call="<tool_call>" in markers)
        if "<tool_call>" in markers:
            begin, end = self._mark("<tool_call>"), self._mark("</tool_call>")
            start = self._several(f"{begin} {_LINE} call {_LINE} {end}", _LINE)
            return [f"start: {start}", *self._objects("arguments")]
        if "[TOOL_CALLS]" in markers:
            return self._mistral()
        if "<|tool_call|>" in markers:
            begin, end = self._mark("<|tool_call|>"), self._mark("<|/tool_call|>")
            start = f'start: {begin} "[" {self._several("call", _COMMA)} "]" {end}?'
            return [start, *self._objects("arguments")]
        if "<｜tool▁calls▁begin｜>" in markers:
            return self._deepseek()
        return self._python_or_bare()

    def _harmony(self) -> list[str]:
        channel, constrain = self._mark("<|channel|>"), self._mark("<|constrain|>")
        head = f'{channel} "commentary to=functions." NAME (" " {constrain} "json")?'
        return ["start: call", *self._calls(f"{head} {self._mark('<|message|>')} ARGUMENTS")]

    def _tagged(self, *, in_call: bool) -> list[str]:
        call = "call"
        if in_call:
            begin, end = self._mark("<tool_call>"), self._mark("</tool_call>")
            call = f"{begin} {_LINE} call {_LINE} {end}"
        strings = string_parameters(tuple(json.dumps({"function": f}) for f in self._functions))
        own = iter(self._functions)

        def arguments(rule: str, schema: dict[str, Any]) -> list[str]:
            return tagged_arguments(rule, schema, strings[next(own)["name"]])

        form = '"<function=" NAME ">\\n" ARGUMENTS "</function>"'
        return [f"start: {self._several(call, _LINE)}", *self._calls(form, arguments)]

    def _mistral(self) -> list[str]:
        """Write a list of objects; or, as later tokenizers have it, each behind its name."""
        mark = self._mark("[TOOL_CALLS]")
        listed = f'{mark} " "? "[" {self._several("call", _COMMA)} "]"'
        if self._model.tokenizer.token_to_id(MISTRAL_ARGS) is None:
            return [f"start: {listed}", *self._objects("arguments")]
        given = f"({self._mark(MISTRAL_ID)} /[a-zA-Z0-9]{{9}}/)?"
        form = f"{mark} NAME {given} {self._mark(MISTRAL_ARGS)} ARGUMENTS"
        return [f"start: {self._several('call', '')}", *self._calls(form)]

    def _deepseek(self) -> list[str]:
        """Write V3.1's calls, or V3's: the name behind a word, and JSON in a fence."""
        begin, end = self._mark("<｜tool▁calls▁begin｜>"), self._mark("<｜tool▁calls▁end｜>")
        parts = self._mark(DEEPSEEK_SEP)
        fenced = f'"function" {parts} NAME "\\n```json\\n" ARGUMENTS "\\n```"'
        form = f"{self._mark(DEEPSEEK_BEGIN)} ({fenced} | NAME {parts} ARGUMENTS) "
        start = f"start: {begin} {self._several('call', f'{_LINE}?')} {end}"
        return [start, *self._calls(form + self._mark(DEEPSEEK_END))]

    def _python_or_bare(self) -> list[str]:
        markers = self._model.answer_format.call_markers
        form = 'NAME "(" ARGUMENTS ")"'
        if "<|tool_call_start|>" in markers:
            begin, end = self._mark("<|tool_call_start|>"), self._mark("<|tool_call_end|>")
            start = f'start: {begin} "[" {self._several("call", _COMMA)} "]" {end}'
            return [start, *self._calls(form, keyword_arguments)]
        if "<function_calls>" in markers:
            begin, end = self._mark("<function_calls>"), self._mark("</function_calls>")
            start = f"start: {begin} {_LINE}? {self._several('call', _LINE)} {_LINE}? {end}"
            return [start, *self._calls(form, keyword_arguments)]
        if self._model.answer_format.has_bare_calls:
            return ["start: call", *self._objects("parameters")]
        raise UnsupportedOperation("This model has no notation of calls.", param="tool_choice")

    def _objects(self, key: str) -> list[str]:
        """Return the rules of calls that are objects, whose arguments are the member `key`."""
        calls = " | ".join(f"call_{number}" for number in range(len(self._functions)))
        rules = [
            f"call_{number}: {json_value(_object_of(function, key))}"
            for number, function in enumerate(self._functions)
        ]
        return [f"call: {calls}", *rules]

    def _calls(self, form: str, arguments: _Arguments = _json_arguments) -> list[str]:
        """Return the rules of calls in which NAME and ARGUMENTS stand for those of a function."""
        calls = " | ".join(f"call_{number}" for number in range(len(self._functions)))
        rules = [f"call: {calls}"]
        for number, function in enumerate(self._functions):
            own = form.replace("ARGUMENTS", f"arguments_{number}")
            rules.append(f"call_{number}: {own.replace('NAME', literal(function['name']))}")
            rules += arguments(f"arguments_{number}", _parameters_of(function))
        return rules

    def _several(self, call: str, between: str) -> str:
        return call if self._is_one else f"{call} ({between} {call})*"

    def _mark(self, text: str) -> str:
        return marker_of(self._model, text)


def _object_of(function: dict[str, Any], key: str) -> dict[str, Any]:
    parameters = _parameters_of(function)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
        **{name: parameters[name] for name in DEFINITIONS & parameters.keys()},
    }


def _parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", **(function.get("parameters") or {})}
