"""Turn what clients ask an answer to match into one `Grammar`.

Only one may be asked for, under whatever name. Whether it is a grammar is found out where it is
compiled; here only its form counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.sampling import MAX_GRAMMAR_BYTES, Grammar

JsonSchema = dict[str, Any] | Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)]
"""A JSON schema, or its text."""

GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)]
Choices = Annotated[
    list[Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)]], Meta(min_length=1, max_length=4096)
]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer must match, under vLLM's names. `grammar` is a Lark grammar."""

    json: JsonSchema | None = None
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    structural_tag: Any = None


def only(asked: Mapping[str, Grammar | None]) -> Grammar | None:
    """Return the one grammar among those asked for under these names; None without any.

    Raises:
        InvalidRequest: there are several.
    """
    given = {name: grammar for name, grammar in asked.items() if grammar is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise InvalidRequest(f"{first} and {second} cannot both be set.", param=second)
    return next(iter(given.values()), None)


def of_schema(schema: JsonSchema | None, param: str) -> Grammar | None:
    """Return the grammar of a JSON schema. Raises InvalidRequest."""
    if schema is None or isinstance(schema, str):
        return _of_text("json_schema", schema, param)
    try:
        text = msgspec.json.encode(schema).decode()
    except (RecursionError, UnicodeEncodeError):
        raise InvalidRequest("The JSON schema cannot be read.", param=param) from None
    return _of_text("json_schema", text, param)


def of_regex(pattern: str | None, param: str) -> Grammar | None:
    """Return the grammar of a regular expression. Raises InvalidRequest."""
    return _of_text("regex", pattern, param)


def of_lark(text: str | None, param: str) -> Grammar | None:
    """Return a Lark grammar. Raises InvalidRequest."""
    return _of_text("lark", text, param)


def of_choices(choices: Sequence[str] | None, param: str) -> Grammar | None:
    """Return the grammar of an answer that is one of several texts. Raises InvalidRequest."""
    if choices is None:
        return None
    return of_lark("start: " + " | ".join(json.dumps(choice) for choice in choices), param)


def of_structured_outputs(body: StructuredOutputs | None) -> Grammar | None:
    """Return the grammar of vLLM's `structured_outputs`. Raises InvalidRequest."""
    if body is None:
        return None
    if body.structural_tag:
        raise UnsupportedOperation(
            "structural_tag is not supported here.", param="structured_outputs.structural_tag"
        )
    return only(
        {
            "structured_outputs.json": of_schema(body.json, "structured_outputs.json"),
            "structured_outputs.json_object": _any_object("structured_outputs.json_object")
            if body.json_object
            else None,
            "structured_outputs.regex": of_regex(body.regex, "structured_outputs.regex"),
            "structured_outputs.choice": of_choices(body.choice, "structured_outputs.choice"),
            "structured_outputs.grammar": of_lark(body.grammar, "structured_outputs.grammar"),
        }
    )


def of_response_format(body: Mapping[str, Any] | None) -> Grammar | None:
    """Return the grammar of OpenAI's `response_format`. Raises InvalidRequest."""
    asked = body or {}
    named = asked.get("json_schema")
    return of_format(asked.get("type", "text"), named, "response_format", ".json_schema")


def of_format(kind: Any, named: Any, param: str, place: str = "") -> Grammar | None:
    """Return the grammar of a format: `text`, `json_object` or `json_schema`.

    `named`: the schema and its name, which lie at `place` in `param`.

    Raises:
        InvalidRequest: it is malformed.
        UnsupportedOperation: it is of another type.
    """
    match kind:
        case "text":
            return None
        case "json_object":
            return _any_object(param)
        case "json_schema":
            if not isinstance(named, dict) or not isinstance(named.get("name"), str):
                raise InvalidRequest("A JSON schema needs a name.", param=param + place)
            schema = named.get("schema")
            if schema is None:
                return _any_object(param)
            if not isinstance(schema, dict):
                raise InvalidRequest("A JSON schema is an object.", param=f"{param}{place}.schema")
            return of_schema(schema, f"{param}{place}.schema")
        case _:
            raise UnsupportedOperation(
                f"{param} is text, json_object or json_schema here.", param=f"{param}.type"
            )


def _any_object(param: str) -> Grammar:
    return Grammar("json_schema", '{"type":"object"}', param=param)


def _of_text(kind: Any, text: str | None, param: str) -> Grammar | None:
    if text is None:
        return None
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("The text is not valid Unicode.", param=param) from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"At most {MAX_GRAMMAR_BYTES} bytes.", param=param)
    return Grammar(kind, text, param=param)
