"""Compose the server's side: the one place where its parts are put together.

The server process holds sockets, sessions and text; it does not load torch. The engine is a child
process by default, or a thread (`--engine inline`); `engine_wiring` composes both.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from session_server.config import LOOPBACK, EngineMode, EngineSettings, HttpOptions, Settings
from session_server.core.child_process import PROGRAM
from session_server.core.engine_client import STOP_TIMEOUT_S, EngineClient
from session_server.core.events import EngineReady
from session_server.core.owner import KEY_VARIABLE
from session_server.engine_host.process import EngineProcess, ProcessSettings
from session_server.engine_host.restarts import RestartPolicy
from session_server.metrics.logging import LOGGER_NAME
from session_server.metrics.prometheus import ServerMetrics
from session_server.metrics.tracing import (
    TracingUnavailable,
    TurnTracing,
    asks_for_traces,
    open_tracing,
)
from session_server.sessions.journal import JournalLimits
from session_server.sessions.manager import SessionManager
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.roles.joining import Roles, decode_role, prefill_role
from session_server.sessions.salts import TenantSalts
from session_server.sessions.store.lock import StoreIsBusy, StoreUnusable, once_free
from session_server.sessions.store.places import default_directory
from session_server.sessions.store.session_store import SessionStore
from session_server.shared_store import open_once_there
from session_server.text.model_text import ModelText
from session_server.web.certificate import Certificate, UnusableCertificate
from session_server.web.key_file import is_readable_by_all, limits_of
from session_server.web.keys import KeyRing, key_sources
from session_server.web.listener import (
    connection_limits_for,
    is_loopback,
    max_readers_for,
    raise_descriptor_limit,
)
from session_server.web.services import AppServices, ModelCard, WebSettings

if TYPE_CHECKING:
    from session_server.engine_host.inline import InlineEngine

_logger: Final = logging.getLogger(LOGGER_NAME)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_UNUSABLE: Final = 2
EXIT_UNWRITTEN: Final = 3

_SECRET: Final = {
    "http": {"api_key", "api_key_file", "ssl_certfile", "ssl_keyfile", "otlp_traces_endpoint"}
}
"""Settings that the engine is not told: keys, where they lie, and a URL that may have one in it."""

_HIDDEN: Final = _SECRET | {"sessions": {"store"}}
"""Settings that no client is shown: these, and where sessions lie."""

_TOKEN_TEXTS_KEPT: Final = 1 << 16
"""Size of the cache of single tokens' texts, for logprobs."""

STORE_FACTOR: Final = 16
"""Bytes of sessions in the store for each byte of `--session-memory-bytes`."""

