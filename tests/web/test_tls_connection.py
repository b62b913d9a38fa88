"""One connection of TLS without a socket: what it keeps, and what it does at once."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, cast

import pytest
import trustme

from session_server.web.certificate import Certificate
from session_server.web.connection_table import ConnectionLimits, ConnectionTable
from session_server.web.tls import MANY_RECORDS, TlsConnection
from session_server.web.tls_records import RECORD_MEMORY_BYTES, UNDECRYPTED

RECORD_BYTES = 1 << 14
RECORD_AND_FRAMING = RECORD_BYTES + 64


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    path = tmp_path_factory.mktemp("tls") / "cert.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path))
    return Certificate(path)


class Wire(asyncio.Transport):
    """A socket's transport whose kernel takes `num_taken` more bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.num_taken = 1 << 30
        self.num_unread = 0
        self.is_read = True
        self.has_closed = False
        self.connection: TlsConnection | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))
        had_unread = self.num_unread > 0
        taken = min(len(data), self.num_taken)
        self.num_taken -= taken
        self.num_unread += len(data) - taken
        if self.num_unread and not had_unread and self.connection is not None:
            self.connection.pause_writing()

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def write_eof(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.has_closed

    def abort(self) -> None:
        self.has_closed = True

    close = abort

    def get_write_buffer_size(self) -> int:
        return self.num_unread


class Inner(asyncio.Protocol):
    """Keep what arrives."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.paused_at: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def pause_writing(self) -> None:
        self.paused_at.append(self.transport.get_write_buffer_size())


class Pair:
    """The server's end under test, and a client's."""

    def __init__(self, certificate: Certificate) -> None:
        self.wire, self.inner = Wire(), Inner()
        self.table = ConnectionTable(ConnectionLimits())
        self.connection = TlsConnection(
            lambda: self.inner, certificate=certificate, table=self.table, connections=set()
        )
        self.wire.connection = self.connection
        self.connection.connection_made(self.wire)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing)

    def begin(self) -> bytes:
        """What the client says first."""
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.do_handshake()
        return self._outgoing.read()

    def shake_hands(self) -> None:
        self.connection.data_received(self.begin())
        self._incoming.write(b"".join(self.wire.sent))
        self.wire.sent.clear()
        self._tls.do_handshake()
        self.connection.data_received(self._outgoing.read())
        self.read()  # tickets

    def record(self, content: bytes) -> bytes:
        self._tls.write(content)
        return self._outgoing.read()

    def read(self) -> bytes:
        """What the client reads of what the server has sent."""
        self._incoming.write(b"".join(self.wire.sent))
        self.wire.sent.clear()
        content = b""
        try:
            while piece := self._tls.read(1 << 20):
                content += piece
        except ssl.SSLWantReadError:
            pass
        return content


class WatchedTls:
    """Encrypt, and note how much has waited to be sent."""

    def __init__(self, connection: TlsConnection) -> None:
        self._tls, self._outgoing = connection._tls, connection._outgoing
        self.most_pending = 0

    def write(self, data: memoryview) -> int:
        num_bytes = self._tls.write(data)
        self.most_pending = max(self.most_pending, self._outgoing.pending)
        return num_bytes


def test_what_is_encrypted_for_a_large_answer_is_never_more_than_a_record(
    certificate: Certificate,
) -> None:
    """OpenSSL keeps the memory of the most that has ever waited."""

    async def play() -> None:
        pair = Pair(certificate)
        pair.shake_hands()
        watched = WatchedTls(pair.connection)
        pair.connection._tls = cast(Any, watched)
        answer = bytes(range(256)) * 4096
        pair.inner.transport.write(answer)
        assert 0 < watched.most_pending <= RECORD_AND_FRAMING
        assert pair.read() == answer

    asyncio.run(play())


def test_a_protocol_that_is_told_to_pause_sees_all_that_it_wrote(certificate: Certificate) -> None:
    async def play() -> None:
        pair = Pair(certificate)
        pair.shake_hands()
        pair.wire.num_taken = 100
        pair.inner.transport.write(bytes(1 << 20))
        assert pair.inner.paused_at == [sum(map(len, pair.wire.sent)) - 100]
        assert pair.inner.paused_at[0] > 1 << 20

    asyncio.run(play())


def test_nothing_is_encrypted_for_a_connection_that_is_closed(certificate: Certificate) -> None:
    async def play() -> None:
        pair = Pair(certificate)
        pair.shake_hands()
        pair.inner.transport.abort()
        pair.inner.transport.write(bytes(1 << 20))
        assert pair.connection._outgoing.pending == 0
        assert not pair.wire.sent

    asyncio.run(play())


def test_many_records_are_decrypted_some_at_a_time(certificate: Certificate) -> None:
    async def play() -> None:
        pair = Pair(certificate)
        pair.shake_hands()
        content = bytes(range(MANY_RECORDS)) * 2 + b"!"
        records = b"".join(pair.record(bytes([each])) for each in content)
        pair.connection.data_received(records)
        assert pair.inner.received == [content[:MANY_RECORDS]]
        assert not pair.wire.is_read, "the rest comes before what the socket has"
        await asyncio.sleep(0)
        assert len(pair.inner.received) == 2
        assert not pair.wire.is_read
        await asyncio.sleep(0)
        assert b"".join(pair.inner.received) == content
        assert pair.wire.is_read

    asyncio.run(play())


def test_a_handshake_in_many_records_is_read_some_at_a_time(certificate: Certificate) -> None:
    async def play() -> None:
        pair = Pair(certificate)
        hello = pair.begin()
        records = b"".join(b"\x16\x03\x01\x00\x01" + bytes([each]) for each in hello[5:])
        pair.connection.data_received(records)
        assert not pair.wire.sent, "there is more to read"
        assert not pair.wire.is_read
        assert pair.table.num_input_bytes == len(records)
        for _ in range(len(hello) // MANY_RECORDS + 1):
            await asyncio.sleep(0)
        assert pair.wire.sent
        assert pair.wire.is_read

    asyncio.run(play())


def test_nothing_is_decrypted_for_a_protocol_that_has_paused(certificate: Certificate) -> None:
    async def play() -> None:
        pair = Pair(certificate)
        pair.shake_hands()
        records = b"".join(pair.record(b".") for _ in range(2 * MANY_RECORDS))
        pair.connection.data_received(records)
        pair.inner.transport.pause_reading()
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(pair.inner.received) == 1
        for _ in range(3):  # each asks to go on, and it does so once
            pair.inner.transport.resume_reading()
        assert not pair.wire.is_read
        await asyncio.sleep(0)
        assert len(b"".join(pair.inner.received)) == 2 * MANY_RECORDS
        assert len(pair.inner.received) == 2
        assert pair.wire.is_read

    asyncio.run(play())


def test_what_waits_behind_an_end_is_dropped_and_the_socket_read_on(
    certificate: Certificate,
) -> None:
    """A peer that goes on sending is read until it has the refusal."""

    async def play() -> None:
        pair = Pair(certificate)
        pair.shake_hands()
        records = b"".join(pair.record(b".") for _ in range(3 * MANY_RECORDS))
        pair.connection.data_received(records)
        pair.inner.transport.write_eof()
        await asyncio.sleep(0)
        assert len(b"".join(pair.inner.received)) == MANY_RECORDS
        assert pair.wire.is_read

    asyncio.run(play())


@pytest.mark.parametrize("num_bytes", [1, 4, 5, 6, 1000, -1])
def test_a_protocol_is_told_what_waits_of_a_record(
    certificate: Certificate, num_bytes: int
) -> None:
    async def play() -> None:
        pair = Pair(certificate)
        pair.shake_hands()
        record = pair.record(b"." * RECORD_BYTES)
        begun = record[:num_bytes]
        pair.connection.data_received(begun)
        assert pair.inner.received == [b""]
        counted = pair.inner.transport.get_extra_info(UNDECRYPTED)
        assert counted == RECORD_MEMORY_BYTES + len(begun)
        pair.connection.data_received(record[num_bytes:])
        assert pair.inner.received == [b"", b"." * RECORD_BYTES]
        assert pair.inner.transport.get_extra_info(UNDECRYPTED) == 0

    asyncio.run(play())


def test_a_protocol_is_told_what_waits_behind_many_records(certificate: Certificate) -> None:
    async def play() -> None:
        pair = Pair(certificate)
        pair.shake_hands()
        records = [pair.record(b".") for _ in range(MANY_RECORDS + 3)]
        pair.connection.data_received(b"".join(records))
        counted = pair.inner.transport.get_extra_info(UNDECRYPTED)
        assert counted == sum(map(len, records[MANY_RECORDS:]))
        await asyncio.sleep(0)
        assert pair.inner.transport.get_extra_info(UNDECRYPTED) == 0

    asyncio.run(play())
