"""Replicas under Ray Serve that share a store, behind one address, and what befalls them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import psutil
from websockets.exceptions import ConnectionClosed, InvalidStatus

from session_server.deploy.head import show_token
from tests.chaos.cluster import BUSY, LEASE_IS_OVER, Fate, Way
from tests.chaos.crashes import FLAGS, Report
from tests.deploy.cluster import UP_S, Cluster
from tests.rig.decisions import Decisions
from tests.rig.processes import ECHO_ENGINE, engines_of
from tests.web.wire_client import http_client

LEASE_S = 6.0
"""How long a replica's lease is that nobody has made shorter."""

BEFELL_S = 20.0
"""How long after all replicas are back a client may be cut off for what befell one."""

ANNOUNCED = (1001, 1012)
"""Close codes of a replica that stops."""

REPLICA, ENGINE, PROXY, CONTROLLER, WORKER = (
    "a replica killed",
    "an engine killed",
    "the proxy killed",
    "the controller killed",
    "a worker killed",
)
_WORST = (PROXY, REPLICA, ENGINE, CONTROLLER, WORKER)
_WORKERS = {
    "ray::ProxyActor": PROXY,
    "ray::ServeController": CONTROLLER,
    "ray::IDLE": WORKER,
}


ENGINE_PACE_S = 9.0
"""How often an engine is killed, about, besides what is killed at the same time."""


class NotReady(Exception):
    """Report that not all replicas serve."""


