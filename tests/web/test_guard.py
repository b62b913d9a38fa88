"""What a request must be before any route sees it: the table of FAULTS, over raw sockets."""

from __future__ import annotations

import pytest

from session_server.web import http_guard
from tests.web.serving import Served, served

OK = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
NUM_FREE = http_guard.MAX_HEADERS - 2

RAW = [
    ("plain", OK + b"\r\n", 200),
    ("http/1.0 with a host", b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n", 200),
    ("no host", b"GET /health HTTP/1.1\r\n\r\n", 400),
    ("two hosts", OK + b"Host: localhost\r\n\r\n", 400),
    ("a host that is none", b"GET /health HTTP/1.1\r\nHost: a/b?c\r\n\r\n", 400),
    ("a foreign host", b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    ("a foreign origin", OK + b"Origin: https://evil.example\r\n\r\n", 403),
    ("an opaque origin", OK + b"Origin: null\r\n\r\n", 403),
    ("two origins", OK + b"Origin: http://localhost\r\nOrigin: http://localhost\r\n\r\n", 403),
    ("our own origin", OK + b"Origin: http://localhost\r\n\r\n", 200),
    (
        "two framings, a smuggled request",
        b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
        400,
    ),
    ("two lengths", OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    ("a length that is none", OK + b"Content-Length: -1\r\n\r\n", 400),
    ("a body announced too large", OK + b"Content-Length: 99999999999\r\n\r\n", 413),
    ("a header of a megabyte", OK + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n", 431),
    ("a header without end", OK + b"X: " + b"a" * 60_000, 431),
    ("ten thousand headers", OK + b"X: a\r\n" * 10_000 + b"\r\n", 431),
    ("headers one too many", OK + b"X: a\r\n" * (NUM_FREE + 1) + b"\r\n", 431),
    ("as many headers as allowed", OK + b"X: a\r\n" * NUM_FREE + b"\r\n", 200),
    ("a target too long", b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    ("no http", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n", 400),
]


@served()
async def test_a_request_is_what_it_must_be_or_is_refused(this: Served) -> None:
    for name, payload, status in RAW:
        answer = await this.raw(payload)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status), (name, answer[:200])
        if status != 200:
            assert b'{"error":{"type":' in body, name
        assert answer.count(b"HTTP/1.1 ") == 1, f"{name}: a second request was served"


def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "HEADER_TIMEOUT_S", 0.1)

    @served()
    async def test(this: Served) -> None:
        assert b" 408 " in await this.raw(b"GET /health HTTP/1.1\r\nHost: loc")
        assert b" 408 " in await this.raw(b"")

    test()


@served(body_timeout_s=0.1)
async def test_a_body_that_does_not_come_is_not_waited_for(this: Served) -> None:
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    assert b" 408 " in await this.raw(head)


@served(host="0.0.0.0", hosts=())
async def test_bound_to_every_interface_any_name_is_ours(this: Served) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: server.example:1\r\nConnection: close\r\n\r\n"
    assert b" 200 " in await this.raw(request)
