"""Two thousand idle sockets, two hundred turns that stream, and SIGTERM: `make load`.

A server process with the embedded model, and every client in this process. Claims: an idle socket
with its session takes 30 KiB of the server's process at most; the event loop's lag stays within
50 ms for 99 of 100 probes while turns stream; after SIGTERM every turn has ended or its socket was
closed with 1012 within ten seconds, peers that read nothing among them, and the exit status is 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import psutil
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from session_server.local_server import LocalServer
from tests.rig.history import ENDS
from tests.rig.raw_peer import text_frame, upgrade
from tests.rig.scraped import samples_of
from tests.web.wire_client import SUBPROTOCOL, Wire, narrow_socket, turn

MAX_IDLE_BYTES = 30 * 1024
MAX_LAG_S = 0.05
MAX_DRAIN_S = 10.0
DRAIN_S = 6.0
AT_ONCE = 32
WARM_UP = 100
LONG = turn(max_tokens=400, text="Count.", sampling={"max_tokens": 400, "ignore_eos": True})
LAG = "session_server_event_loop_lag_seconds_bucket"


@dataclass
class Result:
    """What was measured; times in seconds, sizes in bytes.

    `first_lag_s`: of 99 of 100 probes until every turn streams, which all begin at once; no claim.
    """

    idle_bytes: float = 0.0
    lag_s: float = 0.0
    first_lag_s: float = 0.0
    worst_end_s: float = 0.0
    exit_s: float = 0.0
    num_told: int = 0
    num_closed: int = 0
    num_lost: int = 0
    status: int = -1

    @property
    def holds(self) -> bool:
        return (
            self.idle_bytes <= MAX_IDLE_BYTES
            and self.lag_s <= MAX_LAG_S
            and max(self.worst_end_s, self.exit_s) <= MAX_DRAIN_S
            and self.num_lost == self.status == 0
        )


async def open_sockets(url: str, num: int) -> list[ClientConnection]:
    """Sockets with a session each, which have heard the hello."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> ClientConnection:
        async with gate:
            opened = await connect(
                url.replace("http", "ws", 1) + "/v1/sessions/new/ws",
                subprotocols=[SUBPROTOCOL],
                compression=None,
                proxy=None,
                ping_interval=None,
                close_timeout=1,
            )
            await opened.recv()
            return opened

    return list(await asyncio.gather(*(one() for _ in range(num))))


def lag_buckets(url: str) -> Mapping[float, float]:
    """Probes of the event loop's lag, cumulative, by upper bound in seconds."""
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    return {float(sample.labels["le"]): sample.value for sample in samples_of(text, LAG)}


def percentile_of(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """The bound under which 99 of 100 probes between two scrapes lie; NaN without probes."""
    during = {bound: after[bound] - before[bound] for bound in after}
    if not during[float("inf")]:
        return float("nan")
    return min(bound for bound, num in during.items() if num >= 0.99 * during[float("inf")])


async def stream(
    wire: ClientConnection, begins: asyncio.Semaphore, ends: list[float], result: Result
) -> None:
    """Read until the socket ends; note when, and whether the turn's end was told. `begins` is
    released at the first delta, or at the end of a turn that had none."""
    text = Wire(wire)
    is_told = has_begun = False
    with contextlib.suppress(ConnectionClosed):
        while True:
            frame = await text.receive()
            if not has_begun and frame["type"] in {"turn.delta", *ENDS}:
                has_begun = True
                begins.release()
            is_told = is_told or frame["type"] in ENDS
    if not has_begun:
        begins.release()
    ends.append(time.monotonic())
    result.num_told += is_told
    result.num_closed += wire.close_code == 1012
    result.num_lost += not (is_told or wire.close_code == 1012)


async def deaf_peers(port: int, num: int) -> list[socket.socket]:
    """Sockets whose turns stream to nobody: their peers read nothing."""
    loop, peers = asyncio.get_running_loop(), []
    for _ in range(num):
        peer = await narrow_socket(port)
        await loop.sock_sendall(peer, upgrade("new"))
        await loop.sock_recv(peer, 1)
        frame = text_frame({"type": "turn.create", "turn_id": "t", **LONG})
        await loop.sock_sendall(peer, frame)
        peers.append(peer)
    return peers


async def play(server: LocalServer, args: argparse.Namespace) -> Result:
    """One run. The server is gone at its end."""
    result, url = Result(), server.url
    process = psutil.Process(server.pid)
    for opened in await open_sockets(url, WARM_UP):
        await opened.close()
    before = process.memory_info().rss
    idle = await open_sockets(url, args.idle)
    await asyncio.sleep(2)
    result.idle_bytes = (process.memory_info().rss - before) / args.idle
    streaming = await open_sockets(url, args.streaming)
    deaf = await deaf_peers(int(url.rpartition(":")[2]), args.deaf)
    at_rest = await asyncio.to_thread(lag_buckets, url)
    begins, ends = asyncio.Semaphore(0), list[float]()
    readers = [asyncio.create_task(stream(wire, begins, ends, result)) for wire in streaming]
    for number, wire in enumerate(streaming):
        await Wire(wire).send("turn.create", turn_id=f"t{number}", **LONG)
    for _ in streaming:
        await begins.acquire()
    begun = await asyncio.to_thread(lag_buckets, url)
    await asyncio.sleep(args.seconds)
    result.first_lag_s = percentile_of(at_rest, begun)
    result.lag_s = percentile_of(begun, await asyncio.to_thread(lag_buckets, url))
    began_s = time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    result.status = await asyncio.to_thread(server.wait, timeout_s=60.0)
    result.exit_s = time.monotonic() - began_s
    await asyncio.gather(*readers)
    result.worst_end_s = max(ends) - began_s
    for wire in idle:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await wire.recv()
        result.num_lost += wire.close_code != 1012
    for peer in deaf:
        peer.close()
    return result


def tell(line: str) -> None:
    """Show what the server says of its drain."""
    if "drain" in line and "turn finished" not in line:
        print(line)


def main() -> int:
    """Run once, print a row and whether it holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--streaming", type=int, default=200)
    parser.add_argument("--deaf", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16_384)), hard))
    flags = ["--threads", "1", "--context-length", "512", "--max-running-requests", "256"]
    flags += ["--drain-timeout", str(DRAIN_S), "--session-ttl", "3600"]
    with LocalServer(flags, on_line=tell) as server:
        result = asyncio.run(play(server, args))
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    print(
        f"| {args.idle} | {result.idle_bytes / 1024:.1f} | {args.streaming} | "
        f"{result.first_lag_s * 1000:g} | {result.lag_s * 1000:g} | "
        f"{result.num_told} | {result.num_closed} | {result.num_lost} | "
        f"{result.worst_end_s:.1f} | {result.exit_s:.1f} | {result.status} |"
    )
    print("holds" if result.holds else "DOES NOT HOLD")
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
