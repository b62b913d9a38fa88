"""Define what the web layer is given; `wiring` creates it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from session_server.core.errors import UnknownModel
from session_server.core.sampling import SamplingParams
from session_server.metrics.prometheus import ServerMetrics
from session_server.sessions.manager import SessionManager
from session_server.sessions.roles.joining import Roles
from session_server.web.certificate import Certificate
from session_server.web.connection_table import ConnectionLimits
from session_server.web.keys import KeyRing
from session_server.web.turnstile import Turnstile


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Bound the sockets. Times in seconds, sizes in bytes.

    `send_timeout_s`: a socket whose peer reads nothing for this long is dropped and may resume.
    `idle_s`: a socket without traffic for this long is closed. `hosts`: names that the server
    answers to, besides the one it is bound to and loopback. `certificate`: with one it speaks TLS.
    `admin_port`: where routes for operators answer instead; None: beside the others.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    keys: KeyRing = field(default_factory=KeyRing)
    allowed_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_message_bytes: int = 1 << 20
    max_connections: int = 10_000
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    max_queued_turns: int = 4
    replay_bytes: int = 4 << 20
    message_timeout_s: float = 30.0
    auth_timeout_s: float = 5.0
    send_timeout_s: float = 10.0
    heartbeat_s: float = 20.0
    ping_timeout_s: float = 60.0
    idle_s: float = 3600.0
    drain_s: float = 10.0
    responses_ws: bool = True
    certificate: Certificate | None = None
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    replica_tag: str = ""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Describe the served model.

    `max_context`: tokens that a context may have when the engine first started; prefer
    `AppServices.max_context`. `token_text` returns the text of one token id, for logprobs.
    `takes_tools`: its chat template writes tools.
    """

    name: str
    path: str
    vocab_size: int
    max_context: int
    created_s: int
    token_text: Callable[[int], str]
    defaults: SamplingParams = field(default_factory=SamplingParams)
    takes_tools: bool = False


@dataclass(frozen=True, slots=True)
class AppServices:
    """Hold everything behind the routes. `/server_info` shows `server_args`: no secrets."""

    sessions: SessionManager
    metrics: ServerMetrics
    model: ModelCard
    settings: WebSettings
    server_args: dict[str, object] = field(default_factory=dict)
    roles: Roles = field(default_factory=Roles)
    now_s: Callable[[], float] = time.monotonic
    wall_clock_s: Callable[[], float] = time.time
    turnstile: Turnstile = field(default_factory=Turnstile)

    def check_model(self, name: str | None) -> None:
        """Reject the name of another model; none takes the one that is served. Raises
        UnknownModel."""
        if name and name != self.model.name:
            raise UnknownModel(
                f"There is no such model here; {self.model.name} is served.", param="model"
            )

    @property
    def max_context(self) -> int:
        """Return the tokens that a context may have now; an engine restart may change it."""
        ready = self.sessions.engine_ready
        return self.model.max_context if ready is None else ready.max_turn_len