_MAX_TURNS: Final = 16_384
"""Maximum turns that wait or run, over all sessions."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """Hold what clients show to the server, and what it shows to them.

    `replica_tag`: of one server of several; its tickets and the ids of its sessions begin with it.
    """

    keys: KeyRing = field(default_factory=KeyRing)
    certificate: Certificate | None = None
    replica_tag: str = ""


def make_entrance(
    http: HttpOptions, environment_key: str | None, *, replica_tag: str = ""
) -> Entrance:
    """Return what clients show and are shown. Raises ValueError: it cannot be used, or the server
    would be open to everybody; the message says what to do."""
    keys = load_keys(http, environment=environment_key)
    check_exposure(http, keys)
    return Entrance(keys, load_certificate(http), replica_tag)


def load_keys(http: HttpOptions, *, environment: str | None) -> KeyRing:
    """Return the keys of the command line, the environment and the file.

    Raises:
        InvalidKeys: one is empty or malformed, the file cannot be used, or a limit is none.
    """
    given = None if http.api_key is None else http.api_key.get_secret_value()
    sources = key_sources(
        given=given,
        environment=environment,
        path=http.api_key_file,
        max_priority=http.max_priority,
        limits=limits_of(http.tenant_limits, "--tenant-limits"),
    )
    keys = sources.ring()
    if http.api_key_file is not None and is_readable_by_all(http.api_key_file):
        _logger.warning(
            "every user of this machine can read %s: chmod 600 %s",
            http.api_key_file,
            http.api_key_file,
        )
    return keys


def load_certificate(http: HttpOptions) -> Certificate | None:
    """Return the certificate to serve; None for plain HTTP.

    Raises:
        UnusableCertificate: the files cannot be served.
    """
    if http.ssl_certfile is None:
        if http.ssl_keyfile is not None:
            raise UnusableCertificate("--ssl-keyfile without --ssl-certfile has no certificate")
        return None
    certificate = Certificate(http.ssl_certfile, http.ssl_keyfile)
    keyfile = http.ssl_keyfile or http.ssl_certfile
    if is_readable_by_all(keyfile):
        _logger.warning("every user of this machine can read %s: chmod 600 %s", keyfile, keyfile)
    return certificate


def check_exposure(http: HttpOptions, keys: KeyRing) -> None:
    """Raise ValueError if the server would be open to the whole network without a key, or serve
    operators where everybody is served although they were to have an address of their own."""
    if http.admin_host is not None and http.admin_port is None:
        raise ValueError(
            f"--admin-host {http.admin_host} has no port, and routes for operators would answer "
            "beside all others: add --admin-port N (0: any free port)"
        )
    binds = {"--host": http.host, "--admin-host": admin_host_of(http)}
    for flag, host in binds.items():
        if keys.is_open and not http.allow_open and not is_loopback(host):
            raise ValueError(
                f"{flag} {host} without a key would serve everybody who can connect: pass "
                f"--api-key-file FILE, set {KEY_VARIABLE}, or pass --allow-open"
            )


def admin_host_of(http: HttpOptions) -> str:
    """Return the address of the bind for operators."""
    return http.admin_host or LOOPBACK


def make_tracing(settings: Settings, *, model: str) -> TurnTracing | None:
    """Return what exports traces of turns; None unless a flag or the environment asks for it.

    Raises:
        TracingUnavailable: a flag asks for it, and OpenTelemetry is not installed.
    """
    secret = settings.http.otlp_traces_endpoint  # it may hold the key of a collector
    endpoint = None if secret is None else secret.get_secret_value()
    if not asks_for_traces(endpoint, os.environ):
        return None
    try:
        return open_tracing(endpoint, model=model)
    except TracingUnavailable as error:
        if endpoint is not None:
            raise
        _logger.warning("no traces, though the environment asks for them: %s", error)
        return None


def with_store(settings: Settings, store: SessionStore | None) -> EngineSettings:
    """Return the settings of the engine of a server that keeps sessions there: its files of KV lie
    beside them, or in a directory for which it has a key from the store. Without a store there are
    none."""
    directory = None if store is None else store.directory
    place = "none" if directory is None else directory.absolute()
    key = "" if store is None else hmac.digest(store.secret, b"files of KV", "sha256").hex()
    sections = {name: getattr(settings, name) for name in Settings.model_fields}
    sections["sessions"] = settings.sessions.model_copy(update={"store": place})
    return EngineSettings(**sections, kv_key=key)


def make_engine(settings: Settings) -> EngineProcess | InlineEngine:
    """Return the engine client that the settings ask for, not started."""
    # Spinning threads of a forward keep the thread they wait for off its core as soon as anything
    # else runs: a 1 ms step then took 50 to 400 ms in measurements.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # An engine that keeps KV on disk writes it before it ends, for as long as turns may drain.
    stop_timeout_s = STOP_TIMEOUT_S + (settings.http.drain_s if settings.cache.disk_kv_bytes else 0)
    if settings.engine.mode is EngineMode.INLINE:
        # Only with an inline engine does the server process load torch.
        from session_server.engine_host.inline import InlineEngine
        from session_server.engine_wiring import build_engine

        return InlineEngine(lambda: build_engine(settings), stop_timeout_s=stop_timeout_s)
    frame = settings.model_dump_json(exclude=_SECRET).encode()
    return EngineProcess(
        ProcessSettings(
            argv=(*PROGRAM, "_engine"),
            settings=frame,
            stop_timeout_s=stop_timeout_s,
            restarts=RestartPolicy(max_failures=settings.engine.max_restarts),
        )
    )


@contextlib.asynccontextmanager
async def opened_store(
    settings: Settings, text: ModelText, environment: Mapping[str, str]
) -> AsyncIterator[SessionStore | None]:
    """Open the store for sessions of this model, and close it after the block; None without one.

    Raises:
        StoreIsBusy: a command has it open, and goes on.
        StoreUnusable: the directory that was asked for cannot be used, or another server has it
            open. A server that was asked for none goes on without one, and warns.
    """
    store = await _open_store(settings, text, environment)
    if store is None:
        yield None
        return
    store.start(asyncio.get_running_loop())
    try:
        yield store
    finally:
        await store.close()


async def _open_store(
    settings: Settings, text: ModelText, environment: Mapping[str, str]
) -> SessionStore | None:
    asked, port = settings.sessions.store, settings.http.port
    if asked == "none":
        return None
    if isinstance(asked, str) and asked != "auto":
        return await open_once_there(settings, asked, model=text.fingerprint)
    given = asked.expanduser() if isinstance(asked, Path) else None
    directory = given or default_directory(environment, port)
    if asked == "auto" and (port == 0 or directory is None):
        why = "on any free port" if port == 0 else "by a user without a home directory"
        _logger.info("sessions end with this server, which is served %s: --store keeps them", why)
        return None
    assert directory is not None, "a store without a place"
    model, durability = text.fingerprint, settings.sessions.durability
    try:
        store = await once_free(
            partial(SessionStore.in_directory, directory, model=model, durability=durability)
        )
    except StoreUnusable as error:
        # One that a command has open holds what was told to be durable: none of it may seem lost.
        if asked != "auto" or isinstance(error, StoreIsBusy):
            raise
        _logger.warning("sessions end with this server, because they cannot be kept: %s", error)
        return None
    _logger.info("sessions are kept in %s, where there are %s", directory, store.census())
    return store


def make_manager(
    settings: Settings,
    engine: EngineClient,
    text: ModelText,
    store: SessionStore | None = None,
    *,
    replica_tag: str = "",
) -> SessionManager:
    """Return the session manager. Its salt secret lives as long as the store, or as the process
    and the cache. `replica_tag`: see `SessionLimits`."""
    sessions = settings.sessions
    secret = secrets.token_bytes(32) if store is None else store.secret
    manager = SessionManager(
        engine,
        text,
        salts=TenantSalts(secret, share_prefixes=settings.cache.share_prefixes),
        limits=SessionLimits(
            default_ttl_s=sessions.ttl_for(is_stored=False),
            stored_ttl_s=sessions.ttl_for(is_stored=store is not None),
            max_queued_turns=sessions.max_queued_turns,
            allows_pinned=settings.cache.pinned_fraction > 0,
            journal=JournalLimits(max_bytes=sessions.replay_bytes, max_age_s=sessions.replay_ttl_s),
            replica_tag=replica_tag,
        ),
        quotas=QuotaLimits(
            sessions=sessions.max_sessions,
            turns=_MAX_TURNS,
            history_bytes=sessions.memory_bytes // 2,
            turn_bytes=sessions.memory_bytes // 4,
            replay_bytes=sessions.memory_bytes // 4,
            store_bytes=sessions.memory_bytes * STORE_FACTOR,
            owner_sessions=None,
            owner_turns=None,
        ),
    )
    if store is not None:
        manager.store_in(store)
    return manager


def check_role(settings: Settings) -> None:
    """Raise ValueError for a role without what it takes."""
    sessions, role = settings.sessions, settings.sessions.role
    if role == "both":
        return
    is_shared = isinstance(sessions.store, str) and sessions.store not in ("auto", "none")
    if not is_shared:
        raise ValueError(f"--role {role} needs a store that servers share: --store postgresql://")
    if getattr(settings.cache.disk_kv_bytes, "directory", None) is None:
        raise ValueError(
            f"--role {role} needs a directory of KV that servers share: --disk-kv-bytes SIZE:DIR"
        )
    if role == "prefill" and not sessions.advertise_url:
        raise ValueError("--role prefill needs --advertise-url, where other servers reach this one")


def make_roles(settings: Settings, manager: SessionManager, store: SessionStore | None) -> Roles:
    """Return what a server does for others and has others do. Raises ValueError."""
    check_role(settings)
    sessions = settings.sessions
    if sessions.role == "both" or store is None:
        return Roles()
    _logger.info("role=%s, with replicas of the store %s", sessions.role, store.place)
    model = manager.text.fingerprint
    if sessions.role == "decode":
        return decode_role(store, manager.exits, model=model)
    salts = TenantSalts(store.secret, share_prefixes=settings.cache.share_prefixes)
    url = sessions.advertise_url
    return prefill_role(store, manager.exits, salts, model=model, url=url)


def make_services(
    settings: Settings,
    manager: SessionManager,
    metrics: ServerMetrics,
    *,
    directory: Path,
    ready: EngineReady,
    entrance: Entrance | None = None,
) -> AppServices:
    """Return what the web layer needs."""
    text = manager.text
    return AppServices(
        sessions=manager,
        metrics=metrics,
        model=ModelCard(
            name=name_of(settings, directory),
            path=directory.name,
            vocab_size=ready.vocab_size,
            max_context=ready.max_turn_len,
            created_s=int(time.time()),
            token_text=_token_text(text),
            defaults=msgspec.structs.replace(
                text.default_sampling, seed=settings.model.random_seed
            ),
            takes_tools=text.takes_tools,
        ),
        settings=_web_settings(settings, entrance or Entrance()),
        server_args=_shown(settings),
    )


def _shown(settings: Settings) -> dict[str, Any]:
    """Return what clients are shown of the settings: of a directory for KV its size."""
    shown = settings.model_dump(mode="json", exclude=_HIDDEN)
    shown["cache"]["disk_kv_bytes"] = int(settings.cache.disk_kv_bytes)
    return shown


def _web_settings(settings: Settings, entrance: Entrance) -> WebSettings:
    http = settings.http
    descriptors = raise_descriptor_limit(http.max_connections)
    max_readers = max_readers_for(http.max_connections, descriptors=descriptors)
    if max_readers < http.max_connections:
        _logger.warning(
            "--max-connections %d needs more than the %d descriptors allowed: limited to %d",
            http.max_connections,
            descriptors,
            max_readers,
        )
    return WebSettings(
        host=http.host,
        port=http.port,
        keys=entrance.keys,
        certificate=entrance.certificate,
        admin_host=admin_host_of(http),
        admin_port=http.admin_port,
        hosts=http.allowed_hosts,
        allowed_origins=http.allowed_origins,
        max_message_bytes=http.max_message_bytes,
        max_connections=max_readers,
        connections=connection_limits_for(
            max_readers,
            descriptors=descriptors,
            max_per_address=http.max_connections_per_address,
            input_bytes=http.max_input_bytes,
            max_message_bytes=http.max_message_bytes,
        ),
        max_queued_turns=settings.sessions.max_queued_turns,
        replay_bytes=settings.sessions.replay_bytes,
        drain_s=http.drain_s,
        responses_ws=http.responses_ws,
        replica_tag=entrance.replica_tag,
    )


def name_of(settings: Settings, directory: Path) -> str:
    """Return the name of the model that clients are told."""
    name = directory.stem if directory.is_file() else directory.name
    default = name if settings.model.path else "session-server-embedded"
    return settings.model.served_name or default


def _token_text(text: ModelText) -> Callable[[int], str]:
    @functools.lru_cache(maxsize=_TOKEN_TEXTS_KEPT)
    def token_text(token_id: int) -> str:
        return text.tokenizer.decode([token_id], skip_special_tokens=False)

    return token_text
