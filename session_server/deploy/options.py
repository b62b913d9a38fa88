"""Turn flags into what Ray Serve is told of the replicas: pure, and without Ray."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from typing import Any, Final

from session_server.config import Settings
from session_server.core.engine_client import STOP_TIMEOUT_S
from session_server.deploy import autoscaling
from session_server.web.drain import CLOSE_WAIT_S

APPLICATION: Final = "session-server"
"""Name of the application, and of its one deployment, in Ray Serve."""

ROUTER: Final = "session_server.deploy.router:SessionRouter"
POLICY: Final = f"{autoscaling.__name__}:{autoscaling.num_replicas.__name__}"

MAX_REPLICAS: Final = 4096
HEALTH_PERIOD_S: Final = 2.0
HEALTH_TIMEOUT_S: Final = 10.0
"""Seconds that a replica's event loop may take to answer. Three failures in a row replace it."""

STOP_MARGIN_S: Final = 10.0
"""Seconds that stopping may take longer than the drain and the engine do."""

ANSWERED_LOOK_S: Final = 0.25
"""Seconds between two looks of Ray whether a replica that stops has answered everything."""

TOLD_LOOK_S: Final = 0.1
"""Seconds between two looks of a replica whether it was told to stop."""

CLUSTER_LOOK_S: Final = 0.5
"""Seconds between two looks of a command that waits for replicas."""

UNREADY_LIMIT_S: Final = 60.0
"""Seconds without an engine after which a replica is replaced, although the engine may still be
started again."""

STALLED_LIMIT_S: Final = 60.0
"""Seconds without a step of the engine after which a replica is replaced."""

LAST_ANSWERS_S: Final = 2.0
"""Seconds that requests have to end by themselves once no turn runs in a replica that stops."""

REPORT_DEADLINE_S: Final = 5.0
"""Seconds that `cluster status` waits for a replica to say what it does."""

MEMORY_DEADLINE_S: Final = 2.0
"""Seconds that a replica waits for its engine to say how full KV is."""

UPSCALE_DELAY_S: Final = 15.0
DOWNSCALE_DELAY_S: Final = 300.0
LOOK_BACK_S: Final = 15.0
REQUESTS_BESIDE: Final = 256
"""Requests of a replica beside its readers at one time: health, metrics, what is refused."""

_ENVIRONMENT: Final = {"RAY_USE_UVLOOP": "0"}
"""Of a replica's process: it runs on asyncio's own event loop, as `serve` does."""

_REPLICAS: Final = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """Say how many replicas run: between `least` and `most`, as their load asks for."""

    least: int
    most: int

    @property
    def is_fixed(self) -> bool:
        """Return whether their number never changes by itself."""
        return self.least == self.most

    def __str__(self) -> str:
        return f"{self.least}" if self.is_fixed else f"{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Say how many replicas run, and what of a machine each takes."""

    count: ReplicaCount
    num_cpus: float
    num_gpus: float

    @property
    def cluster_cpus(self) -> int:
        """Return the CPUs that a cluster needs for them; one more is for a replica that starts
        while the one it replaces still drains."""
        return math.ceil((self.count.most + 1) * self.num_cpus)


def replica_count(text: str) -> ReplicaCount:
    """Return what `--replicas` says: N, or MIN-MAX."""
    found = _REPLICAS.fullmatch(text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most <= MAX_REPLICAS:
        raise argparse.ArgumentTypeError(
            f"expected N, or MIN-MAX as in 2-8, from 1 to {MAX_REPLICAS}; got {text!r}"
        )
    return ReplicaCount(least, most)


def replica_settings(settings: Settings, options: ReplicaOptions) -> Settings:
    """Return the settings of each replica: those that are given, and a share of the machine.

    Raises:
        ValueError: a setting has no meaning for replicas; the message names its flag.
    """
    http, sessions = settings.http, settings.sessions
    if http.admin_port is not None:
        raise ValueError(
            "--admin-port: replicas do not listen, so nothing can answer there; use keys with "
            "admin=1 and metrics=1, and ?replica=TAG for one of them"
        )
    if sessions.store == "auto":
        sessions = sessions.model_copy(update={"store": "none"})
    elif sessions.store != "none" and ":/" not in str(sessions.store):
        raise ValueError(
            f"--store {sessions.store}: a directory belongs to one server, and replicas share "
            "their sessions; pass --store none, or the address of a store that is shared"
        )
    threads = settings.model.threads or max(1, math.floor(options.num_cpus))
    model = settings.model.model_copy(update={"threads": threads})
    # The proxies of Ray hold the certificate and the port.
    plain = http.model_copy(update={"ssl_certfile": None, "ssl_keyfile": None})
    return settings.model_copy(update={"model": model, "sessions": sessions, "http": plain})


def deployment_options(settings: Settings, options: ReplicaOptions) -> dict[str, Any]:
    """Return what Ray Serve is told of the deployment, but for the router's own class.

    Open sockets are ongoing requests, so as many are allowed as the server takes. A replica that
    stops drains first: Ray waits for that, and for the engine.
    """
    http = settings.http
    stop_s = http.drain_s + CLOSE_WAIT_S + LAST_ANSWERS_S + 2 * STOP_TIMEOUT_S + STOP_MARGIN_S
    scale: dict[str, Any] = {"num_replicas": options.count.least}
    if not options.count.is_fixed:
        scale = {
            "autoscaling_config": {
                "min_replicas": options.count.least,
                "max_replicas": options.count.most,
                "look_back_period_s": LOOK_BACK_S,
                "upscale_delay_s": UPSCALE_DELAY_S,
                "downscale_delay_s": DOWNSCALE_DELAY_S,
                "policy": {"policy_function": POLICY},
            }
        }
    return {
        "name": APPLICATION,
        "max_ongoing_requests": http.max_connections + REQUESTS_BESIDE,
        "graceful_shutdown_timeout_s": stop_s,
        "graceful_shutdown_wait_loop_s": ANSWERED_LOOK_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "ray_actor_options": {
            "num_cpus": options.num_cpus,
            "num_gpus": options.num_gpus,
            "runtime_env": {"env_vars": _ENVIRONMENT},
        },
        "request_router_config": {"request_router_class": ROUTER},
        **scale,
    }
