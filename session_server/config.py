"""Settings: read once, frozen, passed in parts to whoever needs them.

Every number has a unit, a bound on both sides and a `Bound` that says what happens there
(docs/limits.md is generated from them). What is left open here (`auto`, none) is decided
where the facts are: device, dtype and capacity by `runner.loader`. No module but `wiring` reads
settings as a whole, and none reads the environment.
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
    """Where the engine runs."""

    PROCESS = "process"
    INLINE = "inline"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelOptions(_Section):
    """Which model, and in what precision."""

    path: Annotated[
        str | None,
        Field(description="directory of a Hugging Face checkpoint, or a hub id; none: embedded"),
    ] = None
    served_name: Annotated[
        str | None, Field(max_length=256, description="name in /v1/models; none: from the path")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="dtype of weights and KV; auto: float32 on a CPU, bfloat16 on a GPU"),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="dtype that KV is stored in; auto: the one the model computes in"),
    ] = "auto"
    device: Annotated[
        str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    ] = "auto"
    context_length: Annotated[
        int | None,
        Field(ge=16, le=1 << 22, description="tokens a context may have; none: the model's own"),
        Bound("tokens", "a turn whose context cannot fit is refused: `context_too_long`"),
    ] = None
    attention_backend: Annotated[
        Literal["auto", "cpu", "torch"], Field(description="kernels that read the KV")
    ] = "auto"
    threads: Annotated[
        int | None,
        Field(ge=1, le=1024, description="CPU threads of a forward; none: all cores"),
        Bound("threads", "a forward uses no more"),
    ] = None
    draft_path: Annotated[
        str | None, Field(description="small model of the same vocabulary that proposes drafts")
    ] = None
    random_seed: Annotated[
        int | None,
        Field(ge=0, le=(1 << 63) - 1, description="seed of turns that name none; none: random"),
        Bound("", "limits nothing"),
    ] = None


class CacheOptions(_Section):
    """KV memory, per device."""

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
            description="share of free memory for KV; none: 0.85 on a GPU, 0.25 on a CPU",
        ),
        Bound("of free memory", _POOL_IS_FULL),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        Field(ge=16, le=1 << 31, description="KV tokens held at most; none: as many as fit"),
        Bound("tokens", _POOL_IS_FULL),
    ] = None
    window_ratio: Annotated[
        float | None,
        Field(gt=0, le=1, description="window pages per page of full attention; none: as fit"),
        Bound("pages per page", _POOL_IS_FULL),
    ] = None
    max_resident_sessions: Annotated[
        int,
        Field(ge=1, le=1 << 20, description="sessions that hold KV at the same time"),
        Bound("sessions", "the session idle for longest loses its KV (not its tokens)"),
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
        bool, Field(description="let sessions of one API key share the KV of equal beginnings")
    ] = True
    memory_check: Annotated[
        MemoryCheck, Field(description="what a violated memory invariant does")
    ] = MemoryCheck.WARN
    probe_interval_s: Annotated[
        float,
        Field(
            ge=0.01, le=86400, description="seconds of work between two checks of a page's content"
        ),
        Bound("seconds", "the next page is checked"),
    ] = 10.0


class EngineOptions(_Section):
    """How turns share the device."""

    mode: Annotated[
        EngineMode, Field(description="own process (default), or a thread of the server")
    ] = EngineMode.PROCESS
    max_running_turns: Annotated[
        int,
        Field(ge=1, le=4096, description="turns in one forward at most"),
        Bound("turns", "further turns wait in order of arrival"),
    ] = 64
    chunked_prefill_size: Annotated[
        int,
        Field(ge=1, le=1 << 17, description="tokens computed by one forward at most"),
        Bound("tokens", "longer inputs take several forwards"),
    ] = 512
    overlap: Annotated[bool, Field(description="prepare the next forward while one runs")] = True
    speculation: Annotated[
        Literal["off", "ngram", "model"],
        Field(description="what proposes drafts: nothing, the session's own text, a draft model"),
    ] = "off"
    num_draft_tokens: Annotated[
        int,
        Field(ge=1, le=16, description="drafts per turn and forward at most"),
        Bound("tokens", "no more are drafted"),
    ] = 4
    max_restarts: Annotated[
        int,
        Field(ge=0, le=100, description="engine restarts in a row before giving up"),
        Bound("restarts", "the server ends with exit status 1"),
    ] = 5


class SessionOptions(_Section):
    """Lives and limits of sessions."""

    ttl_s: Annotated[
        float,
        Field(gt=0, le=30 * 86400, description="idle time before a session expires, seconds"),
        Bound("seconds", "`session.closed` with reason `expired`, close code 4410"),
    ] = 900.0
    max_sessions: Annotated[
        int,
        Field(ge=1, le=1 << 20, description="open sessions"),
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
            "further sessions and turns are refused: `server_busy`, or `quota_exceeded` where one"
            " API key holds its share; of all journals the oldest entries are dropped",
        ),
    ] = 4 << 30
    max_queued_turns: Annotated[
        int,
        Field(ge=0, le=1024, description="turns of one session that wait behind a running one"),
        Bound("turns", "another one is refused: `session_busy`"),
    ] = 4
    replay_bytes: Annotated[
        int,
        Field(ge=4096, le=1 << 30, description="journal kept per session for resuming clients"),
        Bound("bytes", _JOURNAL_IS_SHORT),
    ] = 1 << 20
    replay_ttl_s: Annotated[
        float,
        Field(gt=0, le=86400, description="age of the journal kept, seconds"),
        Bound("seconds", _JOURNAL_IS_SHORT),
    ] = 300.0


class HttpOptions(_Section):
    """The sockets."""

    host: Annotated[str, Field(max_length=255, description="address to bind")] = "127.0.0.1"
    port: Annotated[
        int,
        Field(ge=0, le=65535, description="port to listen on; 0: any free one"),
        Bound("", "limits nothing"),
    ] = 30000
    api_key: Annotated[
        SecretStr | None,
        Field(description="a key that clients must show; every user of this machine sees it in ps"),
    ] = None
    api_key_file: Annotated[
        Path | None,
        Field(
            description="keys that clients must show, one per line: [NAME] KEY, or [NAME] "
            "sha256:HEX; keys of one name have one owner. Behind it max_priority=N and share=PART: "
            "what the key may ask for"
        ),
    ] = None
    max_priority: Annotated[
        int,
        Field(ge=-100, le=100, description="highest priority of turns, unless a key has its own"),
        Bound("", "a higher one is lowered to it"),
    ] = 0
    allow_open: Annotated[
        bool, Field(description="serve everybody who can connect, from elsewhere and without a key")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Field(max_length=64, description="names by which clients reach this server"),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Field(max_length=64, description="browser origins besides this host and loopback"),
    ] = ()
    max_message_bytes: Annotated[
        int,
        Field(ge=1024, le=1 << 26, description="largest frame or request body"),
        Bound("bytes", "a larger body is a 413, a larger frame closes with 1009"),
    ] = 1 << 20
    max_connections: Annotated[
        int,
        Field(
            ge=1, le=1 << 20, description="open WebSockets, event streams and waiting HTTP turns"
        ),
        Bound(
            "connections",
            "another one is refused: 503, `server_busy`; fewer where descriptors are not enough",
        ),
    ] = 10_000
    max_connections_per_address: Annotated[
        int | None,
        Field(ge=1, le=1 << 20, description="open connections of one address; none: half of all"),
        Bound(
            "connections",
            "the one of that address that has kept the server waiting for longest is closed, or "
            "else the new one refused: 503, `server_busy`",
        ),
    ] = None
    max_input_bytes: Annotated[
        int,
        Field(
            ge=1 << 16,
            le=1 << 36,
            description="unfinished frames and request bodies, of all connections together; one "
            "address may have half of it",
        ),
        Bound("bytes", "the oldest unfinished one is refused: 503, or close code 1013"),
    ] = 64 << 20
    drain_s: Annotated[
        float,
        Field(ge=0, le=3600, description="time running turns get at shutdown, seconds"),
        Bound("seconds", "running turns are cancelled and keep what they have"),
    ] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="least severe line shown")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Field(description="log lines as text, or a JSON object each")
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
    """Switches for tests; a server that serves people leaves them alone."""

    retract_interval: Annotated[
        int,
        Field(ge=0, le=1 << 20, description="launches between two forced retractions; 0: none"),
        Bound("launches", "the youngest of several running turns waits again, with its tokens"),
    ] = 0


class Settings(_Section):
    """All of them."""

    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    engine: EngineOptions = EngineOptions()
    sessions: SessionOptions = SessionOptions()
    http: HttpOptions = HttpOptions()
    debug: DebugOptions = DebugOptions()


def model_directory(model: ModelOptions) -> Path:
    """Where the model's files are: the embedded one unless another was asked for.

    Raises:
        ModelNotFound: neither a directory nor something the hub gives.
    """
    return resolve_model(model.path) if model.path else MODEL_DIR
