"""Every bound of the server, for docs/limits.md: what is limited, by how much, what happens there.

Three sources. Settings carry a `Bound` beside their range; fields that clients send carry msgspec
constraints; constants of the code are named in `tests.docs.constants` and `tests.docs.pacing`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from session_server.config import Settings
from session_server.core.bounds import Bound
from session_server.flags import FLAGS
from session_server.protocol import (
    chat_completions,
    completions,
    messages,
    realtime_messages,
    response_items,
    responses,
    sglang,
    tools,
)
from tests.docs.constants import GROUPS
from tests.docs.pacing import ARITHMETIC, BOUND_NOTHING, HARMLESS_BEGINNINGS, ONLY_WEIGHTS
from tests.docs.wire_fields import fields_of, number, range_text, sized

ROOT = Path(__file__).resolve().parents[2]

BODIES: dict[str, type[msgspec.Struct]] = {
    "turn": messages.TurnFields,
    "draft": messages.DraftFields,
    "message": messages.MessageBody,
    "call of a message": messages.CallBody,
    "function of a tool": tools.FunctionBody,
    "sampling": messages.SamplingBody,
    "session": messages.OpenBody,
    "session update": messages.UpdateBody,
    "`session.auth`": messages.SessionAuth,
    "`ping`": messages.Ping,
    "`ack`": messages.Ack,
    "SGLang: `/open_session`": sglang.OpenSessionBody,
    "SGLang: `/generate`": sglang.GenerateBody,
    "SGLang: `sampling_params`": sglang.GenerateSampling,
    "SGLang: `session_params`": sglang.SessionParamsBody,
    "OpenAI: chat completion": chat_completions.ChatBody,
    "OpenAI: completion": completions.CompletionBody,
    "OpenAI: chat message": chat_completions.ChatMessageBody,
    "OpenAI: call of a message": tools.ToolCallBody,
    "OpenAI: response": responses.ResponseCreateBody,
    "OpenAI: compaction": responses.CompactBody,
    "OpenAI: conversation": responses.ConversationCreateBody,
    "OpenAI: item of a response's input": response_items.InputItemBody,
    "Realtime: `session`": realtime_messages.SessionSettingsBody,
    "Realtime: `response`": realtime_messages.ResponseSettingsBody,
    "Realtime: a message": realtime_messages.MessageItemBody,
    "Realtime: its part": realtime_messages.ItemPartBody,
    "Realtime: a call": realtime_messages.CallItemBody,
    "Realtime: its output": realtime_messages.CallOutputItemBody,
    "Realtime: a tool": realtime_messages.RealtimeToolBody,
    "Realtime: `input_text.append`": realtime_messages.InputTextAppend,
    "Realtime: an item's place": realtime_messages.RealtimeItemCreate,
}

PROVERS = ("sim", "demo", "bench", "inspector", "client")
"""Packages of `session_server` that serve nobody."""

TOOLS = ("chat.py", "past.py", "doctor.py", "auditor.py", "key_command.py", "local_server.py")

WIRE_MODULES = (
    "session_server.core.sampling",
    "session_server.protocol.chat_answer",
    "session_server.protocol.chat_completions",
    "session_server.protocol.completions",
    "session_server.protocol.messages",
    "session_server.protocol.openai_body",
    "session_server.protocol.response_items",
    "session_server.protocol.responses",
    "session_server.protocol.realtime_messages",
    "session_server.protocol.sglang",
    "session_server.protocol.tools",
)
"""Their constants are constraints of wire types, which the table of fields shows."""


def setting_table() -> str:
    """Every numeric setting: flag, default, range, unit, what happens at the limit."""

    def rows() -> Iterator[str]:
        yield "| what | flag | default | range | at the limit |"
        yield "|---|---|---|---|---|"
        names = {(flag.part, flag.field): flag.names[0] for flag in FLAGS}
        for part, name, field in numeric_settings():
            bound = bound_of(field)
            assert bound is not None, f"{part}.{name} has no Bound"
            flag = names.get((part, name), "")
            default = "none" if field.default is None else _shown(field.default, bound.unit)
            yield (
                f"| {field.description} | {f'`{flag}`' if flag else ''} | {default} | "
                f"{_range_with_unit(field, bound.unit)} | {bound.at_limit} |"
            )

    return "\n".join(rows())


def field_table() -> str:
    """Every bounded field that a client sends."""

    def rows() -> Iterator[str]:
        yield "| body | field | bound |"
        yield "|---|---|---|"
        for title, struct in BODIES.items():
            for field in fields_of(struct):
                if field.is_bounded:
                    yield f"| {title} | `{field.name}` | {field.kind} |"

    return "\n".join(rows())


def constant_table() -> str:
    """Every named constant, by what it is about."""

    def rows() -> Iterator[str]:
        for title, constants in GROUPS.items():
            yield f"### {title}"
            yield ""
            yield "| what | bound | at the limit |"
            yield "|---|---|---|"
            for constant in constants:
                size = sized(constant.value, constant.unit)
                yield f"| {constant.what} | {size} | {constant.at_limit} |"
            yield ""

    return "\n".join(rows()).rstrip()


def numeric_settings() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield part, name and field of every setting that is a number."""
    for part, of_part in Settings.model_fields.items():
        for name, field in type(of_part.default).model_fields.items():
            kinds = {field.annotation, *get_args(field.annotation)}
            if kinds & {int, float}:
                yield part, name, field


