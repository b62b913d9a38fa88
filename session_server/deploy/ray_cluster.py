"""Deploy replicas to a Ray cluster, look at them, and take them away."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from session_server.config import HttpOptions, Settings
from session_server.deploy.application import make_application
from session_server.deploy.head import ClusterFailed
from session_server.deploy.options import (
    APPLICATION,
    CLUSTER_LOOK_S,
    REPORT_DEADLINE_S,
    ReplicaOptions,
)
from session_server.deploy.routing import key_for, tag_of

_GONE: Final = ("NOT_STARTED", "DELETED")
_RUNNING: Final = "RUNNING"

Progress = Callable[[str], None]
"""Is told in words what is waited for."""


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Be connected to a Ray cluster inside the block.

    Args:
        address: HOST:PORT, or auto for the one that Ray finds.

    Raises:
        ClusterFailed: there is none.
    """
    # Neither the servers' log lines nor Ray's own belong in what a command prints.
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise ClusterFailed(f"cannot join the Ray cluster at {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def deploy(
    settings: Settings,
    environment_key: str | None,
    options: ReplicaOptions,
    *,
    on_progress: Progress,
    timeout_s: float,
) -> None:
    """Run replicas, and return once as many as asked for are ready. Those of an earlier call are
    replaced one by one, and drain.

    Raises:
        ClusterFailed: the port is not that of the cluster's proxies, another application has the
            root of their paths, a replica did not start, or not in time.
    """
    _start_proxies(settings.http)
    application = make_application(settings, environment_key, options)
    before = {each["replica_id"] for each in _replicas()}
    serve.run_many(
        [serve.RunTarget(application, name=APPLICATION, route_prefix="/")],
        wait_for_applications_running=False,
    )
    _wait_until_ready(before, options, on_progress=on_progress, timeout_s=timeout_s)


def _start_proxies(http: HttpOptions) -> None:
    """Start the proxies that listen, or check those that there are."""
    found = _details().get("http_options")
    if found is None:
        certificate = {
            "ssl_certfile": str(http.ssl_certfile),
            "ssl_keyfile": str(http.ssl_keyfile or http.ssl_certfile),
        }
        serve.start(
            http_options={
                "host": http.host,
                "port": http.port,
                **(certificate if http.ssl_certfile is not None else {}),
            }
        )
    elif (found["host"], found["port"]) != (http.host, http.port):
        raise ClusterFailed(
            f"the proxies of this Ray cluster listen on {found['host']}:{found['port']} already: "
            f"pass --host {found['host']} --port {found['port']}, or stop Ray Serve there first"
        )
    others = [
        name
        for name, each in _applications().items()
        if name != APPLICATION and each["route_prefix"] == "/"
    ]
    if others:
        raise ClusterFailed(
            f"the application {others[0]!r} of this Ray cluster has all paths: delete it first"
        )


def _wait_until_ready(
    before: set[str], options: ReplicaOptions, *, on_progress: Progress, timeout_s: float
) -> None:
    deadline_s, asked = time.monotonic() + timeout_s, options.count.least
    while True:
        application = _applications().get(APPLICATION, {})
        states = [each["state"] for each in _replicas() if each["replica_id"] not in before]
        num_ready = states.count(_RUNNING)
        old = sum(each["replica_id"] in before for each in _replicas())
        if num_ready >= asked and not old and application.get("status") == _RUNNING:
            return
        replaced = f", {old} to be replaced" if old else ""
        on_progress(f"{num_ready} of {asked} replicas are ready{replaced}")
        if application.get("status") == "DEPLOY_FAILED":
            raise ClusterFailed(f"the replicas did not start: {_why(application)}")
        if time.monotonic() > deadline_s:
            free = ray.available_resources().get("CPU", 0.0)
            raise ClusterFailed(
                f"{num_ready} of {asked} replicas were ready after {timeout_s:g} s; each takes "
                f"{options.num_cpus:g} CPUs and {options.num_gpus:g} GPUs, and {free:g} CPUs of "
                f"the cluster are free. Ray Serve says: {_why(application)}"
            )
        time.sleep(CLUSTER_LOOK_S)


def _why(application: Mapping[str, Any]) -> str:
    """Return why the replicas are not ready: of an error of ours what it says, of others all."""
    deployments = application.get("deployments", {})
    told = str(deployments.get(APPLICATION, {}).get("message") or application.get("message") or "")
    last = told.strip().rpartition("\n")[2]
    is_ours = last.startswith("session_server.")
    return last.partition(": ")[2] if is_ours else told or "nothing"


def status() -> list[dict[str, Any]]:
    """Return what each replica is and does, in order of their start."""
    replicas = sorted(_replicas(), key=lambda each: float(each["start_time_s"]))
    if not replicas:
        return []
    handle = serve.get_app_handle(APPLICATION)
    with ThreadPoolExecutor(len(replicas)) as pool:
        return list(pool.map(partial(_row_of, handle), replicas))


def _row_of(handle: Any, replica: Mapping[str, Any]) -> dict[str, Any]:
    tag = tag_of(replica["replica_id"])
    row = {
        "replica": tag,
        "state": str(replica["state"].value).lower(),
        "node": replica.get("node_ip"),  # one that starts has no place yet, and no process
        "pid": replica.get("pid"),
        "sessions": None,
        "turns": None,
        "waiting": None,
        "kv_use": None,
        "engine": "no answer",
    }
    if replica["state"] == _RUNNING:
        with contextlib.suppress(TimeoutError, RayError, RayServeException):
            row |= handle.report.remote(key_for(tag)).result(timeout_s=REPORT_DEADLINE_S)
    return row


def take_down(*, on_progress: Progress) -> None:
    """Have all replicas drain and stop, and end the proxies unless others use them."""
    if APPLICATION in _applications():
        num_replicas = len(_replicas())  # Ray Serve does not show them while they drain
        serve.delete(APPLICATION, _blocking=False)
        while APPLICATION in _applications():
            on_progress(f"{num_replicas} replicas drain")
            time.sleep(CLUSTER_LOOK_S)
    if not _applications():
        serve.shutdown()


def _details() -> dict[str, Any]:
    """Return what Ray Serve says of itself, as its REST API does; nothing if it does not run."""
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    details: dict[str, Any] = {} if client is None else client.get_serve_details()
    return details


def _applications() -> dict[str, Any]:
    applications: dict[str, Any] = _details().get("applications", {})
    return {name: each for name, each in applications.items() if each["status"] not in _GONE}


def _replicas() -> list[dict[str, Any]]:
    application = _details().get("applications", {}).get(APPLICATION, {})
    replicas: list[dict[str, Any]] = (
        application.get("deployments", {}).get(APPLICATION, {}).get("replicas", [])
    )
    return replicas
