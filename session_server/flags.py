"""Define the flags of `session-server serve`, under SGLang's names.

A flag of SGLang that has no effect here is accepted with a warning, so that existing start scripts
work; an unknown flag is refused. Help texts and bounds come from `config`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from session_server.config import Settings
from session_server.core.bounds import Bound
from session_server.core.sizes import SIZE_EXAMPLES, exact_size

Place = tuple[str, str]
"""A setting's section and key."""


@dataclass(frozen=True, slots=True)
class Given:
    """Hold a value that somebody gave, its source, and how errors name it there."""

    value: Any
    source: str
    name: str


@dataclass(frozen=True, slots=True)
class Flag:
    """Map the spellings of one flag to the setting it fills. `constant` makes it a switch."""

    names: tuple[str, ...]
    part: str
    field: str
    constant: str | int | None = None


FLAGS: Final = (
    Flag(("--model-path", "--model"), "model", "path"),
    Flag(("--served-model-name",), "model", "served_name"),
    Flag(("--dtype",), "model", "dtype"),
    Flag(("--kv-cache-dtype",), "model", "kv_dtype"),
    Flag(("--device",), "model", "device"),
    Flag(("--context-length",), "model", "context_length"),
    Flag(("--quantize",), "model", "quantize"),
    Flag(("--tensor-parallel-size", "--tp-size", "--tp"), "model", "tensor_parallel_size"),
    Flag(("--attention-backend",), "model", "attention_backend"),
    Flag(("--disable-cuda-graph",), "model", "cuda_graph_max_bs", 0),
    Flag(("--cuda-graph-max-bs",), "model", "cuda_graph_max_bs"),
    Flag(("--threads",), "model", "threads"),
    Flag(("--speculative-draft-model-path",), "model", "draft_path"),
    Flag(("--random-seed",), "model", "random_seed"),
    Flag(("--page-size",), "cache", "page_size"),
    Flag(("--mem-fraction-static",), "cache", "memory_fraction"),
    Flag(("--max-total-tokens",), "cache", "max_total_tokens"),
    Flag(("--swa-full-tokens-ratio",), "cache", "window_ratio"),
    Flag(("--max-resident-sessions",), "cache", "max_resident_sessions"),
    Flag(("--pinned-fraction",), "cache", "pinned_fraction"),
    Flag(("--host-kv-bytes",), "cache", "host_kv_bytes"),
    Flag(("--disk-kv-bytes",), "cache", "disk_kv_bytes"),
    Flag(("--disable-radix-cache",), "cache", "share_prefixes", False),
    Flag(("--memory-check",), "cache", "memory_check"),
    Flag(("--memory-probe-interval",), "cache", "probe_interval_s"),
    Flag(("--engine",), "engine", "mode"),
    Flag(("--max-running-requests",), "engine", "max_running_turns"),
    Flag(("--chunked-prefill-size",), "engine", "chunked_prefill_size"),
    Flag(("--disable-overlap-schedule",), "engine", "overlap", False),
    Flag(("--speculative-algorithm",), "engine", "speculation"),
    Flag(("--speculative-num-draft-tokens",), "engine", "num_draft_tokens"),
    Flag(("--max-engine-restarts",), "engine", "max_restarts"),
    Flag(("--session-ttl",), "sessions", "ttl_s"),
    Flag(("--max-sessions",), "sessions", "max_sessions"),
    Flag(("--session-memory-bytes",), "sessions", "memory_bytes"),
    Flag(("--max-queued-turns",), "sessions", "max_queued_turns"),
    Flag(("--replay-bytes",), "sessions", "replay_bytes"),
    Flag(("--replay-ttl",), "sessions", "replay_ttl_s"),
    Flag(("--store",), "sessions", "store"),
    Flag(("--durability",), "sessions", "durability"),
    Flag(("--advertise-url",), "sessions", "advertise_url"),
    Flag(("--role",), "sessions", "role"),
    Flag(("--host",), "http", "host"),
    Flag(("--port",), "http", "port"),
    Flag(("--admin-host",), "http", "admin_host"),
    Flag(("--admin-port",), "http", "admin_port"),
    Flag(("--api-key",), "http", "api_key"),
    Flag(("--api-key-file",), "http", "api_key_file"),
    Flag(("--ssl-certfile",), "http", "ssl_certfile"),
    Flag(("--ssl-keyfile",), "http", "ssl_keyfile"),
    Flag(("--max-priority",), "http", "max_priority"),
    Flag(("--tenant-limits",), "http", "tenant_limits"),
    Flag(("--no-responses-ws",), "http", "responses_ws", False),
    Flag(("--allow-open",), "http", "allow_open", True),
    Flag(("--allowed-host",), "http", "allowed_hosts"),
    Flag(("--allowed-origin",), "http", "allowed_origins"),
    Flag(("--max-message-bytes",), "http", "max_message_bytes"),
    Flag(("--max-connections",), "http", "max_connections"),
    Flag(("--max-connections-per-address",), "http", "max_connections_per_address"),
    Flag(("--max-input-bytes",), "http", "max_input_bytes"),
    Flag(("--drain-timeout",), "http", "drain_s"),
    Flag(("--log-level",), "http", "log_level"),
    Flag(("--log-format",), "http", "log_format"),
    Flag(("--otlp-traces-endpoint",), "http", "otlp_traces_endpoint"),
    Flag(("--throughput-interval",), "http", "throughput_interval_s"),
    Flag(("--debug-retract-interval",), "debug", "retract_interval"),
)

