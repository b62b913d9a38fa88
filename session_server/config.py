"""Define every setting: read once, frozen, passed in sections to the code that needs them.

Every number has a unit, a bound on both sides and a `Bound` that says what happens at the limit
(docs/limits.md is generated from them). `runner.loader` decides what is left open here (`auto`,
None): device, dtype and capacity. Only `wiring` reads all settings; `sources` says where they come
from.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    StringConstraints,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from session_server.core.bounds import Bound
from session_server.core.sizes import parse_size
from session_server.demo import MODEL_DIR
from session_server.engine.config import MemoryCheck
from session_server.models.hub import resolve_model

LOOPBACK: Final = "127.0.0.1"

_POOL_IS_FULL: Final = (
    "idle sessions lose their KV (not their tokens), then the youngest running turn waits; a turn "
    "that could never fit is refused: `context_too_long`"
)
_JOURNAL_IS_SHORT: Final = (
    "the oldest entries are dropped; a client that resumes from there gets `session.resume_failed` "
    "and a `session.snapshot`"
)
_T = TypeVar("_T")

MAX_URL_CHARS: Final = 2048

MEMORY_TTL_S: Final = 900.0
"""Idle time before a session that is in memory alone expires, if nobody says another."""

STORED_TTL_S: Final = 86_400.0
"""The same of one in a store: it may leave the memory, and a server that was stopped for a night
goes on with it."""


class EngineMode(StrEnum):
    """Choose where the engine runs."""

    PROCESS = "process"
    INLINE = "inline"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _setting(default: _T, description: str, **limits: Any) -> _T:
    """Return the field of a setting, with its help text and the arguments of `Field`."""
    field: _T = Field(default, description=description, **limits)
    return field


def _words(given: Any) -> Any:
    """Split what a variable of the environment holds: names with commas between them."""
    return given.replace(",", " ").split() if isinstance(given, str) else given


def _url(given: SecretStr | None) -> SecretStr | None:
    text = "http://" if given is None else given.get_secret_value()
    if not text.startswith(("http://", "https://")) or len(text) > MAX_URL_CHARS:
        told = f"expected http:// or https://, and at most {MAX_URL_CHARS} characters"
        raise PydanticCustomError("url", told)
    return given


def _device(given: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", given) is None:
        raise PydanticCustomError("device", "expected auto, cpu, cuda or cuda:N")
    return given


def _size(given: Any) -> Any:
    """Read a size with a unit; what is none is left to be refused."""
    size = parse_size(given) if isinstance(given, str) else None
    return given if size is None else size


_Bytes = Annotated[int, BeforeValidator(_size)]


class DiskSpace(int):
    """Hold the bytes of files, and the directory that they lie in."""

    directory: Path


def _disk_space(given: Any, check: ValidatorFunctionWrapHandler) -> int:
    """Read SIZE, or SIZE:DIR into a `DiskSpace`."""
    directory = getattr(given, "directory", None)
    if isinstance(given, str):
        given, colon, place = given.partition(":")
        if colon and not Path(place).is_absolute():
            raise PydanticCustomError("disk", "expected SIZE or SIZE:DIR with an absolute path")
        directory = Path(place) if colon else None
    num_bytes: int = check(_size(given))
    if directory is None:
        return num_bytes
    space = DiskSpace(num_bytes)
    space.directory = directory
    return space


def _told_space(space: int) -> int | str:
    directory = getattr(space, "directory", None)
    return int(space) if directory is None else f"{int(space)}:{directory}"


_DiskBytes = Annotated[int, WrapValidator(_disk_space), PlainSerializer(_told_space)]

StoreUrl = Annotated[str, StringConstraints(pattern=r"^postgres(ql)?://", max_length=2048)]
"""Of a database that several servers share. It may have a password in it."""
_Words = Annotated[tuple[str, ...], BeforeValidator(_words)]


class ModelOptions(_Section):
    """Choose the model and its precision."""

    path: str | None = _setting(
        None, "directory, GGUF file or hub id of a checkpoint; the embedded model by default"
    )
    served_name: str | None = _setting(
        None, "name in /v1/models; derived from the path by default", max_length=256
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto",
        "dtype of weights and KV; auto: the checkpoint's; float32 on a CPU without native kernels, "
        "bfloat16 on a GPU if the checkpoint has float32",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"] = _setting(
        "auto",
        "dtype of the stored KV; auto: the dtype of the model; 8-bit floats with "
        "`--attention-backend triton`",
    )
    device: Annotated[str, AfterValidator(_device)] = _setting(
        "auto", "device to run on: auto, cpu, cuda or cuda:N"
    )
    context_length: Annotated[
        int | None,
        Bound("tokens", "a turn whose context cannot fit is refused: `context_too_long`"),
    ] = _setting(
        None, "maximum context length in tokens; the model's by default", ge=16, le=1 << 22
    )
    quantize: Literal["none", "int8", "int4"] = _setting(
        "none", "store weights in 8 or 4 bits, with a scale for every 32; on a CPU"
    )
    attention_backend: Literal["auto", "native", "cpu", "torch", "triton"] = _setting(
        "auto",
        "what computes forwards: kernels of our own (native), or torch with attention for CPUs "
        "(cpu), for any device (torch) or by kernels for GPUs (triton); auto: native on a CPU, if "
        "it was built, else torch",
    )
    cuda_graph_max_bs: Annotated[
        int, Bound("rows", "a decode step of more rows is launched kernel by kernel")
    ] = _setting(
        64,
        "capture decode steps of up to so many rows as CUDA graphs, where triton attends; 0: none",
        ge=0,
        le=1024,
    )
    threads: Annotated[int | None, Bound("threads", "a forward uses no more")] = _setting(
        None, "CPU threads of a forward, of all ranks together; all cores by default", ge=1, le=1024
    )
    tensor_parallel_size: Annotated[
        int, Bound("ranks", "a model whose heads do not divide is refused: exit status 2")
    ] = _setting(
        1,
        "ranks that hold a part of the model each: GPUs, or processes on a CPU; with more than one "
        "torch computes, without the native kernels, and KV is not copied out of the pools",
        ge=1,
        le=64,
    )
    draft_path: str | None = _setting(None, "draft model: a small model with the same vocabulary")
    random_seed: Annotated[int | None, Bound("", "limits nothing")] = _setting(
        None, "seed for turns that set none; random by default", ge=0, le=(1 << 63) - 1
    )


class CacheOptions(_Section):
    """Size the KV memory of each device."""

    page_size: Annotated[int, Bound("tokens", "the next token of a session takes another page")] = (
        _setting(16, "tokens per page", ge=1, le=256)
    )
    memory_fraction: Annotated[float | None, Bound("of free memory", _POOL_IS_FULL)] = _setting(
        None,
        "share of free memory for KV, on a GPU of what activations and page tables leave of it; "
        "by default 0.85 on a GPU, 0.25 on a CPU",
        gt=0,
        lt=1,
    )
    max_total_tokens: Annotated[int | None, Bound("tokens", _POOL_IS_FULL)] = _setting(
        None, "maximum KV tokens held; as many as fit by default", ge=16, le=1 << 31
    )
    window_ratio: Annotated[float | None, Bound("pages per page", _POOL_IS_FULL)] = _setting(
        None, "window pages per page of full attention; as many as fit by default", gt=0, le=1
    )
    max_resident_sessions: Annotated[
        int,
        Bound("sessions", "the session that has been idle longest loses its KV (not its tokens)"),
    ] = _setting(1024, "maximum sessions that hold KV at the same time", ge=1, le=1 << 20)
    pinned_fraction: Annotated[
        float,
        Bound("of all pages", "a turn of a pinned session that would exceed it: `quota_exceeded`"),
    ] = _setting(
        0.0, "share of all pages kept for pinned sessions; contexts are shorter by it", ge=0, le=0.9
    )
    host_kv_bytes: Annotated[
        _Bytes,
        Bound("bytes", "the copies of whoever has most give way, those used longest ago first"),
    ] = _setting(
        1 << 30,
        "host memory for copies of KV that has to leave the pools, an eighth of what is free at"
        " most; 0: none, unless there is a disk",
        ge=0,
        le=1 << 44,
    )
    disk_kv_bytes: Annotated[
        _DiskBytes,
        Bound("bytes", "the files of whoever has most give way, those used longest ago first"),
    ] = _setting(
        0,
        "disk for copies of KV, in --store; they outlive the server. SIZE:DIR is for those of all"
        " servers that name the same directory and --store; 0: none are written",
        ge=0,
        le=1 << 50,
    )
    share_prefixes: bool = _setting(
        True, "let sessions of one API key share the KV of common prefixes"
    )
    memory_check: MemoryCheck = _setting(
        MemoryCheck.WARN, "reaction to a violated memory invariant"
    )
    probe_interval_s: Annotated[float, Bound("seconds", "the next page is checked")] = _setting(
        10.0, "seconds of work between two checks of a page's content", ge=0.01, le=86400
    )


class EngineOptions(_Section):
    """Schedule turns on the device."""

    mode: EngineMode = _setting(
        EngineMode.PROCESS, "run the engine in its own process, or inline in a thread of the server"
    )
    max_running_turns: Annotated[int, Bound("turns", "further turns wait in order of arrival")] = (
        _setting(64, "maximum turns in one forward", ge=1, le=4096)
    )
    chunked_prefill_size: Annotated[
        int | None, Bound("tokens", "longer inputs take several forwards")
    ] = _setting(
        None,
        "maximum tokens computed by one forward; by default what takes some 0.1 s, 64 to 512",
        ge=1,
        le=1 << 17,
    )
    overlap: bool = _setting(True, "prepare the next forward while a GPU computes one")
    speculation: Literal["off", "ngram", "model"] = _setting(
        "off", "source of draft tokens: none, n-grams of the session, a draft model"
    )
    num_draft_tokens: Annotated[int, Bound("tokens", "no more are drafted")] = _setting(
        4, "maximum draft tokens per turn and forward", ge=1, le=16
    )
    max_restarts: Annotated[int, Bound("restarts", "the server exits with status 1")] = _setting(
        5, "maximum engine restarts in a row", ge=0, le=100
    )


class SessionOptions(_Section):
    """Limit sessions and how long they live."""

    ttl_s: Annotated[
        float | None, Bound("seconds", "`session.closed` with reason `expired`, close code 4410")
    ] = _setting(
        None,
        "idle time before a session expires, seconds, whether or not the server runs; by default "
        f"{STORED_TTL_S:.0f} for those in --store and {MEMORY_TTL_S:.0f} for others",
        gt=0,
        le=30 * 86400,
    )
    max_sessions: Annotated[int, Bound("sessions", "another one is refused: `server_busy`")] = (
        _setting(10_000, "maximum open sessions in memory", ge=1, le=1 << 20)
    )
    memory_bytes: Annotated[
        _Bytes,
        Bound(
            "bytes",
            "further sessions and turns are refused: `server_busy`, or `quota_exceeded` if the API"
            " key holds its share; the oldest entries of all journals are dropped",
        ),
    ] = _setting(
        4 << 30,
        "host memory for sessions: half for conversations, a quarter for unfinished"
        " turns, a quarter for journals",
        ge=1 << 24,
        le=1 << 40,
    )
    max_queued_turns: Annotated[int, Bound("turns", "another one is refused: `session_busy`")] = (
        _setting(4, "maximum turns of one session that wait behind a running one", ge=0, le=1024)
    )
    replay_bytes: Annotated[_Bytes, Bound("bytes", _JOURNAL_IS_SHORT)] = _setting(
        1 << 20, "size of the journal kept per session for clients that resume", ge=4096, le=1 << 30
    )
    replay_ttl_s: Annotated[float, Bound("seconds", _JOURNAL_IS_SHORT)] = _setting(
        300.0, "maximum age of journal entries, seconds", gt=0, le=86400
    )
    store: Literal["auto", "none"] | StoreUrl | Path = _setting(
        "auto",
        "directory that keeps sessions when the server ends, or postgresql://USER@HOST/NAME of a "
        "database that several servers share; auto: a directory for each --port in the user's "
        "state directory; none: they end with the server",
        union_mode="left_to_right",
    )
    advertise_url: str = _setting(
        "",
        "with a shared --store: where clients reach this server, told to those who ask another one "
        "for a session that it holds; by default nothing is told",
        max_length=256,
    )
    role: Literal["both", "prefill", "decode"] = _setting(
        "both",
        "with a shared --store and a shared directory of --disk-kv-bytes: compute long prompts for "
        "other servers (prefill), have those compute them (decode), or do all of it here (both)",
    )
    durability: Literal["turn", "relaxed"] = _setting(
        "turn",
        "when a turn of a session in --store is told to have ended: once it is on disk (turn), or "
        "at once (relaxed)",
    )

    def ttl_for(self, *, is_stored: bool) -> float:
        """Return the idle time before a session expires whose client asks for none."""
        return self.ttl_s or (STORED_TTL_S if is_stored else MEMORY_TTL_S)


class HttpOptions(_Section):
    """Configure the HTTP and WebSocket server."""

    host: str = _setting(LOOPBACK, "address to bind", max_length=255)
    port: Annotated[int, Bound("", "limits nothing")] = _setting(
        30000, "port to listen on; 0: any free port", ge=0, le=65535
    )
    admin_host: str | None = _setting(
        None,
        f"address to bind for operators, with --admin-port; {LOOPBACK} by default",
        max_length=255,
    )
    admin_port: Annotated[int | None, Bound("", "limits nothing")] = _setting(
        None,
        "port where /metrics, /v1/admin, /flush_cache and the dashboard answer, and nowhere else; "
        "by default beside everything; 0: any free port",
        ge=0,
        le=65535,
    )
    api_key: SecretStr | None = _setting(
        None, "API key that clients must send; every user of this machine sees it in ps"
    )
    api_key_file: Path | None = _setting(
        None,
        "file of API keys, one per line: [NAME] KEY or [NAME] sha256:HEX, then "
        "optionally max_priority=N and share=PART, the limits of the key, metrics=1 and admin=1; "
        "keys with the same name have one owner",
    )
    ssl_certfile: Path | None = _setting(
        None, "certificate chain (PEM), read again when it changes; the server then speaks TLS"
    )
    ssl_keyfile: Path | None = _setting(
        None, "private key of the certificate (PEM, without a password), if not in the same file"
    )
    max_priority: Annotated[int, Bound("", "a higher one is lowered to it")] = _setting(
        0, "highest priority of turns, unless their key sets its own", ge=-100, le=100
    )
    tenant_limits: str = _setting(
        "",
        'limits of every owner whose line sets none, as a line has them: "max_sessions=8 '
        'turns_per_min=60"',
        max_length=1024,
    )
    responses_ws: bool = _setting(True, "serve the WebSocket mode of OpenAI's Responses")
    allow_open: bool = _setting(False, "serve other machines without requiring a key")
    allowed_hosts: _Words = _setting(
        (), "host name that clients may use for this server; repeatable", max_length=64
    )
    allowed_origins: _Words = _setting(
        (), "browser origin to allow besides this host and loopback; repeatable", max_length=64
    )
    max_message_bytes: Annotated[
        _Bytes, Bound("bytes", "a larger body is a 413, a larger frame closes with 1009")
    ] = _setting(1 << 20, "maximum size of a frame or request body", ge=1024, le=1 << 26)
    max_connections: Annotated[
        int,
        Bound(
            "connections",
            "another one is refused: 503, `server_busy`; lowered if descriptors are not enough",
        ),
    ] = _setting(
        10_000, "maximum open WebSockets, event streams and waiting HTTP turns", ge=1, le=1 << 20
    )
    max_connections_per_address: Annotated[
        int | None,
        Bound(
            "connections",
            "the connection of that address that has kept the server waiting longest is closed, or "
            "else the new one refused: 503, `server_busy`",
        ),
    ] = _setting(
        None,
        "maximum open connections of one address; half of all by default, which are 256 more than "
        "--max-connections",
        ge=1,
        le=1 << 20,
    )
    max_input_bytes: Annotated[
        _Bytes, Bound("bytes", "the oldest unfinished one is refused: 503, or close code 1013")
    ] = _setting(
        64 << 20,
        "maximum size of unfinished frames and request bodies, of all connections "
        "together; half of it for one address",
        ge=1 << 16,
        le=1 << 36,
    )
    drain_s: Annotated[
        float, Bound("seconds", "running turns are canceled and keep their partial answers")
    ] = _setting(10.0, "time for running turns to finish at shutdown, seconds", ge=0, le=3600)
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "minimum severity of log lines"
    )
    log_format: Literal["text", "json"] = _setting(
        "text", "format of log lines: text, or one JSON object each"
    )
    otlp_traces_endpoint: Annotated[SecretStr | None, AfterValidator(_url)] = _setting(
        None,
        "URL that OpenTelemetry traces of turns are sent to (OTLP/HTTP); needs the extra `otel`. "
        "OTEL_EXPORTER_OTLP_ENDPOINT does the same",
    )
    throughput_interval_s: Annotated[float, Bound("seconds", "a line is written")] = _setting(
        10.0, "seconds between two log lines of throughput while turns run; 0: none", ge=0, le=86400
    )


class DebugOptions(_Section):
    """Configure debugging aids; leave them at their defaults in production."""

    retract_interval: Annotated[
        int, Bound("forwards", "the youngest of several running turns waits again, with its tokens")
    ] = _setting(0, "forwards between two forced retractions; 0: none", ge=0, le=1 << 20)


class Settings(_Section):
    """Hold all settings, one section each."""

    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    engine: EngineOptions = EngineOptions()
    sessions: SessionOptions = SessionOptions()
    http: HttpOptions = HttpOptions()
    debug: DebugOptions = DebugOptions()


class EngineSettings(Settings):
    """Hold what an engine is told: all settings, and the key of a directory of KV that servers of
    one store share, in hexadecimal digits; empty without a store."""

    kv_key: str = Field("", repr=False)


def model_directory(model: ModelOptions) -> Path:
    """Return the directory of the model's files, or its GGUF file; by default the embedded model.

    Raises:
        ModelNotFound: neither a directory, a GGUF file nor something the hub gives.
    """
    return resolve_model(model.path) if model.path else MODEL_DIR
