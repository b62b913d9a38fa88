"""Random JSON schemas of what clients write, each of which bounds its answers."""

from __future__ import annotations

from random import Random
from typing import Any

KEYS = ("name", "age", "kind", "tags", "note", "score", "when", "parts")
MAX_DEPTH = 3


def schema_of(rng: Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose answers have an end."""
    plain = [_integer, _number, _string, _enum, _const, _boolean, _pattern, _format]
    nested = [_object, _object, _array, _any_of, _optional]
    kinds = nested if depth == 0 else [*plain, *nested] if depth < MAX_DEPTH else plain
    return rng.choice(kinds)(rng, depth)


def _integer(rng: Random, _: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}


def _number(rng: Random, _: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {
            "type": "integer",
            "multipleOf": rng.choice([2, 5, 10]),
            "minimum": 0,
            "maximum": 99,
        }
    return {"enum": [0.5, 1.25, -3, 1e3]}


def _string(rng: Random, _: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 5)}


def _enum(rng: Random, _: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "blue", 3, None, True, "a b", '"', "\u00e9"], 3)}


def _const(rng: Random, _: int) -> dict[str, Any]:
    return {"const": rng.choice(["x", 7, None, [1, 2], {"a": "b"}])}


def _boolean(_: Random, __: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _pattern(rng: Random, _: int) -> dict[str, Any]:
    patterns = ["^[a-z]{1,4}$", r"^\d{3}-\d{2}$", "^(ab|cd){1,3}$", "^[A-F0-9]{2,6}$"]
    return {"type": "string", "pattern": rng.choice(patterns)}


def _format(rng: Random, _: int) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}


def _array(rng: Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    items = schema_of(rng, depth + 1)
    return {
        "type": "array",
        "items": items,
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def _object(rng: Random, depth: int) -> dict[str, Any]:
    keys = rng.sample(KEYS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {key: schema_of(rng, depth + 1) for key in keys},
        "required": [key for key in keys if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _any_of(rng: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema_of(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _optional(rng: Random, depth: int) -> dict[str, Any]:
    """A definition that is referred to, as pydantic writes optional models."""
    if depth > 0:
        return _object(rng, depth)
    return {
        "$defs": {"Part": _object(rng, depth + 1)},
        "type": "object",
        "properties": {"part": {"anyOf": [{"$ref": "#/$defs/Part"}, {"type": "null"}]}},
        "required": ["part"],
        "additionalProperties": False,
    }
