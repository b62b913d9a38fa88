"""TLS: HTTP and WebSockets behind it, the same bounds as without, and certificates that change."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from websockets.asyncio.client import connect

from session_server.client import ClientOptions, UntrustedServer
from session_server.client import connect as connect_session
from session_server.core.owner import ANONYMOUS
from session_server.local_server import LocalServer
from session_server.web import http_guard, tls, websocket_guard
from session_server.web import server as web_server
from session_server.web.certificate import Certificate, UnusableCertificate
from session_server.web.connection_table import ConnectionLimits
from session_server.web.tls_records import MAX_SILENT_RECORDS, RECORD_MEMORY_BYTES
from tests.rig.echo_server import PROGRAM
from tests.rig.raw_peer import raw_frame, upgrade
from tests.rig.tls_client import shaken_hands
from tests.web.serving import DEADLINE_S, SUBPROTOCOL, Served, serving
from tests.web.wire_client import narrow_socket

AUTHORITY = trustme.CA()
EVENTS = {"accept": "text/event-stream"}
GET = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def trust(authority: trustme.CA = AUTHORITY) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    return context


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return written(tmp_path)


def written(folder: Path, authority: trustme.CA = AUTHORITY) -> tuple[Path, Path]:
    """A certificate of this machine, and its key."""
    certificate = authority.issue_cert("127.0.0.1")
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    certfile.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    keyfile.write_bytes(certificate.private_key_pem.bytes())
    keyfile.chmod(0o600)
    return certfile, keyfile


@contextlib.asynccontextmanager
async def encrypted(files: tuple[Path, Path], **settings: Any) -> AsyncIterator[Served[Any]]:
    async with (
        asyncio.timeout(60),
        serving(certificate=Certificate(*files), **settings) as this,
    ):
        yield this


async def peer(this: Served[Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has shaken hands."""
    return await asyncio.open_connection(
        "127.0.0.1", this.port, ssl=trust(), server_hostname="127.0.0.1"
    )


async def answer(this: Served[Any], payload: bytes) -> bytes:
    """What the server says to these bytes until it ends the connection."""
    reader, writer = await peer(this)
    writer.write(payload)
    try:
        return await reader.read()
    finally:
        writer.close()


def test_http_and_sockets_are_served_behind_tls(files: tuple[Path, Path]) -> None:
    async def play() -> None:
        async with encrypted(files) as this:
            base = f"https://127.0.0.1:{this.port}"
            async with httpx.AsyncClient(base_url=base, verify=trust(), trust_env=False) as http:
                assert (await http.get("/health")).status_code == 200
                body = {"text": "Hello", "sampling": {"max_tokens": 4}}
                opened = (await http.post("/v1/sessions", json={})).json()
                turns = f"/v1/sessions/{opened['id']}/turns"
                async with http.stream("POST", turns, json=body, headers=EVENTS) as events:
                    lines = [line async for line in events.aiter_lines()]
                assert any("turn.completed" in line for line in lines)
            options = ClientOptions(trust=trust())
            async with await connect_session(base, options=options) as session:
                assert (await session.ask("Hello", sampling={"max_tokens": 4})).text
            with pytest.raises(UntrustedServer, match="not trusted"):
                await connect_session(base, options=ClientOptions(trust=trust(trustme.CA())))

    asyncio.run(play())