def bound_of(field: FieldInfo) -> Bound | None:
    """Return the `Bound` of a setting."""
    return next((item for item in field.metadata if isinstance(item, Bound)), None)


def missing_constants() -> list[str]:
    """Return the numbers in the code of what serves that are neither listed nor exempt."""
    named = {constant.path for group in GROUPS.values() for constant in group}
    return sorted(path for path in constants_in_code() if path not in named | BOUND_NOTHING)


@cache
def constants_in_code() -> frozenset[str]:
    """Return the import path of every module-level number of what serves that may be a bound."""
    return frozenset(_constants_in_code())


def _constants_in_code() -> Iterator[str]:
    for package in ("session_server", "cache"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            if package == "session_server" and (parts[1] in PROVERS or parts[1] in TOOLS):
                continue
            module = ".".join(parts).removesuffix(".py")
            if module in (*WIRE_MODULES, *ONLY_WEIGHTS, *ARITHMETIC):
                continue
            for name in _numbers(ast.parse(path.read_text("utf-8"))):
                if not name.removeprefix("_").startswith(HARMLESS_BEGINNINGS):
                    yield f"{module}:{name}"


def is_bound_name(name: str) -> bool:
    """Whether a constant's name says that it bounds something."""
    bare = name.removeprefix("_")
    ends = ("_TIMEOUT_S", "_DEADLINE_S", "_GRACE_S", "_LIMIT_S", "_PATIENCE_S", "_WAIT_S")
    return bare.startswith("MAX_") or bare.endswith(ends)


def _numbers(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's numbers, without importing it."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        if name.isupper() and _is_number(value):
            yield name


def _is_number(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=constant):
            return isinstance(constant, int | float) and not isinstance(constant, bool)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) or _is_number(right)
        case _:
            return False


def range_of(field: FieldInfo) -> str:
    """Describe the range of a setting."""
    found = _bounds_of(field)
    return range_text(found.get("ge"), found.get("gt"), found.get("le"), found.get("lt"))


def _bounds_of(field: FieldInfo) -> dict[str, Any]:
    kinds = ((Ge, "ge"), (Gt, "gt"), (Le, "le"), (Lt, "lt"))
    return {
        name: getattr(item, name)
        for item in field.metadata
        for kind, name in kinds
        if isinstance(item, kind)
    }


def _range_with_unit(field: FieldInfo, unit: str) -> str:
    if unit == "bytes":
        found = _bounds_of(field)
        return f"{sized(found['ge'], unit)} to {sized(found['le'], unit)}"
    return f"{range_of(field).removeprefix(', ')} {unit}".rstrip()


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        return sized(value, unit)
    return number(value) if unit else str(value)
