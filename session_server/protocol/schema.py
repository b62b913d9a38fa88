"""Look up, in the wire types, the fields that an object may have and the values of a field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import msgspec
from msgspec import inspect

from session_server.core.nearest import did_you_mean, nearest

_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


class _TypeOnly(msgspec.Struct):
    type: str


def kind_of(kind: Any, frame: str) -> Any:
    """Return which of the frames that `kind` is a union of says its `type`; `kind` if none does."""
    try:
        tag = msgspec.json.decode(frame, type=_TypeOnly).type
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return kind
    return next((each for each in get_args(kind) if each.__struct_config__.tag == tag), kind)


def values_at(kind: Any, path: str) -> tuple[str, ...]:
    """Return the values that a field may have if they are few, otherwise nothing.

    Args:
        kind: the type of the message.
        path: from the message to the field as `msgspec` writes it: `input[...].role`.
    """
    values = [value for place in _places(kind, path) for value in _values(place)]
    return tuple(dict.fromkeys(values))


def unknown_field_hint(kind: Any, path: str, name: str) -> str:
    """Return the end of an error message about a field that the object at `path` does not have:
    what to send instead, where such a field is, one that is named alike, or those there are.

    What to send instead, the type says itself: `instead`, by the names of such fields.
    """
    objects = [each for place in _places(kind, path) for each in _structs(place)]
    fields = {field.encode_name: field.type for each in objects for field in each.fields}
    for each in objects:
        if name in (instead := getattr(each.cls, "instead", {})):
            return f"; {instead[name]}"
    for outer, inner in fields.items():
        if any(name == field.encode_name for each in _structs(inner) for field in each.fields):
            return did_you_mean(f"{outer}.{name}")
    if alike := nearest(name, fields):
        return did_you_mean(alike)
    # Objects of several types have no fields in common that are worth a list.
    if len(objects) != 1 or not fields:
        return ""
    return f"; there {'are' if len(fields) > 1 else 'is only'} {', '.join(fields)}"


def _places(kind: Any, path: str) -> list[inspect.Type]:
    places = [_type_info(kind)]
    for step in _STEP.findall(path):
        places = [inner for place in places for inner in _inside(place, step)]
    return places


def _structs(place: inspect.Type) -> list[inspect.StructType]:
    return [each for each in _unwrapped(place) if isinstance(each, inspect.StructType)]


@cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _unwrapped(place: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the types that a value at `place` may have."""
    match place:
        case inspect.Metadata(type=inner):
            yield from _unwrapped(inner)
        case inspect.UnionType(types=types):
            for each in types:
                yield from _unwrapped(each)
        case _:
            yield place


def _inside(place: inspect.Type, step: str) -> Iterator[inspect.Type]:
    for outer in _unwrapped(place):
        match outer:
            case inspect.StructType(fields=fields, tag_field=tag_field, tag=tag):
                if step == tag_field:
                    yield inspect.LiteralType((tag,))
                yield from (field.type for field in fields if field.encode_name == step)
            case inspect.ListType(item_type=inner) | inspect.DictType(value_type=inner):
                if step.startswith("["):
                    yield inner
            case _:
                continue


def _values(place: inspect.Type) -> Iterator[str]:
    for each in _unwrapped(place):
        if isinstance(each, inspect.LiteralType):
            yield from map(str, each.values)
