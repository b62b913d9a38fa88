"""Put TLS between a connection and its protocol, within the bounds of a plain connection.

asyncio's own TLS counts for nobody until its handshake is over, keeps up to 512 KiB in either
direction that no protocol sees, and cannot end one direction. Here a connection is in the table
from its first byte, what a peer does not read lies in the socket's transport only, where the guards
count and time it, and what arrives is passed on at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from session_server.web.certificate import Certificate
from session_server.web.connection_table import ConnectionTable
from session_server.web.tls_records import MAX_SILENT_RECORDS, UNDECRYPTED, Records

HANDSHAKE_TIMEOUT_S: Final = 10.0
MAX_HANDSHAKE_BYTES: Final = 1 << 16
"""Maximum bytes of a handshake from its peer; a ClientHello has some hundreds."""

MANY_RECORDS: Final = 64
"""Records that are decrypted at once; behind as many others are served. 64 of full size are more
than a socket is read for at once."""

_RECORD_BYTES: Final = 1 << 14


class Stoppable(Protocol):
    """Describe a connection as uvicorn ends it at shutdown."""

    def shutdown(self) -> None:
        """Close."""


class TlsConnection(asyncio.Protocol):
    """Be the protocol of a socket's transport, and encrypt for another protocol.

    `make_protocol` is called when the handshake is over. Until then the connection is one of
    `connections`.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        certificate: Certificate,
        table: ConnectionTable,
        connections: set[Stoppable],
    ) -> None:
        self._make_protocol = make_protocol
        self._table = table
        self._connections = connections
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = certificate.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._records = Records()
        self._deadline: asyncio.TimerHandle | None = None
        self._encrypted: TlsTransport | None = None
        self._has_ended = False
        self._next: asyncio.Handle | None = None
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, and bound the time of its handshake."""
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HANDSHAKE_TIMEOUT_S, self._transport.abort)
        self._connections.add(self)
        if not self._table.add(self):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, or tell its protocol."""
        if self._encrypted is None:
            self._end_handshake()
        else:
            self._encrypted.protocol.connection_lost(exc)

    def evict(self) -> None:
        """Close at once, to make room: the handshake is not over."""
        self._transport.abort()

    def shutdown(self) -> None:
        """Close at once, because the server stops."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Go on with the handshake, or pass on what was encrypted."""
        if not self._has_ended:
            self._records.hold(data)
            self._go_on()

    def eof_received(self) -> bool:
        """Tell the protocol; a peer that ends its direction is answered, and closed."""
        if self._encrypted is None:
            return False
        return bool(self._encrypted.protocol.eof_received())

    def pause_writing(self) -> None:
        """Tell the protocol that its peer does not read."""
        if self._encrypted is not None:
            self._encrypted.protocol.pause_writing()

    def resume_writing(self) -> None:
        """Tell the protocol that its peer has read everything."""
        if self._encrypted is not None:
            self._encrypted.protocol.resume_writing()

    # -- for the transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt a record at a time, and send all at once: who is told to pause sees the whole."""
        if self._has_ended or self._transport.is_closing():
            return
        rest, encrypted = memoryview(data), list[bytes]()
        try:
            while rest:
                rest = rest[self._tls.write(rest[:_RECORD_BYTES]) :]
                encrypted.append(self._outgoing.read())  # a memory BIO never shrinks
        except ssl.SSLError:  # the peer has broken the encryption
            self._transport.abort()
        else:
            self._transport.write(b"".join(encrypted))

    def end(self) -> None:
        """Say that nothing follows, and listen no more."""
        if self._has_ended:
            return
        self._has_ended = True
        self._records.drop()
        with contextlib.suppress(ssl.SSLError):  # the peer has not ended its own direction
            self._tls.unwrap()
        self.flush()

    def flush(self) -> None:
        """Send what the handshake, the protocol or an alert has to say."""
        if self._outgoing.pending and not self._transport.is_closing():
            self._transport.write(self._outgoing.read())

    def read_on(self) -> None:
        """Go on with what is held back, or else read the socket, unless the protocol has paused."""
        if self._encrypted is not None and self._encrypted.is_paused:
            return
        if not self._records.num_held_back:
            self._transport.resume_reading()
        elif self._next is None:
            self._transport.pause_reading()
            self._next = asyncio.get_running_loop().call_soon(self._go_on)

    def known_of_tls(self, name: str) -> Any:
        """Return what is known of the encryption; None for anything else."""
        return {"sslcontext": self._tls.context, "ssl_object": self._tls}.get(name)

    # -- the two phases

    def _go_on(self) -> None:
        """Decrypt some records. The rest comes next, and others are served in between."""
        self._next = None
        if self._encrypted is not None and self._encrypted.is_paused:
            return  # `read_on` is called when it resumes
        content: list[bytes] = []
        is_over = False
        try:
            for _ in range(MANY_RECORDS):
                if is_over or self._transport.is_closing() or not self._records.num_held_back:
                    break
                self._incoming.write(self._records.next_piece())
                if self._encrypted is None:
                    self._shake_hands()
                else:
                    is_over = self._decrypt(content)
        except ssl.SSLError:
            self.flush()  # the alert
            self._transport.abort()
        self.flush()
        if self._transport.is_closing():
            self._records.drop()
            return
        if self._encrypted is not None:
            self._pass_on(self._encrypted, b"".join(content), is_over=is_over)
        self.read_on()

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self.flush()
            if self._records.num_bytes > MAX_HANDSHAKE_BYTES:
                self._transport.abort()
            else:
                num_bytes = self._records.num_bytes + self._records.num_held_back
                self._table.await_input(self, num_bytes=num_bytes)
            return
        self.flush()
        self._end_handshake()
        protocol = self._make_protocol()
        self._encrypted = TlsTransport(self, self._transport, protocol)
        protocol.connection_made(self._encrypted)
        if self._transport.get_write_buffer_size():
            protocol.pause_writing()  # it was paused before the protocol was there

    def _end_handshake(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._connections.discard(self)
            self._table.remove(self)

    def _decrypt(self, content: list[bytes]) -> bool:
        """Add what the piece holds. Return whether nothing follows."""
        num_before = len(content)
        try:
            while piece := self._tls.read(_RECORD_BYTES):
                content.append(piece)
        except ssl.SSLWantReadError:
            self._records.num_silent += self._records.is_between and len(content) == num_before
            if self._records.num_silent > MAX_SILENT_RECORDS:
                self._transport.abort()
            return False
        except ssl.SSLZeroReturnError:
            pass
        return True

    def _pass_on(self, encrypted: TlsTransport, content: bytes, *, is_over: bool) -> None:
        """Pass on what was said. The protocol counts what waits, if nothing was said too."""
        num_before = encrypted.num_undecrypted
        encrypted.num_undecrypted = self._records.num_undecrypted
        if content or encrypted.num_undecrypted != num_before:
            encrypted.protocol.data_received(content)
        if is_over and not self.eof_received():
            self._transport.close()


class TlsTransport(asyncio.Transport):
    """Be the transport of a protocol that knows nothing of TLS."""

    def __init__(
        self, connection: TlsConnection, transport: asyncio.Transport, protocol: asyncio.Protocol
    ) -> None:
        super().__init__()
        self._connection = connection
        self._transport = transport
        self.protocol = protocol
        self.is_paused = False
        self.num_undecrypted = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what is known of the encryption or the socket."""
        if name == UNDECRYPTED:
            return self.num_undecrypted
        found = self._connection.known_of_tls(name)
        return self._transport.get_extra_info(name, default) if found is None else found

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection over."""
        self.protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol that has the connection."""
        return self.protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send."""
        self._connection.write(data)

    def can_write_eof(self) -> bool:
        """Return True: one direction can end before the other."""
        return True

    def write_eof(self) -> None:
        """Say that nothing follows. What the peer still sends is dropped."""
        self._connection.end()
        self._transport.write_eof()

    def close(self) -> None:
        """Close once everything is sent."""
        self._connection.end()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether the connection is closing or closed."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Read nothing from the socket, and decrypt nothing."""
        self.is_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on with what has arrived, and read again."""
        self.is_paused = False
        self._connection.read_on()

    def is_reading(self) -> bool:
        """Return whether the protocol has not paused."""
        return not self.is_paused

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set when the protocol is told that its peer does not read."""
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the kernel has not taken."""
        return self._transport.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the limits of `set_write_buffer_limits`."""
        return self._transport.get_write_buffer_limits()
