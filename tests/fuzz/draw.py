"""Draws of what a peer may send: from the published schemas, then made wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

_ODD: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1),
    *(1.5, -0.0, 1e-320, 1e308, 10**400, "", "a", "\x00", "é\u2028", "\ud800", "x" * 300),
    *("user", "auto", "none", "text", "<|im_end|>", "</think>", "1e5", [], {}, [[]], {"": None}),
)
_TEXTS: Final = ("", "a", "Hello.", "s_1", "user", "\x00\x7f", "é𝄞", "<|im_start|>", "y" * 80)
_NAMES: Final = ("a", "type", "id", "model", "", "x" * 65)
_BYTES: Final = (b"", b"\xff", b"\x00", b'"', b"}", b",", b"NaN", b"\\ud800", b"1e999", b"\xed\xa0")

MAX_DEPTH: Final = 6
MAX_ENTRIES: Final = 3


class Draw:
    """Draw JSON values of published types and bytes that are nearly one.

    `texts`: what strings are besides odd ones, ids that exist for example.
    """

    def __init__(
        self, random: Random, schemas: Mapping[str, Any], texts: tuple[str, ...] = _TEXTS
    ) -> None:
        self._random = random
        self._schemas = schemas
        self._texts = texts

    def payload(self, name: str) -> bytes:
        """A message of a type: right one time in three, else with something wrong in it."""
        random = self._random
        how = random.random()
        value = self._value(self._schemas[name], 0)
        if how > 1 / 3:
            value = self._mutated(value)
        encoded = json.dumps(value, ensure_ascii=random.random() < 0.5).encode(
            errors="surrogatepass"
        )
        return self._torn(encoded) if how > 0.85 else encoded

    def value(self, schema: dict[str, Any]) -> Any:
        """A value of a schema."""
        return self._value(schema, 0)

    def odd(self) -> Any:
        """A value that fits nowhere, or in a place that is not this one."""
        return self._random.choice(_ODD)

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self._value(self._random.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        make = _MAKERS.get(schema.get("type", ""))
        return self.odd() if make is None or depth > MAX_DEPTH else make(self, schema, depth)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        random, required = self._random, schema.get("required", ())
        known = schema.get("properties", {})
        chance = min(1.0, 4 / len(known)) if known else 0.0
        made = {
            name: self._value(inner, depth + 1)
            for name, inner in known.items()
            if name in required or random.random() < chance
        }
        free = schema.get("additionalProperties")
        if isinstance(free, dict):
            for _ in range(random.randrange(MAX_ENTRIES)):
                made[random.choice((*_NAMES, "12"))] = self._value(free, depth + 1)
        return made

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        count = max(self._random.randrange(MAX_ENTRIES), schema.get("minItems", 0))
        fixed = schema.get("prefixItems")
        if fixed:
            return [self._value(inner, depth + 1) for inner in fixed]
        items = schema.get("items")
        return [
            self._value(items, depth + 1) if isinstance(items, dict) else self.odd()
            for _ in range(count)
        ]

    def _number(self, schema: dict[str, Any], _: int) -> Any:
        low, high = schema.get("minimum", -2), schema.get("maximum", 1 << 20)
        return self._random.choice((low, high, 0, 1, 2, 5))

    def _string(self, schema: dict[str, Any], _: int) -> str:
        if "[0-9]" in schema.get("pattern", ""):
            return "12"
        text = self._random.choice(self._texts)
        return text if len(text) >= schema.get("minLength", 0) else "s_1"

    def _mutated(self, value: Any) -> Any:
        """The value with one place of it changed."""
        random = self._random
        if not isinstance(value, dict | list) or not value or random.random() < 0.15:
            return self.odd()
        copy: Any = value.copy()
        places = list(copy) if isinstance(copy, dict) else list(range(len(copy)))
        place = random.choice(places)
        how = random.random()
        if how < 0.55:
            copy[place] = self._mutated(copy[place])
        elif how < 0.7:
            del copy[place]
        elif isinstance(copy, dict):
            copy[random.choice(_NAMES)] = copy.get(random.choice(places))
        else:
            copy.insert(place, self.odd())
        return copy

    def _torn(self, encoded: bytes) -> bytes:
        """The bytes with a piece cut, doubled, or replaced by others; or nested too deeply."""
        random = self._random
        start = random.randrange(len(encoded) + 1)
        end = min(len(encoded), start + random.randrange(9))
        middle = random.choice((*_BYTES, encoded[start:end] * 2, b"[" * 3000, b'{"a":' * 1500))
        return encoded[:start] + middle + (b"" if random.random() < 0.3 else encoded[end:])


_MAKERS: Final[dict[str, Callable[[Draw, dict[str, Any], int], Any]]] = {
    "object": Draw._object,
    "array": Draw._array,
    "integer": Draw._number,
    "number": Draw._number,
    "string": Draw._string,
    "boolean": lambda draw, schema, depth: draw._random.random() < 0.5,
    "null": lambda draw, schema, depth: None,
}
