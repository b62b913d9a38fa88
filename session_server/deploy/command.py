"""Run several replicas as one server, under Ray Serve.

  up       start replicas, wait until all are ready, and return; they run on.
           Again: replace them one by one, each drains
  status   show what each replica does
  down     drain and stop them

Without --address, `up` starts a Ray for these replicas on this machine, and
`down` ends it; with it they join the cluster there. Every flag of `serve` is
one of `up`, and every replica is such a server, with an engine of its own.
A session stays with the replica that opened it, and ends with it, unless
--store names a PostgreSQL: then it goes on in another one.
Needs the extra `ray`. docs/cluster.md has the rest: several machines,
Kubernetes, and other ways to spread sessions.

examples:
  session-server cluster up --replicas 2
  session-server cluster up --replicas 2 --store postgresql://user@host/sessions
  session-server cluster up --replicas 1-8 --replica-gpus 1 --model-path DIR
  session-server cluster up --address auto --replicas 4 --host 0.0.0.0 \\
      --api-key-file FILE
  session-server cluster status
  session-server cluster down
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

from rich.console import Console
from rich.table import Column

from session_server import serve as serve_command
from session_server import serving, sources, wiring
from session_server.arguments import number
from session_server.config import HttpOptions, Settings
from session_server.core.child_process import called_as
from session_server.deploy.head import (
    ClusterFailed,
    Head,
    HeadFailed,
    Record,
    check_reachable,
    is_running,
    read_record,
    remove_record,
    show_token,
    start_head,
    stop_head,
    write_record,
)
from session_server.deploy.options import (
    ReplicaCount,
    ReplicaOptions,
    replica_count,
    replica_settings,
)
from session_server.models.errors import ModelError
from session_server.progress import LINE_INTERVAL_S
from session_server.served_model import checked_directory
from session_server.sessions.store.lock import StoreUnusable
from session_server.shared_store import check_shared
from session_server.terminal import make_table
from session_server.web.listener import bind, why_not

_ACTIONS: Final = ("up", "status", "down")
AUTO: Final = "auto"
"""Stands for the address of the Ray cluster that Ray finds on this machine."""

_COUNTS: Final = ("sessions", "turns", "waiting", "KV use")

WITHOUT_RAY: Final = (
    "Ray Serve is not installed, which runs the replicas: pip install 'session-server[ray]'"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cluster`, those of `serve` among them."""
    parser.add_argument("action", choices=_ACTIONS, metavar="ACTION", help=", ".join(_ACTIONS))
    group = parser.add_argument_group("cluster", "Say how many replicas run, and where.")
    group.add_argument(
        "--replicas",
        type=replica_count,
        metavar="N",
        default=ReplicaCount(2, 2),
        help="how many run, or MIN-MAX: as many as their turns and KV need (default: 2)",
    )
    group.add_argument(
        "--replica-cpus",
        type=number(0.1, 1024),
        metavar="C",
        default=1.0,
        help="CPUs that each is given, and --threads of its forwards (default: 1)",
    )
    group.add_argument(
        "--replica-gpus",
        type=number(0, 64),
        metavar="G",
        default=0.0,
        help="GPUs that each is given (default: 0)",
    )
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the Ray cluster to join, or auto: the one that runs here (default: start one, of "
        "this machine and for these replicas)",
    )
    group.add_argument(
        "--timeout",
        type=number(1, 86_400),
        metavar="S",
        default=900.0,
        help="seconds that `up` waits for the replicas (default: 900)",
    )
    group.add_argument("--json", action="store_true", help="print `status` as JSON")
    serve_command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Do what was asked. Return 0, 1 if it failed, 2 for what cannot be used."""
    if importlib.util.find_spec("ray") is None:
        return _refused(WITHOUT_RAY)
    try:
        sourced = serve_command.read(args)
    except ValueError as error:
        return _refused(str(error))
    if args.print_config:
        print(sources.shown_settings(sourced, has_variable_key=serving.take_key() is not None))
        return wiring.EXIT_OK
    action = {"up": _up, "status": _status, "down": _down}[args.action]
    # Ended from outside, it still stops the Ray that it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return action(args, sourced.settings)
    except (ModelError, StoreUnusable, ValueError) as error:
        return _refused(sourced.worded(str(error)))
    except BrokenPipeError:
        raise  # whoever reads what is printed has seen enough
    except (ClusterFailed, HeadFailed, OSError) as error:
        return _refused(sourced.worded(str(error)), wiring.EXIT_FAILED)


def _up(args: argparse.Namespace, settings: Settings) -> int:
    http, key = settings.http, serving.take_key()
    options = ReplicaOptions(args.replicas, args.replica_cpus, args.replica_gpus)
    # Refuse at once what every replica would.
    if http.port == 0:
        raise ValueError("--port 0: several machines listen on one port; choose it")
    entrance = wiring.make_entrance(http, key)
    replica_settings(settings, options)
    checked_directory(settings)
    record = read_record(http.port)
    head = record.head if record is not None and args.address is None else None
    with contextlib.ExitStack() as undone, _told() as tell:
        if args.address is None and (head is None or not is_running(head)):
            _check_can_start(settings)
            tell("starting Ray on this machine")
            head = start_head(max(os.cpu_count() or 1, options.cluster_cpus))
            undone.callback(stop_head, head)
        address = args.address if head is None else head.address
        with _joined(address, head) as cluster:
            cluster.deploy(settings, key, options, on_progress=tell, timeout_s=args.timeout)
        write_record(http.port, Record(_url_of(http), address, head))
        undone.pop_all()
    _announce(settings, options, head, needs_key=not entrance.keys.is_open)
    return wiring.EXIT_OK


def _check_can_start(settings: Settings) -> None:
    """Refuse what each replica on this machine would fail at. Raises ClusterFailed,
    StoreUnusable."""
    http = settings.http
    try:
        bind(http.host, http.port).close()
    except OSError as error:
        advice = "pass another --port, or end what listens there"
        raise ClusterFailed(why_not(http.host, http.port, error, advice)) from error
    if _has_store(settings):
        check_shared(str(settings.sessions.store))


def _announce(
    settings: Settings, options: ReplicaOptions, head: Head | None, *, needs_key: bool
) -> None:
    http = settings.http
    url, port = _url_of(http), "" if http.port == HttpOptions().port else f" --port {http.port}"
    print(f"listening on {url}")
    if not sys.stdout.isatty():
        return
    variable = "SESSION_SERVER_API_KEY=KEY " if needs_key else ""
    print(f"  replicas       {options.count}: {called_as()} cluster status{port}")
    print(f"  chat           {variable}{called_as()} chat --url {url}")
    print(f"  sessions       {_kept_in(settings)}")
    if head is not None:
        print(f"  logs           {head.logs}")
    print(f"  to stop        {called_as()} cluster down{port}")


def _kept_in(settings: Settings) -> str:
    """Return what becomes of sessions whose replica is replaced or lost."""
    return "go on in another replica" if _has_store(settings) else "end with their replica"


def _has_store(settings: Settings) -> bool:
    """Return whether replicas share a store: `replica_settings` refuses any other."""
    return settings.sessions.store not in ("auto", "none")


def _url_of(http: HttpOptions) -> str:
    scheme = "http" if http.ssl_certfile is None else "https"
    host = f"[{http.host}]" if ":" in http.host else http.host
    return f"{scheme}://{host}:{http.port}"


def _status(args: argparse.Namespace, settings: Settings) -> int:
    record, address = _found(args, settings)
    rows: list[dict[str, Any]] = []
    if address is not None:
        with _joined(address, None if record is None else record.head) as cluster:
            rows = cluster.status()
    if args.json:
        url = None if record is None else record.url
        print(json.dumps({"url": url, "replicas": rows}, indent=2))
    elif rows:
        columns = (Column("replica"), Column("state"), Column("node"), "pid", *_COUNTS)
        table = make_table((*columns, Column("engine")), map(_shown_row, rows))
        Console(highlight=False).print(table)
    if not rows and not args.json:
        return _refused(_nothing_runs(settings), wiring.EXIT_FAILED)
    return wiring.EXIT_OK if rows else wiring.EXIT_FAILED


def _shown_row(row: Mapping[str, Any]) -> list[str]:
    use = row["kv_use"]
    shown = {**row, "kv_use": None if use is None else f"{use:.0%}"}
    return ["-" if value is None else str(value) for value in shown.values()]


def _down(args: argparse.Namespace, settings: Settings) -> int:
    record, address = _found(args, settings)
    if address is None:
        print(_nothing_runs(settings), file=sys.stderr)
        return wiring.EXIT_OK
    with _told() as tell:
        with _joined(address, None if record is None else record.head) as cluster:
            cluster.take_down(on_progress=tell)
        if record is not None and record.head is not None:
            tell("stopping Ray")
            stop_head(record.head)
    remove_record(settings.http.port)
    print("stopped")
    return wiring.EXIT_OK


def _found(args: argparse.Namespace, settings: Settings) -> tuple[Record | None, str | None]:
    """Return what was started on the port, and the address of its Ray; None, None if nothing."""
    record = read_record(settings.http.port)
    if record is not None and record.head is not None and not is_running(record.head):
        stop_head(record.head)  # its files are left
        remove_record(settings.http.port)
        record = None
    if args.address is not None:
        is_same = record is not None and record.address == args.address
        return record if is_same else None, args.address
    return record, None if record is None else record.address


@contextlib.contextmanager
def _joined(address: str, head: Head | None) -> Iterator[ModuleType]:
    """Return what deploys, connected to a Ray inside the block: one of ours, or that of others."""
    if address != AUTO:
        check_reachable(address)
    if head is not None:
        show_token(head.directory)
    from session_server.deploy import ray_cluster

    with ray_cluster.joined(address):
        yield ray_cluster


def _nothing_runs(settings: Settings) -> str:
    return (
        f"no cluster was started on port {settings.http.port} by this user: pass its --port, or "
        "the --address of its Ray"
    )


@contextlib.contextmanager
def _told() -> Iterator[Callable[[str], None]]:
    """Show what is waited for and how long, inside the block: in one line of a terminal, elsewhere
    in a line for every change, and now and then."""
    console, last = Console(stderr=True, highlight=False), ""
    started_s = printed_s = time.monotonic()

    def tell(words: str) -> None:
        nonlocal last, printed_s
        now_s = time.monotonic()
        line = f"{words}, {now_s - started_s:.0f} s"
        if not console.is_terminal and (words != last or now_s - printed_s >= LINE_INTERVAL_S):
            console.print(line, soft_wrap=True)
            printed_s = now_s
        spinner.update(line)
        last = words

    with console.status("") as spinner:
        yield tell


def _refused(told: str, status: int = wiring.EXIT_UNUSABLE) -> int:
    print(f"session-server cluster: {told}", file=sys.stderr)
    return status