@dataclass
class RayTown(Way):
    """Replicas, and the one address that clients know.

    `num_left`: how many processes are still to be killed. `fates`: what befell any of them, in
    order. `serving`: the processes of replicas with an engine, as they were seen last. Until
    `hurt_until_s` clients may be cut off. `back_s`: how long it took until all replicas served
    again, by the worst that befell them.
    """

    report: Report
    chance: Decisions
    cluster: Cluster
    store_url: str
    num_left: int = 0
    pace_s: float = 1.0
    think_s: float = 4.0
    most_s: float = math.inf
    lease_s: float = LEASE_S
    is_over: bool = False
    serving: list[int] = field(default_factory=list)
    hurt_until_s: float = 0.0
    fates: list[Fate] = field(default_factory=list)
    back_s: dict[str, list[float]] = field(default_factory=dict)

    async def place(self) -> str:
        """Return the address, a moment later: it may be that nobody listens there."""
        await asyncio.sleep(0.2 * self.chance.share())
        return self.cluster.url

    @property
    def urls(self) -> list[str]:
        """The one address."""
        return [self.cluster.url]

    def fate_of(self, url: str, since_s: float) -> str:
        """Return the worst of what befell any of them from a moment before a time on."""
        kinds = self._lately(since_s - self.think_s - 2.0)  # who thinks does not hear it at once
        return next((kind for kind in _WORST if kind in kinds), "a handover")

    def _lately(self, since_s: float) -> set[str]:
        return {fate.kind for fate in self.fates if fate.at_s >= since_s}

    def may_still_run(self) -> bool:
        """Return whether a replica may live that a client was cut off from."""
        kinds = self._lately(time.monotonic() - 3 * BEFELL_S)
        return PROXY in kinds or REPLICA not in kinds

    def http(self, url: str, *, timeout_s: float = 20) -> httpx.AsyncClient:
        """Return a client that is cut off where the proxy says that its replica is."""
        http = http_client(url, timeout_s=timeout_s)
        http.event_hooks["response"].append(self._is_ours)
        return http

    async def _is_ours(self, answer: httpx.Response) -> None:
        kind = answer.headers.get("content-type", "")
        if answer.status_code < HTTPStatus.BAD_REQUEST or kind.startswith("application/json"):
            return
        await answer.aread()
        self.report.saw[f"the proxy said {answer.status_code}"] += 1
        raise httpx.RemoteProtocolError(f"the proxy said {answer.status_code} {answer.text[:200]}")

    def lost(self, error: BaseException) -> None:
        """Count it; complain of what nothing explains."""
        super().lost(error)
        if time.monotonic() > self.hurt_until_s:
            for each in _single(error):
                if not self._is_announced(each):
                    self.report.problems.append(f"cut off, and nothing befell it: {each!r}")
                    print(time.strftime("%H:%M:%S"), self.report.problems[-1], flush=True)

    def _is_announced(self, error: BaseException) -> bool:
        """Return whether whoever was cut off was told to come again."""
        if isinstance(error, ConnectionClosed) and error.rcvd is not None:
            self.report.saw[f"closed with {error.rcvd.code}"] += 1
            return error.rcvd.code in ANNOUNCED
        if isinstance(error, InvalidStatus):
            status = error.response.status_code
            self.report.saw[f"no socket: {status}"] += 1
            return status in BUSY and b'"code"' in error.response.body
        return isinstance(error, ConnectionRefusedError)  # `LibraryResponder` was told so

    def befell(self, kind: str) -> None:
        """Note what has become of one of them."""
        self.fates.append(Fate(kind, time.monotonic()))
        self.report.saw[kind] += 1

    # -- commands

    async def up(self, *flags: str) -> None:
        """Run `cluster up`, and wait for it."""
        begun_s = time.monotonic()
        flags = (*FLAGS, "--drain-timeout", "2", "--replica-cpus", "0.5", *flags)
        flags = (*flags, "--store", self.store_url)
        done = await asyncio.to_thread(self.cluster.run, "up", *flags)
        assert done.returncode == 0, done.stderr
        self.report.ready_s.append(time.monotonic() - begun_s)
        self.cluster.seen |= self.cluster.processes()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Be connected to the cluster's Ray meanwhile."""
        record = self.cluster.record()
        assert record.head is not None
        show_token(record.head.directory)
        from session_server.deploy import ray_cluster

        with ray_cluster.joined(record.address):
            yield

    async def rows(self, num: int = 3, *, without: frozenset[int] = frozenset()) -> Sequence[Any]:
        """Wait until so many replicas serve, none of them some processes, and return what
        `cluster status` says of them."""
        from session_server.deploy import ray_cluster

        until_s = time.monotonic() + UP_S
        rows: Sequence[Any] = ()
        while time.monotonic() < until_s:
            with contextlib.suppress(Exception):  # of Ray, whose controller may be the killed one
                rows = await asyncio.to_thread(ray_cluster.status)
                pids = {row["pid"] for row in rows if row["engine"] == "running"}
                self.serving = [*pids]
                if len(pids) == num == len(rows) and not pids & without:
                    return rows
            await asyncio.sleep(0.25)
        raise NotReady(f"{rows}")

    # -- deeds

    async def torment_engines(self) -> None:
        """Kill an engine now and then, of a replica that lives, whatever befalls the others."""
        while self.num_left > 0:
            await asyncio.sleep(ENGINE_PACE_S * (0.5 + self.chance.share()))
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                # One that starts with its replica is spared: Ray Serve takes its time then.
                for engine in engines_of(self.chance.pick(self.serving or [0]), ECHO_ENGINE):
                    self._kill(engine, ENGINE)

    async def torment(self) -> None:
        """Kill until enough were killed; wait each time until all replicas serve again."""
        rows = await self.rows()
        while self.num_left > 0:
            begun_s, self.hurt_until_s = time.monotonic(), math.inf
            killed = self._kill_some(rows)
            rows = await self.rows(without=frozenset(killed))
            await self._answers()
            self.hurt_until_s = time.monotonic() + BEFELL_S
            kinds = self._lately(begun_s)
            worst = next((kind for kind in (PROXY, *_WORST) if kind in kinds), None)
            if worst is not None:  # what was to be killed may have been dead already
                self.back_s.setdefault(worst, []).append(time.monotonic() - begun_s)
            await asyncio.sleep(self.pace_s * 2 * self.chance.share())

    def _kill_some(self, rows: Sequence[Any]) -> list[int]:
        """Kill one process, or two or three at once; return those that will be others then."""
        killed, replicas = list[int](), list(rows)
        for _ in range(self.chance.pick((1, 1, 1, 2, 2, 2, 3, 3))):
            deed = self.chance.pick((REPLICA, REPLICA, REPLICA, ENGINE, ENGINE, WORKER))
            if deed == WORKER:
                killed += self._kill_worker()
                continue
            pid = replicas.pop(self.chance.below(len(replicas)))["pid"]
            if deed == REPLICA:
                killed += self._kill(pid, REPLICA)
            for engine in engines_of(pid, ECHO_ENGINE) if deed == ENGINE else ():
                self._kill(engine, ENGINE)
        return killed

    def _kill_worker(self) -> list[int]:
        """Kill a process of Ray that is no replica: a proxy, the controller, or an idle one."""
        found = [(pid, _WORKERS[name]) for pid, name in self._processes() if name in _WORKERS]
        return self._kill(*self.chance.pick(found)) if found else []

    def _processes(self) -> Iterator[tuple[int, str]]:
        """Yield the processes of the cluster with the names that Ray gives to its own."""
        head = self.cluster.record().head
        assert head is not None
        for process in psutil.Process(head.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                yield process.pid, ":".join(process.cmdline()[:1]).split(":session-server")[0]

    def _kill(self, pid: int, kind: str) -> list[int]:
        os.kill(pid, signal.SIGKILL)
        self.befell(kind)
        self.num_left -= 1
        return [pid]

    async def _answers(self) -> None:
        """Wait until the proxy lets requests through."""
        async with http_client(self.cluster.url, timeout_s=5) as http:
            until_s = time.monotonic() + UP_S
            while time.monotonic() < until_s:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get("/ready")).status_code == HTTPStatus.OK:
                        return
                await asyncio.sleep(0.1)
        raise NotReady("the proxy does not answer")

    # -- the end

    def read_logs(self) -> None:
        """Count what replicas wrote that matters."""
        head = self.cluster.record().head
        assert head is not None
        for path in Path(head.directory).rglob("*"):
            if path.suffix in (".log", ".err", ".out") and path.is_file():
                text = path.read_text("utf-8", "replace")
                self.report.saw["leases lost"] += text.count(LEASE_IS_OVER)
                self.report.saw["tracebacks"] += text.count("Traceback")


def _single(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group, or the one that there is."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _single(each)
    else:
        yield error
