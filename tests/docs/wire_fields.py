"""Describe the fields of wire types for the generated tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

NAMED_PATTERNS = {
    r"^[A-Za-z0-9_.\-]{1,64}$(?!\n)": "1 to 64 characters of `A-Z a-z 0-9 _ . -`",
    r"^[A-Za-z0-9_.:\-]{1,64}$(?!\n)": "1 to 64 characters of `A-Z a-z 0-9 _ . : -`",
    r"^[0-9]{1,10}$(?!\n)": "a token id in digits",
    r"^[a-z_]{1,32}$(?!\n)": "1 to 32 characters of `a-z _`",
}


@dataclass(frozen=True)
class WireField:
    """One field of a body. `is_bounded`: its type says a range, a length or a pattern. `default` is
    None where there is none. `about`: what its type says of it. `is_choice`: of a few values."""

    name: str
    kind: str
    is_required: bool
    default: Any
    is_bounded: bool
    about: str
    is_choice: bool


def fields_of(struct: type[msgspec.Struct]) -> Iterator[WireField]:
    """Yield the fields of a wire type in the order they are declared."""
    described = inspect.type_info(struct)
    assert isinstance(described, inspect.StructType)
    for field in described.fields:
        yield WireField(
            name=field.encode_name,
            kind=kind_of(field.type),
            is_required=field.required,
            default=None if field.default is msgspec.NODEFAULT else field.default,
            is_bounded=_is_bounded(field.type),
            about=_about(field.type),
            is_choice=_is_choice(field.type),
        )


def kind_of(described: inspect.Type) -> str:
    """Describe a type: "integer, 0 to 20", "list of up to 16 strings"."""
    match described:
        case inspect.Metadata(type=inner):
            return kind_of(inner)
        case inspect.UnionType(types=types):
            kinds = [kind_of(each) for each in types if not isinstance(each, inspect.NoneType)]
            return ", or ".join(kinds)
        case inspect.ListType(item_type=item, min_length=least, max_length=most):
            return f"list{length_text(least, most, 'entries')}; each {kind_of(item)}"
        case inspect.VarTupleType(item_type=item):
            return f"list; each {kind_of(item)}"
        case inspect.TupleType(item_types=items):
            return f"[{', '.join(map(kind_of, items))}]"
        case inspect.DictType(key_type=key, value_type=value, max_length=most):
            entries = length_text(None, most, "entries")
            return f"object{entries}; keys {kind_of(key)}; values {kind_of(value)}"
        case inspect.StructType(cls=cls):
            return f"object ({cls.__name__.removesuffix('Body')})"
        case _:
            return _scalar_kind(described)


def _is_choice(described: inspect.Type) -> bool:
    match described:
        case inspect.Metadata(type=inner):
            return _is_choice(inner)
        case inspect.UnionType(types=types):
            return any(map(_is_choice, types))
        case _:
            return isinstance(described, inspect.LiteralType)


def _about(described: inspect.Type) -> str:
    match described:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            return str((extra or {}).get("description") or _about(inner))
        case inspect.UnionType(types=types):
            return next(filter(None, map(_about, types)), "")
        case _:
            return ""


def _scalar_kind(described: inspect.Type) -> str:
    match described:
        case inspect.IntType() | inspect.FloatType():
            name = "integer" if isinstance(described, inspect.IntType) else "number"
            return name + range_text(described.ge, described.gt, described.le, described.lt)
        case inspect.StrType(min_length=least, max_length=most, pattern=None):
            return "string" + length_text(least, most, "characters")
        case inspect.StrType(pattern=pattern):
            return f"string, {NAMED_PATTERNS[str(pattern)]}"
        case inspect.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case inspect.BoolType():
            return "true or false"
        case inspect.AnyType():
            return "anything"
        case _:
            raise AssertionError(f"no words for {described}")


def range_text(ge: float | None, gt: float | None, le: float | None, lt: float | None) -> str:
    """Describe a range: ", 0 to 20", ", above 0, up to 1"."""
    if ge is None and gt is None and le is None and lt is None:
        return ""
    low = f"{number(ge)}" if ge is not None else ""
    if gt is not None:
        low = f"above {number(gt)}"
    high = f"to {number(le)}" if le is not None else ""
    if lt is not None:
        high = f"to below {number(lt)}"
    return f", {low} {high}".rstrip()


def length_text(least: int | None, most: int | None, unit: str) -> str:
    """Describe a length: " of 1 to 256 entries", " of up to 16 entries"."""
    if most is None:
        return ""
    return f" of {least} to {number(most)} {unit}" if least else f" of up to {number(most)} {unit}"


def number(value: float) -> str:
    """Write a number as people read it: powers of two that are large as such."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:g}"
    whole = int(value) if abs(value) < 1e18 or isinstance(value, int) else None
    if whole is None:
        return f"{value:g}"
    for offset, sign in ((0, ""), (1, " - 1")):
        power = whole + offset
        if power > 1 << 20 and power & (power - 1) == 0:
            return f"2^{power.bit_length() - 1}{sign}"
    return f"{whole:,}" if abs(whole) >= 10_000 else str(whole)


def sized(value: float, unit: str) -> str:
    """Write a number with its unit; whole kibibytes, mebibytes and so on as such."""
    if unit == "bytes":
        for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
            size = 1 << power
            if value >= size and value % size == 0:
                return f"{number(value // size)} {name}"
    return f"{number(value)} {unit}".rstrip()


def _is_bounded(described: inspect.Type) -> bool:
    kind = kind_of(described)
    return any(character.isdigit() for character in kind) and "object (" not in kind[:8]
