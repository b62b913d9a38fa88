"""Start and stop a Ray of our own on this machine, and remember it for the next command.

Ray listens on every address of the machine, and whoever reaches it may run programs: so this one
asks for a token, which is in a file of ours. A cluster of several machines is started with Ray's
own commands, and joined.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from session_server.config import LOOPBACK
from session_server.core.child_process import PYTHON_MODULE
from session_server.sessions.store.places import state_directory

CONNECT_TIMEOUT_S: Final = 5.0
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0
LOG_FILE: Final = "ray.log"
TOKEN_FILE: Final = "token"  # noqa: S105 - its name
_RAY_FILES: Final = "r"
"""Ray's own directory, in ours: it opens its own to everybody, and ours stays closed."""

PROXY_LOOK_S: Final = 1.0
"""Seconds between two looks of Ray Serve whether a proxy is well. It is replaced after the third
that fails; by Ray's own 10 s nobody would listen for half a minute."""

_ENVIRONMENT: Final = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": f"{PROXY_LOOK_S:g}",
    # Ray's workers have 15 otherwise: replicas would wait for whatever else the machine does.
    "RAY_worker_niceness": "0",
}

_TAIL_LINES: Final = 12
_LOOK_S: Final = 0.2

_RAY: Final = (*PYTHON_MODULE, "ray.scripts.scripts", "start", "--head", "--block")


class HeadFailed(Exception):
    """Report that Ray did not start; the message ends with its last lines."""


class ClusterFailed(Exception):
    """Report what the cluster could not do, and what to do."""


class Head(msgspec.Struct, frozen=True):
    """Name a Ray that was started here: its address, its first process, where its files lie."""

    address: str
    pid: int
    directory: str

    @property
    def logs(self) -> Path:
        """The directory in which Ray keeps what the replicas and its own processes print."""
        return Path(self.directory, _RAY_FILES, "session_latest", "logs")


class Record(msgspec.Struct, frozen=True):
    """Say what runs on a port: where its Ray is, and whether that was started with it."""

    url: str
    address: str
    head: Head | None = None


def start_head(num_cpus: int) -> Head:
    """Start Ray with this many CPUs to give away, and return once it answers.

    Raises:
        HeadFailed: it ended, or did not answer in time.
    """
    directory = tempfile.mkdtemp(prefix="session-")  # short: a socket's path has 107 bytes
    with contextlib.closing(socket.create_server((LOOPBACK, 0))) as free:
        port = free.getsockname()[1]
    argv = (
        *_RAY,
        f"--node-ip-address={LOOPBACK}",
        f"--port={port}",
        f"--num-cpus={num_cpus}",
        f"--temp-dir={directory}/{_RAY_FILES}",
        "--include-dashboard=false",
        "--disable-usage-stats",
    )
    private = os.open(Path(directory, TOKEN_FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(private, "w", encoding="ascii") as token:
        token.write(secrets.token_hex(32))
    show_token(directory)
    log = Path(directory, LOG_FILE)
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own argv, no shell
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ | _ENVIRONMENT,
        )
    head = Head(f"{LOOPBACK}:{port}", process.pid, directory)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    try:
        while "--block" not in log.read_text("utf-8", "replace"):  # what it says once it runs
            if process.poll() is not None or time.monotonic() > deadline_s:
                lines = log.read_text("utf-8", "replace").splitlines()[-_TAIL_LINES:]
                raise HeadFailed("\n".join(("Ray did not start; its last lines:", *lines)))
            time.sleep(_LOOK_S)
    except BaseException:  # whoever is ended meanwhile leaves nothing that runs
        stop_head(head)
        process.poll()  # it is gone, which its object does not know
        raise
    return head


def check_reachable(address: str) -> None:
    """Raise ClusterFailed if nothing listens at HOST:PORT: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ClusterFailed(
            f"no Ray cluster answers at {address}: `ray start --head` starts one, and without "
            "--address `session-server cluster up` does"
        ) from error


def show_token(directory: str) -> None:
    """Have Ray in this process, and in those it starts, show the token of a Ray of ours. Call it
    before Ray is imported."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(Path(directory, TOKEN_FILE))


def stop_head(head: Head) -> None:
    """End a Ray that was started here, with all its processes, and remove its files."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # its reaper ends what a killed one has started
        if is_running(head):
            os.kill(head.pid, number)
            _waited(lambda: not is_running(head))
    shutil.rmtree(head.directory, ignore_errors=True)


def is_running(head: Head) -> bool:
    """Return whether a Ray that was started here still runs, and its number is not another's."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(head.pid, os.WNOHANG)  # a child of ours would stay as a zombie
    try:
        os.kill(head.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    line = Path(f"/proc/{head.pid}/cmdline")
    return not line.exists() or head.directory.encode() in line.read_bytes()


def read_record(port: int) -> Record | None:
    """Return what was started on a port by this user; None if nothing was."""
    path = _path_of(port)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record) if path else None
    except (OSError, msgspec.MsgspecError):
        return None


def write_record(port: int, record: Record) -> None:
    """Remember what runs on a port. Raises OSError."""
    path = _path_of(port)
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(record))


def remove_record(port: int) -> None:
    """Forget what ran on a port."""
    path = _path_of(port)
    if path is not None:
        path.unlink(missing_ok=True)


def _path_of(port: int) -> Path | None:
    state = state_directory(os.environ)
    return None if state is None else state / "clusters" / f"port-{port}.json"


def _waited(is_done: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while not (done := is_done()) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    return done
