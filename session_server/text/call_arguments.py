"""Write the rules of a call's arguments: as JSON, as tagged parameters or as keywords.

Every form of arguments is what `CallReader` reads back as values that fit the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from session_server.core.errors import UnsupportedOperation
from session_server.core.grammar import JSON_FORM
from session_server.text.answer_calls import is_name

_SPACING: Final = {"whitespace_pattern": JSON_FORM["whitespace_pattern"]}

_NOTES: Final = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "$id", "strict"),
}
"""Members of a schema that hold nothing."""

DEFINITIONS: Final = {"$defs", "definitions"}
"""Members of a schema that others in it refer to, from its root."""

_OBJECT: Final = {"type", "properties", "required", "additionalProperties"} | DEFINITIONS
_TEXT: Final = {"type", "minLength", "maxLength", "pattern"} | DEFINITIONS
_VALUES: Final = {"type", "enum", "const"} | DEFINITIONS
_WORDS: Final = {"boolean": ("True", "False"), "null": ("None",)}

_END: Final = "</parameter>"
_LAST: Final = re.compile(r"(?<!\\)(?:\\\\)*\$$")
_NO_END: Final = r"(/(?s:.*)/ & ~/(?s:.*)<\/parameter>(?s:.*)/)"


class _Object(msgspec.Struct):
    """What is read of a schema of parameters."""

    type: Literal["object"] = "object"
    properties: dict[str, dict[str, Any] | bool] = {}
    required: list[str] = []


class _Text(msgspec.Struct, rename="camel"):
    """What is read of a schema of strings."""

    type: str | list[str] = msgspec.field(default_factory=lambda: ["string", "null"])
    enum: list[Any] | None = None
    any_of: list[dict[str, Any]] = []
    min_length: Annotated[int, Meta(ge=0)] = 0
    max_length: Annotated[int, Meta(ge=0)] | None = None
    pattern: str | None = None


class _Argument(NamedTuple):
    name: str
    schema: dict[str, Any]
    is_required: bool


def json_value(schema: object) -> str:
    """Return a rule's body: JSON that fits a schema."""
    whole = {"allOf": [schema]} if isinstance(schema, bool) else schema
    assert isinstance(whole, dict), "a schema is an object"
    return f"%json {json.dumps(whole | {'x-guidance': _SPACING})}"


def literal(text: str) -> str:
    """Return what stands for itself in a rule."""
    return json.dumps(text, ensure_ascii=False)


def tagged_arguments(rule: str, schema: dict[str, Any], strings: Mapping[str, bool]) -> list[str]:
    """Return rules, `rule` the first: parameters in tags, declared ones in their order.

    `strings`: those that are text as it stands, as `string_parameters` has them.

    Raises:
        UnsupportedOperation: such parameters cannot be held to the schema.
    """
    order, rules = [], list[str]()
    for number, argument in enumerate(_arguments_of(schema)):
        own = f"{rule}_{number}"
        order.append(own if argument.is_required else f"{own}?")
        begin = literal(f"<parameter={argument.name}>\n")
        if argument.name in strings:
            rules += [
                f'{own}: {begin} {own.upper()} "\\n"',
                f"{own.upper()}: {_texts(argument)}",
            ]
        else:
            rules += [
                f'{own}: {begin} {own}_value "\\n{_END}\\n"',
                f"{own}_value: {json_value(argument.schema)}",
            ]
    return [f"{rule}: {' '.join(order)}" if order else f'{rule}: ""', *rules]


def keyword_arguments(rule: str, schema: dict[str, Any]) -> list[str]:
    """Return rules, `rule` the first: arguments by their names, declared ones in their order.

    Raises:
        UnsupportedOperation: such arguments cannot be held to the schema.
    """
    arguments = _arguments_of(schema)
    rules = [f"{rule}: {rule}_first_0"]
    for number, argument in enumerate(arguments):
        own, rest = f"{rule}_{number}", f"{rule}_more_{number + 1}"
        words = "".join(f" | {literal(word)}" for word in sorted(_words_of(argument.schema)))
        first = "" if argument.is_required else f" | {rule}_first_{number + 1}"
        rules += [
            f"{rule}_first_{number}: {own} {rest}{first}",
            f'{rule}_more_{number}: (", " {own}){"" if argument.is_required else "?"} {rest}',
            f"{own}: {literal(f'{argument.name}=')} ({own}_value{words})",
            f"{own}_value: {json_value(argument.schema)}",
        ]
    return [*rules, f'{rule}_first_{len(arguments)}: ""', f'{rule}_more_{len(arguments)}: ""']