IGNORED_SWITCHES: Final = (
    "--enable-cache-report",
    "--enable-chunked-prefill",
    "--enable-metrics",
    "--enable-mixed-chunk",
    "--enable-prefix-caching",
    "--enable-request-id-headers",
    "--enable-ssl-refresh",
    "--enable-streaming-session",
    "--enable-torch-compile",
    "--log-requests",
    "--skip-server-warmup",
    "--trust-remote-code",
)
"""Switches that are always on here, such as metrics, or have no counterpart."""

IGNORED_VALUES: Final = (
    "--decode-log-interval",
    "--log-level-http",
    "--max-prefill-tokens",
    "--sampling-backend",
    "--schedule-conservativeness",
    "--schedule-policy",
    "--stream-interval",
    "--watchdog-timeout",
)

_REPEATED: Final = frozenset({"allowed_hosts", "allowed_origins"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of `serve` to `parser`, grouped as the settings are."""
    add_flags(parser, FLAGS)
    for name in IGNORED_SWITCHES:
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name in IGNORED_VALUES:
        parser.add_argument(name, help=argparse.SUPPRESS)


def add_flags(parser: argparse.ArgumentParser, flags: Sequence[Flag]) -> None:
    """Add some flags of `serve`, for `read_settings` to read."""
    for part, settings_field in Settings.model_fields.items():
        model: BaseModel = settings_field.default
        title, _, _ = (type(model).__doc__ or part).partition("\n")
        of_part = [flag for flag in flags if flag.part == part]
        if of_part:
            group = parser.add_argument_group(part, title)
            for flag in of_part:
                _add_flag(group, flag, model)


def read_settings(args: argparse.Namespace) -> Settings:
    """Return the settings that parsed flags give.

    Raises:
        ValueError: a value is out of bounds; the message names the flag and the bound.
    """
    return validated(given_by(args))


def given_by(args: argparse.Namespace) -> dict[Place, Given]:
    """Return what parsed flags give."""
    values = {flag: getattr(args, _destination(flag), None) for flag in FLAGS}
    return {
        (flag.part, flag.field): Given(value, flag.names[0], flag.names[0])
        for flag, value in values.items()
        if value is not None
    }


def validated(given: Mapping[Place, Given]) -> Settings:
    """Return the settings with these values, and defaults elsewhere.

    Raises:
        ValueError: a value is out of bounds; the message names its source and the bound.
    """
    sections: dict[str, dict[str, Any]] = {}
    for (part, field), value in given.items():
        sections.setdefault(part, {})[field] = value.value
    try:
        return Settings.model_validate(sections)
    except ValidationError as error:
        raise ValueError(_explain(error, given)) from None


def ignored_flags(args: argparse.Namespace) -> Sequence[str]:
    """Return the given flags that are accepted and have no effect."""
    names = (*IGNORED_SWITCHES, *IGNORED_VALUES)
    return [name for name in names if getattr(args, name[2:].replace("-", "_"), None)]


def _add_flag(group: argparse._ArgumentGroup, flag: Flag, defaults: BaseModel) -> None:
    description = type(defaults).model_fields[flag.field].description or ""
    options: dict[str, Any] = {"dest": _destination(flag), "default": None}
    if flag.constant is not None:
        group.add_argument(
            *flag.names,
            action="store_const",
            const=flag.constant,
            help=switch_text(flag, description),
            **options,
        )
        return
    if flag.field in _REPEATED:
        options["action"] = "append"
    shown = default_text(type(defaults).model_fields[flag.field])
    shown = shown and f"default: {shown}"
    facts = "; ".join(filter(None, (shown, range_text(type(defaults).model_fields[flag.field]))))
    text = f"{description} ({facts})" if facts else description
    metavar = _choices(type(defaults), flag.field) or _metavar(type(defaults), flag.field)
    group.add_argument(*flag.names, metavar=metavar, help=text.replace("%", "%%"), **options)


def switch_text(flag: Flag, description: str) -> str:
    """Describe a flag that takes no value: what it does, or the flag with a value that it is."""
    if isinstance(flag.constant, bool):
        return description if flag.constant else f"do not {description}"
    place = (flag.part, flag.field)
    valued = next(of for of in FLAGS if (of.part, of.field) == place and of.constant is None)
    return f"the same as `{valued.names[0]} {flag.constant}`"


def default_text(field: FieldInfo) -> str:
    """Describe the default of a setting; nothing where it has none."""
    default = getattr(field.default, "value", field.default)
    default = str(default).lower() if isinstance(default, bool) else default
    return "" if default in (None, ()) else _number_text(field, default)


def range_text(field: FieldInfo) -> str:
    """Describe the range of a setting: "1 to 256", "above 0 to 1"; nothing where it has none."""

    def bound(name: str) -> str:
        found = (getattr(item, name, None) for item in field.metadata)
        return next((_number_text(field, value) for value in found if value is not None), "")

    low = bound("ge") or ("above " + bound("gt") if bound("gt") else "")
    high = bound("le") or ("below " + bound("lt") if bound("lt") else "")
    return f"{low} to {high}" if low and high else ""


def _number_text(field: FieldInfo, value: Any) -> str:
    return exact_size(value) if _is_size(field) else f"{value}"


def _is_size(field: FieldInfo) -> bool:
    return any(isinstance(item, Bound) and item.unit == "bytes" for item in field.metadata)


def _metavar(part: type[BaseModel], field: str) -> str:
    if _is_size(part.model_fields[field]):
        return "SIZE"
    kinds = {part.model_fields[field].annotation, *get_args(part.model_fields[field].annotation)}
    return "N" if int in kinds else "X" if float in kinds else field.upper()


def _choices(part: type[BaseModel], field: str) -> str | None:
    """Return `{a,b,c}` for a setting that takes one of several words; `config` checks it."""
    kind = part.model_fields[field].annotation
    words = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = tuple(member.value for member in kind)
    is_list_of_words = bool(words) and all(isinstance(word, str) for word in words)
    return "{" + ",".join(words) + "}" if is_list_of_words else None


def _destination(flag: Flag) -> str:
    return f"{flag.part}.{flag.field}"


def _explain(error: ValidationError, given: Mapping[Place, Given]) -> str:
    lines = []
    for item in error.errors():
        part, name = (str(each) for each in item["loc"][:2])
        section: BaseModel = Settings.model_fields[part].default
        field = type(section).model_fields[name]
        limits = range_text(field)
        message = item["msg"].replace("Input should be", "expected")
        message = f"expected {limits}" if limits else message
        message += f", in {SIZE_EXAMPLES}" if _is_size(field) else ""
        is_secret = SecretStr in get_args(field.annotation)
        shown = "" if is_secret else f", got {item['input']!r}"
        lines.append(f"{given[part, name].name}: {message}{shown}")
    return "; ".join(lines)