def test_what_is_large_or_malformed_is_refused_as_without_tls(files: tuple[Path, Path]) -> None:
    async def play() -> None:
        async with encrypted(files, max_message_bytes=1024) as this:
            many = b"".join(b"x-%d: 1\r\n" % n for n in range(http_guard.MAX_HEADERS))
            head = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n" + many + b"\r\n"
            assert (await answer(this, head)).startswith(b"HTTP/1.1 431")
            body = b"POST /v1/sessions HTTP/1.1\r\nhost: 127.0.0.1\r\n%s\r\n\r\n"
            chunked = body % b"transfer-encoding: chunked" + b"800\r\n" + b"x" * 2048 + b"\r\n"
            # What follows the refusal does not destroy it: one direction ends, the other goes on.
            assert (await answer(this, chunked + b"y" * 200_000)).startswith(b"HTTP/1.1 413")
            assert (await answer(this, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400")
            url = f"wss://127.0.0.1:{this.port}/v1/sessions/new/ws"
            async with connect(url, ssl=trust(), subprotocols=[SUBPROTOCOL], proxy=None) as socket:
                await socket.recv()
                await socket.send("x" * 1025)
                await socket.wait_closed()
                assert socket.close_code == 1009

    asyncio.run(play())


def test_deadlines_hold_behind_tls(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "HEADER_TIMEOUT_S", 0.05)

    async def play() -> None:
        async with encrypted(files, message_timeout_s=0.05) as this:
            assert (await answer(this, b"GET / HT")).startswith(b"HTTP/1.1 408")
            assert (await answer(this, b"")).startswith(b"HTTP/1.1 408")
            begun = b"POST /v1/sessions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{"
            assert (await answer(this, begun)).startswith(b"HTTP/1.1 408")

    asyncio.run(play())


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_a_handshake_that_is_not_finished_is_counted_and_given_up(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT_S", 0.2)

    async def play() -> None:
        async with encrypted(files) as this:
            table = this.app.state.connections
            reader, writer = await asyncio.open_connection("127.0.0.1", this.port)
            writer.write(sent)
            await this.until(lambda: table.num_connections == 1)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            await this.until(lambda: table.num_connections == 0)
            writer.close()

    asyncio.run(play())


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_a_handshake_has_bytes_up_to_its_bound(files: tuple[Path, Path], step: int) -> None:
    message = b"\x01\x01\x80\x00" + bytes(0x18000)  # a ClientHello that says it has 98,304 bytes
    pieces = [message[at : at + 16384] for at in range(0, len(message), 16384)]
    records = b"".join(b"\x16\x03\x01" + len(each).to_bytes(2) + each for each in pieces)

    async def play() -> None:
        async with encrypted(files) as this:
            table, num_bytes = this.app.state.connections, tls.MAX_HANDSHAKE_BYTES + step
            reader, writer = await asyncio.open_connection("127.0.0.1", this.port)
            writer.write(records[:num_bytes])
            if step > 0:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            else:
                await this.until(lambda: table.num_input_bytes == num_bytes)
            writer.close()

    asyncio.run(play())


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_a_connection_has_records_that_say_nothing_up_to_their_bound(
    files: tuple[Path, Path], tmp_path: Path, step: int
) -> None:
    async def play() -> None:
        async with encrypted(files) as this:
            log = tmp_path / "secrets"
            client, reader, writer = await shaken_hands(trust(), this.port, log)
            changes = client.key_updates(MAX_SILENT_RECORDS + step)
            writer.write(changes[:7])  # the first comes in two parts
            await writer.drain()
            writer.write(changes[7:] + client.record(GET))
            if step > 0:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                assert "GET /health" not in str(this.services.metrics.exposition())
            else:
                await this.until(lambda: "GET /health" in str(this.services.metrics.exposition()))
            writer.close()

    asyncio.run(play())


def test_what_is_no_handshake_ends_at_once(files: tuple[Path, Path]) -> None:
    async def play() -> None:
        async with encrypted(files) as this:
            alert = await this.until_closed(GET)
            assert b"HTTP" not in alert
            assert this.app.state.connections.num_connections == 0

    asyncio.run(play())


def test_connections_that_shake_no_hands_keep_nobody_out(files: tuple[Path, Path]) -> None:
    async def play() -> None:
        limits = ConnectionLimits(connections=4, connections_per_address=4)
        async with encrypted(files, connections=limits) as this:
            table = this.app.state.connections
            silent = [await asyncio.open_connection("127.0.0.1", this.port) for _ in range(4)]
            await this.until(lambda: table.num_connections == 4)
            first, _ = silent[0]
            reader, writer = await peer(this)
            writer.write(GET)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            with contextlib.suppress(ConnectionError):
                assert await first.read() == b"", "the one that waited longest made room"
            assert table.num_connections == 4
            for _, each in (*silent, (reader, writer)):
                each.close()

    asyncio.run(play())


@pytest.mark.parametrize("is_socket", [False, True])
def test_a_record_that_is_not_whole_is_unfinished_input(
    files: tuple[Path, Path], tmp_path: Path, *, is_socket: bool
) -> None:
    async def play() -> None:
        async with encrypted(files) as this:
            table = this.app.state.connections
            client, _, writer = await shaken_hands(trust(), this.port, tmp_path / "secrets")
            if is_socket:
                writer.write(client.record(upgrade("new")))
                await this.until(lambda: this.sockets.num_attached == 1)
                last = client.record(raw_frame(b"x", opcode=9))
            else:
                last = client.record(GET)
            await this.until(lambda: table.num_input_bytes == 0)
            writer.write(last[:-1])
            expected = RECORD_MEMORY_BYTES + len(last) - 1
            await this.until(lambda: table.num_input_bytes == expected)
            writer.write(last[-1:])
            await this.until(lambda: table.num_input_bytes == 0)
            writer.close()

    asyncio.run(play())


def test_records_that_are_not_whole_are_bounded(files: tuple[Path, Path], tmp_path: Path) -> None:
    async def play() -> None:
        limits = ConnectionLimits(input_bytes=2 * RECORD_MEMORY_BYTES)
        async with encrypted(files, connections=limits) as this:
            table = this.app.state.connections
            peers = [
                await shaken_hands(trust(), this.port, tmp_path / f"secrets{n}") for n in range(2)
            ]
            for client, _, writer in peers:
                writer.write(client.record(GET)[:-1])
                await this.until(lambda: table.num_input_bytes > RECORD_MEMORY_BYTES)
            _, first, _ = peers[0]
            with contextlib.suppress(ConnectionError):
                await first.read()  # the one that has waited longest is closed
            await this.until(lambda: table.num_connections == 1)
            for _, _, writer in peers:
                writer.close()

    asyncio.run(play())


def test_a_message_has_its_time_from_the_first_byte_of_its_record_on(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    async def play() -> None:
        async with encrypted(files, message_timeout_s=0.05) as this:
            client, _, writer = await shaken_hands(trust(), this.port, tmp_path / "secrets")
            writer.write(client.record(upgrade("new")))
            await this.until(lambda: this.sockets.num_attached == 1)
            writer.write(client.record(raw_frame(b"x", opcode=9))[:-1])
            await this.until(lambda: this.sockets.num_attached == 0)
            writer.close()

    asyncio.run(play())


def test_what_a_peer_does_not_read_is_counted_and_given_up(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_guard, "LINGER_S", 0.05)

    async def play() -> None:
        async with encrypted(files, send_timeout_s=0.3) as this:
            metadata = {f"k{n}": "v" * 500 for n in range(16)}
            session_id = await _opened(this, metadata)
            narrow = await narrow_socket(this.port)
            client = RawTls(narrow)
            await client.shake_hands()
            await client.send(upgrade(session_id))
            table = this.app.state.connections
            await this.until(lambda: this.sockets.num_attached == 1)
            while table.num_unread_bytes == 0:
                this.sessions.update(ANONYMOUS, session_id, metadata=metadata)
                await asyncio.sleep(0)
            await this.until(lambda: table.num_connections == 0)
            assert table.num_unread_bytes == 0
            narrow.close()

    asyncio.run(play())


class RawTls:
    """The client's end, which reads what it is told to read and no more."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._loop = connection, asyncio.get_running_loop()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trust().wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")

    async def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._loop.sock_sendall(self._socket, self._outgoing.read())
                self._incoming.write(await self._loop.sock_recv(self._socket, 4096))
            else:
                await self._loop.sock_sendall(self._socket, self._outgoing.read())
                return

    async def send(self, payload: bytes) -> None:
        self._tls.write(payload)
        await self._loop.sock_sendall(self._socket, self._outgoing.read())


async def _opened(this: Served[Any], metadata: dict[str, str]) -> str:
    base = f"https://127.0.0.1:{this.port}"
    async with httpx.AsyncClient(base_url=base, verify=trust(), trust_env=False) as http:
        opened = await http.post("/v1/sessions", json={"metadata": metadata})
        session_id: str = opened.json()["id"]
        return session_id


def test_a_certificate_that_is_replaced_is_used_from_then_on(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "session_server.web")
    certfile, keyfile = files
    certificate = Certificate(certfile, keyfile)
    first = certificate.context
    certificate.refresh()
    assert certificate.context is first, "nothing has changed"
    old = certfile.read_bytes()
    certfile.write_text("no certificate")
    certificate.refresh()
    certificate.refresh()
    certfile.unlink()
    certificate.refresh()
    certificate.refresh()
    assert certificate.context is first
    assert len(caplog.messages) == 2, "each is told once"
    certfile.write_bytes(old)
    certificate.refresh()
    second = certificate.context
    certfile.unlink()
    os.mkfifo(certfile)
    certificate.refresh()
    certificate.refresh()
    assert certificate.context is second
    assert caplog.messages[2:] == [
        f"keeping the old certificate: cannot read {certfile}: not a regular file"
    ]
    certfile.unlink()
    certfile.write_bytes(old)
    certificate.refresh()
    assert certificate.context is not first


def test_a_certificate_is_looked_for_again_whatever_its_name_leads_to(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    certfile, _ = files
    certificate, content = Certificate(*files), certfile.read_bytes()
    first = certificate.context
    certfile.unlink()
    certfile.symlink_to("x" * 300)  # no file system has such a name
    certificate.refresh()
    certificate.refresh()
    assert certificate.context is first
    assert caplog.messages == [
        f"keeping the old certificate: cannot read {certfile}: File name too long"
    ]
    certfile.unlink()
    certfile.write_bytes(content)
    certificate.refresh()
    assert certificate.context is not first


def test_a_certificate_that_could_not_be_read_is_used_as_soon_as_it_can_be(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who mends its permissions changes neither its content nor the time of it."""

    def refuse(*_args: object, **_how: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    certfile, _ = files
    certificate = Certificate(*files)
    first = certificate.context
    certfile.write_bytes(certfile.read_bytes() + b"\n")
    with monkeypatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_cert_chain", refuse)
        certificate.refresh()
        certificate.refresh()
    assert certificate.context is first
    assert len(caplog.messages) == 1, "it is told once"
    certificate.refresh()
    assert certificate.context is not first


def test_the_event_loop_does_not_read_the_disk_for_a_certificate(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Certificate(*files)
    looked_in: list[threading.Thread] = []

    def look(_certificate: Certificate) -> tuple[()]:
        looked_in.append(threading.current_thread())
        return ()

    async def play() -> None:
        watching = asyncio.create_task(web_server._watch_certificate(certificate))
        async with asyncio.timeout(DEADLINE_S):
            while not looked_in:
                await asyncio.sleep(0)
        watching.cancel()
        assert threading.main_thread() not in looked_in

    monkeypatch.setattr(web_server, "LOOK_S", 0.0)
    monkeypatch.setattr(Certificate, "_look", look)
    asyncio.run(play())


def test_files_that_cannot_be_served_are_named(tmp_path: Path, files: tuple[Path, Path]) -> None:
    certfile, keyfile = files
    (tmp_path / "other").mkdir()
    _, other = written(tmp_path / "other")
    empty = tmp_path / "empty.pem"
    empty.touch()
    for pair, message in (
        ((tmp_path / "none.pem", keyfile), "cannot read .*none.pem: No such file"),
        ((certfile, other), f"the key in {other} is not that of the certificate in {certfile}"),
        ((empty, keyfile), "no certificate with its private key"),
        ((certfile, None), "no certificate with its private key.*--ssl-keyfile"),
    ):
        with pytest.raises(UnusableCertificate, match=message):
            Certificate(*pair)
    both = tmp_path / "both.pem"
    both.write_bytes(certfile.read_bytes() + keyfile.read_bytes())
    assert Certificate(both).context is not None


@pytest.fixture
def server(files: tuple[Path, Path]) -> Iterator[LocalServer]:
    certfile, keyfile = map(str, files)
    flags = ["--ssl-certfile", certfile, "--ssl-keyfile", keyfile, "--log-level", "warning"]
    with LocalServer(flags, program=PROGRAM) as process:
        yield process
        assert process.stop() == 0


def test_a_server_process_announces_https_and_takes_a_new_certificate_without_a_restart(
    server: LocalServer, files: tuple[Path, Path], tmp_path: Path
) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    authority = tmp_path / "authority.pem"
    AUTHORITY.cert_pem.write_to_path(str(authority))
    audit = [sys.executable, "-m", "session_server", "audit", "--url", server.url, "--json"]
    done = subprocess.run([*audit, "--ca-file", str(authority)], capture_output=True, check=False)
    assert done.returncode in {0, 1}
    assert "memory" in json.loads(done.stdout)
    refused = subprocess.run(audit, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "--ca-file" in refused.stdout
    renewed = trustme.CA()
    written(tmp_path, renewed)
    while True:
        try:
            assert httpx.get(f"{server.url}/health", verify=trust(renewed)).status_code == 200
            break
        except httpx.ConnectError:
            continue  # the files are looked at once a second