def _arguments_of(schema: dict[str, Any]) -> Sequence[_Argument]:
    _refuse_others(schema, _OBJECT)
    read = msgspec.convert(schema, _Object)
    definitions = {key: schema[key] for key in DEFINITIONS & schema.keys()}
    if not set(read.required) <= read.properties.keys():
        raise _refusal("required parameters that are not declared")
    arguments = []
    for name, own in read.properties.items():
        if not is_name(name):
            raise _refusal("names of parameters that are no words")
        whole = {"allOf": [own]} if isinstance(own, bool) else own
        arguments.append(_Argument(name, whole | definitions, name in read.required))
    return arguments


def _texts(argument: _Argument) -> str:
    """Return the body of a terminal: text as it stands, and the tag behind it."""
    forms = list(_text_forms(argument.schema))
    if not forms:
        raise _refusal("strings of which none can be written")
    if "" in forms:
        return f'{_NO_END} "{_END}"'
    held = " | ".join(f"({form})" for form in forms)
    return f'({held}) "\\n{_END}"'


def _text_forms(schema: dict[str, Any]) -> Iterator[str]:
    """Yield what a string may be, "" for anything."""
    read = msgspec.convert(schema, _Text)
    kinds = read.type if isinstance(read.type, list) else [read.type]
    values = [schema["const"]] if "const" in schema else read.enum
    if read.any_of:
        _refuse_others(schema, {"anyOf"} | DEFINITIONS)
        for part in read.any_of:
            yield from _text_forms(part)
        return
    _refuse_others(schema, _TEXT if values is None else _VALUES)
    if "null" in kinds and (values is None or None in values):
        yield literal("null")
    if "string" not in kinds:
        return
    if values is None:
        yield _bound(read)
    else:
        texts = (each for each in values if isinstance(each, str) and _END not in each)
        yield from map(literal, texts)


def _bound(schema: _Text) -> str:
    """Return the form of a string within its bounds, "" without any."""
    parts = []
    if schema.min_length or schema.max_length is not None:
        most = "" if schema.max_length is None else schema.max_length
        parts.append(f"/(?s:.{{{schema.min_length},{most}}})/")
    if schema.pattern is not None:
        parts.append(f"/{_searched(schema.pattern)}/")
    return " & ".join([*parts, _NO_END]) if parts else ""


def _searched(pattern: str) -> str:
    """Return a regular expression of the whole texts in which `pattern` is found."""
    is_first, is_last = pattern.startswith("^"), _LAST.search(pattern) is not None
    inner = pattern[is_first : len(pattern) - is_last]
    anything = "(?s:.*)"
    whole = f"{'' if is_first else anything}(?:{inner}){'' if is_last else anything}"
    return re.sub(r"(?s)(\\.)|([/\n])", _escaped, whole)


def _escaped(found: re.Match[str]) -> str:
    return found[1] or {"/": r"\/", "\n": r"\n"}[found[2]]


def _words_of(schema: dict[str, Any]) -> set[str]:
    """Return what Python has for values that JSON writes in another way."""
    own = {key: value for key, value in schema.items() if key not in _NOTES | DEFINITIONS}
    match own:
        case {"anyOf": [*parts], **others} if not others:
            return {word for part in parts for word in _words_of(part)}
        case {"type": kinds, **others} if not others:
            kinds = kinds if isinstance(kinds, list) else [kinds]
            return {word for kind in kinds for word in _WORDS.get(str(kind), ())}
        case _:
            return set()


def _refuse_others(schema: dict[str, Any], known: set[str]) -> None:
    others = schema.keys() - known - _NOTES
    if others:
        raise _refusal(f"`{min(others)}` there")


def _refusal(what: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"Calls of this model cannot be held to their schemas: {what}.", param="tools"
    )
