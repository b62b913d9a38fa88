"""Look up, in the wire types, the values that a field of a message may have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


def values_at(kind: Any, path: str) -> tuple[str, ...]:
    """Return the values that a field may have if they are few, otherwise nothing.

    Args:
        kind: the type of the message.
        path: from the message to the field as `msgspec` writes it: `input[...].role`.
    """
    places = [_type_info(kind)]
    for step in _STEP.findall(path):
        places = [inner for place in places for inner in _inside(place, step)]
    values = [value for place in places for value in _values(place)]
    return tuple(dict.fromkeys(values))


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
