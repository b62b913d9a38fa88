"""Define every setting: read once, frozen, passed in sections to the code that needs them.

Every number has a unit, a bound on both sides and a `Bound` that says what happens at the limit
(docs/limits.md is generated from them). `runner.loader` decides what is left open here (`auto`,
None): device, dtype and capacity. Only `wiring` reads all settings, and only it reads the
environment.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from session_server.core.bounds import Bound
from session_server.demo import MODEL_DIR
from session_server.engine.config import MemoryCheck
from session_server.models.hub import resolve_model

_POOL_IS_FULL: Final = (
    "idle sessions lose their KV (not their tokens), then the youngest running turn waits; a turn "
    "that could never fit is refused: `context_too_long`"
)
_JOURNAL_IS_SHORT: Final = (
    "the oldest entries are dropped; a client that resumes from there gets `session.resume_failed` "
    "and a `session.snapshot`"
)


class EngineMode(StrEnum):
    """Choose where the engine runs."""

    PROCESS = "process"
    INLINE = "inline"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelOptions(_Section):
    """Choose the model and its precision."""

    path: Annotated[
        str | None,
        Field(description="directory or hub id of a checkpoint; the embedded model by default"),
    ] = None
    served_name: Annotated[
        str | None,
        Field(max_length=256, description="name in /v1/models; derived from the path by default"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="dtype of weights and KV; auto: float32 on a CPU, bfloat16 on a GPU"),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="dtype of the stored KV; auto: the dtype of the model"),
    ] = "auto"
    device: Annotated[
        str,
        Field(
            pattern=r"^(auto|cpu|cuda(:\d+)?)$",
            description="device to run on: auto, cpu, cuda or cuda:N",
        ),
    ] = "auto"
    context_length: Annotated[
        int | None,
        Field(
            ge=16,
            le=1 << 22,
            description="maximum context length in tokens; the model's by default",
        ),
        Bound("tokens", "a turn whose context cannot fit is refused: `context_too_long`"),
    ] = None
    attention_backend: Annotated[
        Literal["auto", "cpu", "torch"], Field(description="attention kernels")
    ] = "auto"
    threads: Annotated[
        int | None,
        Field(ge=1, le=1024, description="CPU threads of a forward; all cores by default"),
        Bound("threads", "a forward uses no more"),
    ] = None
    draft_path: Annotated[
        str | None, Field(description="draft model: a small model with the same vocabulary")
    ] = None
    random_seed: Annotated[
        int | None,
        Field(
            ge=0, le=(1 << 63) - 1, description="seed for turns that set none; random by default"
        ),
        Bound("", "limits nothing"),
    ] = None


class CacheOptions(_Section):
    """Size the KV memory of each device."""

    page_size: Annotated[
        int,
        Field(ge=1, le=256, description="tokens per page"),
        Bound("tokens", "the next token of a session takes another page"),
    ] = 16
    memory_fraction: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="share of free memory for KV; by default 0.85 on a GPU, 0.25 on a CPU",
        ),
        Bound("of free memory", _POOL_IS_FULL),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        Field(ge=16, le=1 << 31, description="maximum KV tokens held; as many as fit by default"),
        Bound("tokens", _POOL_IS_FULL),
    ] = None
    window_ratio: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="window pages per page of full attention; as many as fit by default",
        ),
        Bound("pages per page", _POOL_IS_FULL),
    ] = None
    max_resident_sessions: Annotated[
        int,
        Field(ge=1, le=1 << 20, description="maximum sessions that hold KV at the same time"),
        Bound("sessions", "the session that has been idle longest loses its KV (not its tokens)"),
    ] = 1024
    pinned_fraction: Annotated[
        float,
        Field(
            ge=0,
            le=0.9,
            description="share of all pages kept for pinned sessions; contexts are shorter by it",
        ),
        Bound("of all pages", "a turn of a pinned session that would exceed it: `quota_exceeded`"),
    ] = 0.0
    share_prefixes: Annotated[
        bool, Field(description="let sessions of one API key share the KV of common prefixes")
    ] = True
    memory_check: Annotated[
        MemoryCheck, Field(description="reaction to a violated memory invariant")
    ] = MemoryCheck.WARN
    probe_interval_s: Annotated[
        float,
        Field(
            ge=0.01, le=86400, description="seconds of work between two checks of a page's content"
        ),
        Bound("seconds", "the next page is checked"),
    ] = 10.0


class EngineOptions(_Section):
    """Schedule turns on the device."""

    mode: Annotated[
        EngineMode,
        Field(description="run the engine in its own process, or inline in a thread of the server"),
    ] = EngineMode.PROCESS
    max_running_turns: Annotated[
        int,
        Field(ge=1, le=4096, description="maximum turns in one forward"),
        Bound("turns", "further turns wait in order of arrival"),
    ] = 64
    chunked_prefill_size: Annotated[
        int,
        Field(ge=1, le=1 << 17, description="maximum tokens computed by one forward"),
        Bound("tokens", "longer inputs take several forwards"),
    ] = 512
    overlap: Annotated[bool, Field(description="prepare the next forward while one runs")] = True
    speculation: Annotated[
        Literal["off", "ngram", "model"],
        Field(description="source of draft tokens: none, n-grams of the session, a draft model"),
    ] = "off"
    num_draft_tokens: Annotated[
        int,
        Field(ge=1, le=16, description="maximum draft tokens per turn and forward"),
        Bound("tokens", "no more are drafted"),
    ] = 4
    max_restarts: Annotated[
        int,
        Field(ge=0, le=100, description="maximum engine restarts in a row"),
        Bound("restarts", "the server exits with status 1"),
    ] = 5


class SessionOptions(_Section):
    """Limit sessions and how long they live."""

    ttl_s: Annotated[
        float,
        Field(gt=0, le=30 * 86400, description="idle time before a session expires, seconds"),
        Bound("seconds", "`session.closed` with reason `expired`, close code 4410"),
    ] = 900.0
    max_sessions: Annotated[
        int,
        Field(ge=1, le=1 << 20, description="maximum open sessions"),
        Bound("sessions", "another one is refused: `server_busy`"),
    ] = 10_000
    memory_bytes: Annotated[
        int,
        Field(
            ge=1 << 24,
            le=1 << 40,
            description="host memory for sessions: half for conversations, a quarter for unfinished"
            " turns, a quarter for journals",
        ),
        Bound(
            "bytes",
            "further sessions and turns are refused: `server_busy`, or `quota_exceeded` if the API"
            " key holds its share; the oldest entries of all journals are dropped",
        ),
    ] = 4 << 30
    max_queued_turns: Annotated[
        int,
        Field(
            ge=0, le=1024, description="maximum turns of one session that wait behind a running one"
        ),
        Bound("turns", "another one is refused: `session_busy`"),
    ] = 4
    replay_bytes: Annotated[
        int,
        Field(
            ge=4096,
            le=1 << 30,
            description="size of the journal kept per session for clients that resume",
        ),
        Bound("bytes", _JOURNAL_IS_SHORT),
    ] = 1 << 20
    replay_ttl_s: Annotated[
        float,
        Field(gt=0, le=86400, description="maximum age of journal entries, seconds"),
        Bound("seconds", _JOURNAL_IS_SHORT),
    ] = 300.0


class HttpOptions(_Section):
    """Configure the HTTP and WebSocket server."""

    host: Annotated[str, Field(max_length=255, description="address to bind")] = "127.0.0.1"
    port: Annotated[
        int,
        Field(ge=0, le=65535, description="port to listen on; 0: any free port"),
        Bound("", "limits nothing"),
    ] = 30000
    api_key: Annotated[
        SecretStr | None,
        Field(
            description="API key that clients must send; every user of this machine sees it in ps"
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        Field(
            description="file of API keys, one per line: [NAME] KEY or [NAME] sha256:HEX, then "
            "optionally max_priority=N and share=PART, the limits of the key; keys with the same "
            "name have one owner"
        ),
    ] = None
    max_priority: Annotated[
        int,
        Field(
            ge=-100, le=100, description="highest priority of turns, unless their key sets its own"
        ),
        Bound("", "a higher one is lowered to it"),
    ] = 0
    allow_open: Annotated[
        bool, Field(description="serve other machines without requiring a key")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Field(
            max_length=64, description="host name that clients may use for this server; repeatable"
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Field(
            max_length=64,
            description="browser origin to allow besides this host and loopback; repeatable",
        ),
    ] = ()
    max_message_bytes: Annotated[
        int,
        Field(ge=1024, le=1 << 26, description="maximum size of a frame or request body"),
        Bound("bytes", "a larger body is a 413, a larger frame closes with 1009"),
    ] = 1 << 20
    max_connections: Annotated[
        int,
        Field(
            ge=1,
            le=1 << 20,
            description="maximum open WebSockets, event streams and waiting HTTP turns",
        ),
        Bound(
            "connections",
            "another one is refused: 503, `server_busy`; lowered if descriptors are not enough",
        ),
    ] = 10_000
    max_connections_per_address: Annotated[
        int | None,
        Field(
            ge=1,
            le=1 << 20,
            description="maximum open connections of one address; half of all by default",
        ),
        Bound(
            "connections",
            "the connection of that address that has kept the server waiting longest is closed, or "
            "else the new one refused: 503, `server_busy`",
        ),
    ] = None
    max_input_bytes: Annotated[
        int,
        Field(
            ge=1 << 16,
            le=1 << 36,
            description="maximum size of unfinished frames and request bodies, of all connections "
            "together; half of it for one address",
        ),
        Bound("bytes", "the oldest unfinished one is refused: 503, or close code 1013"),
    ] = 64 << 20
    drain_s: Annotated[
        float,
        Field(ge=0, le=3600, description="time for running turns to finish at shutdown, seconds"),
        Bound("seconds", "running turns are canceled and keep their partial answers"),
    ] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Field(description="minimum severity of log lines"),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Field(description="format of log lines: text, or one JSON object each"),
    ] = "text"
    throughput_interval_s: Annotated[
        float,
        Field(
            ge=0,
            le=86400,
            description="seconds between two log lines of throughput while turns run; 0: none",
        ),
        Bound("seconds", "a line is written"),
    ] = 10.0


class DebugOptions(_Section):
    """Configure debugging aids; leave them at their defaults in production."""

    retract_interval: Annotated[
        int,
        Field(ge=0, le=1 << 20, description="forwards between two forced retractions; 0: none"),
        Bound("forwards", "the youngest of several running turns waits again, with its tokens"),
    ] = 0


class Settings(_Section):
    """Hold all settings, one section each."""

    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    engine: EngineOptions = EngineOptions()
    sessions: SessionOptions = SessionOptions()
    http: HttpOptions = HttpOptions()
    debug: DebugOptions = DebugOptions()


def model_directory(model: ModelOptions) -> Path:
    """Return the directory of the model's files; the embedded model is the default.

    Raises:
        ModelNotFound: neither a directory nor something the hub gives.
    """
    return resolve_model(model.path) if model.path else MODEL_DIR
