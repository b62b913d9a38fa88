"""Sockets in every odd state against a server with few descriptors, and what others see of it.

`python -m tests.chaos.odd_sockets` opens 1,100 of them under 1,024 descriptors.
"""

from __future__ import annotations

import argparse
import resource
import socket
import sys
import time
from dataclasses import dataclass

import httpx

from session_server.local_server import LocalServer
from tests.rig.raw_peer import raw_frame, text_frame, upgrade

LIMITED = """
import os, resource, sys
descriptors = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
os.execv(sys.executable, [sys.executable, "-m", "session_server", "serve", *sys.argv[2:]])
"""
PATIENCE_S = 10.0

_GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
_POST = (
    b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 1000000\r\n\r\n"
)
_CHUNKED = _POST.replace(b"Content-Length: 1000000", b"Transfer-Encoding: chunked")


def _with(head: bytes, header: bytes) -> bytes:
    return head.replace(b"\r\n\r\n", b"\r\n" + header + b"\r\n\r\n")


@dataclass(frozen=True)
class Odd:
    """A socket that says this, waits for an answer where `waits`, says `then`, and reads no more.

    `drip` is sent once in every round.
    """

    says: bytes
    waits: bytes = b""
    then: bytes = b""
    drip: bytes = b""


ODD = (
    Odd(b""),
    Odd(_GET[:9]),
    Odd(_GET[:-2], drip=b"X: y\r\n"),
    Odd(_POST),
    Odd(_POST + b" " * 900_000),
    Odd(_POST, drip=b" "),
    Odd(_CHUNKED + b"ffff\r\n ", drip=b" "),
    Odd(_CHUNKED + b"2;" + b"a" * 5000, drip=b"a"),
    Odd(_with(_GET, b"Content-Length: 100"), drip=b" "),
    Odd(_GET, waits=b"ok", then=b"\r\n", drip=b"\r\n"),
    Odd(_GET * 2000),
    Odd(b"\x16\x03\x01\x02\x00\x01" * 50),
    Odd(_with(_GET, b"Connection: Upgrade\r\nUpgrade: h2c")),
    Odd(upgrade("new")[:60]),
    Odd(_with(upgrade("new"), b"Content-Length: 5"), drip=b"x"),
    Odd(_with(upgrade("new"), b"Transfer-Encoding: chunked")),
    Odd(upgrade("a" * 8170)),
    Odd(upgrade("new").replace(b"1.1", b"1.0", 1)),
    Odd(upgrade("new"), waits=b"session.opened", then=raw_frame(b" " * 900_000)[:800_000]),
    Odd(upgrade("new"), waits=b"session.opened", then=raw_frame(b"{", final=False), drip=b"\x00"),
    Odd(
        upgrade("new"),
        waits=b"session.opened",
        then=raw_frame(b"", final=False) + raw_frame(b"", opcode=0, final=False) * 2000,
    ),
    Odd(upgrade("new"), waits=b"session.opened", then=raw_frame(b"x" * 125, opcode=9) * 500),
    Odd(upgrade("new"), waits=b"session.opened", then=text_frame({"type": "nonsense"}) * 500),
)
"""Every state, in which a peer keeps a server that does not look after itself."""


@dataclass(frozen=True)
class OddReport:
    """What others saw, and how the server ended. `worst_s`: the slowest exchange of another."""

    num_opened: int
    num_served: int
    worst_s: float
    log_bytes: int
    exit_status: int
    problems: list[str]


def run(number: int, *, descriptors: int, num_rounds: int = 5) -> OddReport:
    """Open so many odd sockets, and be served beside them in each round."""
    lines: list[str] = []
    program = (sys.executable, "-c", LIMITED, str(descriptors))
    flags = ("--threads", "1", "--drain-timeout", "1")
    problems: list[str] = []
    with LocalServer(flags, program=program, on_line=lines.append) as server:
        port = int(server.url.rpartition(":")[2])
        opened = [_open(port, ODD[index % len(ODD)]) for index in range(number)]
        durations: list[float] = []
        for _ in range(num_rounds):
            for peer, odd in zip(opened, (ODD[i % len(ODD)] for i in range(number)), strict=True):
                _send(peer, odd.drip)
            for exchange in (_health, _turn, _talk):
                started_s = time.monotonic()
                try:
                    exchange(server.url, port)
                except (OSError, httpx.HTTPError, AssertionError) as error:
                    problems.append(f"{exchange.__name__}: {error!r}")
                durations.append(time.monotonic() - started_s)
        exit_status = server.stop(timeout_s=60.0)
        for peer in opened:
            peer.close()
    return OddReport(
        num_opened=len(opened),
        num_served=len(durations) - len(problems),
        worst_s=max(durations),
        log_bytes=sum(len(line) + 1 for line in lines),
        exit_status=exit_status,
        problems=problems,
    )


def _open(port: int, odd: Odd) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    _send(peer, odd.says)
    if odd.waits:
        _read_until(peer, odd.waits)
        _send(peer, odd.then)
    return peer


def _send(peer: socket.socket, payload: bytes) -> None:
    """Send as much as the server takes; it may have closed long ago."""
    peer.settimeout(0.05)
    try:
        peer.sendall(payload)
    except OSError:
        return
    finally:
        peer.settimeout(PATIENCE_S)


def _read_until(peer: socket.socket, mark: bytes) -> bytes:
    received = b""
    try:
        while mark not in received and (chunk := peer.recv(65536)):
            received += chunk
    except OSError:
        return received
    return received


def _health(url: str, port: int) -> None:
    answer = httpx.get(f"{url}/health", timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 200, answer.text


def _turn(url: str, port: int) -> None:
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
        opened = http.post("/v1/sessions", json={})
        assert opened.status_code == 201, opened.text
        body = {"text": "Hello", "sampling": {"max_tokens": 2, "temperature": 0}}
        path = f"/v1/sessions/{opened.json()['id']}"
        assert http.post(f"{path}/turns", json=body).status_code == 200
        assert http.delete(path).status_code == 200


def _talk(url: str, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as peer:
        peer.sendall(upgrade("new"))
        assert b"session.opened" in _read_until(peer, b"session.opened")
        turn = {"type": "turn.create", "turn_id": "t", "text": "a", "sampling": {"max_tokens": 1}}
        peer.sendall(text_frame(turn))
        assert b"turn.completed" in _read_until(peer, b"turn.completed")
        peer.sendall(text_frame({"type": "session.close"}))


def main() -> int:
    """Run with many. Returns 1 if others were not served, or the server did not end well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sockets", type=int, default=1100)
    parser.add_argument("--descriptors", type=int, default=1024)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report = run(args.sockets, descriptors=args.descriptors)
    print(report)
    is_good = (
        not report.problems
        and report.worst_s < 2.0
        and report.log_bytes < 100_000
        and report.exit_status == 0
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
