"""A client of TLS 1.3 that encrypts its records itself, behind a handshake of Python's."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

HANDSHAKE, CONTENT = b"\x16", b"\x17"
KEY_UPDATE = b"\x18\x00\x00\x01\x01"
"""Says that the client's key changes with the next record, and asks the server to change its."""


class TlsClient:
    """Encrypt from the first record behind a handshake on. `secret`: the client's, of 48 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._use_secret()

    def record(self, content: bytes, kind: bytes = CONTENT) -> bytes:
        """One record."""
        inner = content + kind
        head = b"\x17\x03\x03" + (len(inner) + 16).to_bytes(2)
        nonce = int.from_bytes(self._iv) ^ self._number
        self._number += 1
        return head + AESGCM(self._key).encrypt(nonce.to_bytes(12), inner, head)

    def key_updates(self, num: int) -> bytes:
        """Records that change the key and say nothing."""
        return b"".join(self._key_update() for _ in range(num))

    def _key_update(self) -> bytes:
        record = self.record(KEY_UPDATE, HANDSHAKE)
        self._secret = _expanded(self._secret, b"traffic upd", 48)
        self._use_secret()
        return record

    def _use_secret(self) -> None:
        self._key, self._iv = (
            _expanded(self._secret, b"key", 32),
            _expanded(self._secret, b"iv", 12),
        )
        self._number = 0


async def shaken_hands(
    context: ssl.SSLContext, port: int, keylog: Path
) -> tuple[TlsClient, asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose handshake is over. `keylog`: a file for its secrets."""
    context.keylog_filename = str(keylog)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await reader.read(65536))
    writer.write(outgoing.read())
    cipher = tls.cipher()
    assert cipher is not None
    assert cipher[0] == "TLS_AES_256_GCM_SHA384"
    lines = (line.split() for line in keylog.read_text().splitlines())
    secrets = {line[0]: bytes.fromhex(line[2]) for line in lines if len(line) == 3}
    return TlsClient(secrets["CLIENT_TRAFFIC_SECRET_0"]), reader, writer


def _expanded(secret: bytes, label: bytes, num_bytes: int) -> bytes:
    label = b"tls13 " + label
    info = num_bytes.to_bytes(2) + bytes([len(label)]) + label + b"\0"
    return HKDFExpand(SHA384(), num_bytes, info).derive(secret)
