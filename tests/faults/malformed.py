"""What clients get wrong, on purpose or not: bodies, frames and bytes, and what must come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.rig.moments import SEED
from tests.rig.raw_peer import raw_frame

TURN: dict[str, Any] = {
    "turn_id": "t",
    "input_ids": [5, 6],
    "sampling": {"max_tokens": 1, "seed": SEED, "temperature": 0.5},
}


def values() -> Iterator[str]:
    """JSON values, and what is none, that parsers are known to take wrongly."""
    yield from ("NaN", "-NaN", "Infinity", "-Infinity", "1e400", "-1e400", "nan", "0x10", "+1")
    yield from ("9" * 23, "-" + "9" * 23, "9" * 5000, "1." + "0" * 5000, "01", "1.", ".5", "1e")
    yield from ("true", "false", "null", '"12"', '"nan"', "1.5", "-1", "[]", "{}", '""')
    yield from ('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\x41"', '"\t"', '"open', "'a'")
    yield from ("[" * 100_000, '{"a":' * 50_000, "[" * 50_000 + "]" * 50_000, "[1,]", '{"a":1,}')
    yield from ("// comment", "undefined", "1 2", '{"__proto__":1}', json.dumps("x" * 100_000))


def bodies() -> Iterator[bytes]:
    """Bodies of a turn with one thing wrong, or odd."""
    whole = json.dumps(TURN)
    for end in range(len(whole)):
        yield whole[:end].encode()
    for value in values():
        for field in ("turn_id", "input_ids", "sampling", "priority", "queue", "nobody_knows"):
            yield f'{{{whole[1:-1]}, "{field}": {value}}}'.encode()
        for field in ("max_tokens", "temperature", "seed", "top_k", "stop", "logit_bias"):
            odd = f'"sampling": {{"{field}": {value}}}'
            yield f'{{"turn_id": "t", "input_ids": [5], {odd}}}'.encode()
        yield f'{{"turn_id": "t", "input_ids": [5, {value}]}}'.encode()
        yield value.encode()
    for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"):
        yield whole.replace("t", "ü").encode(encoding)
    for bad in (
        b"\xff",
        b"\xc3\x28",
        b"\xed\xa0\x80",
        b"\xf8\x88\x80\x80\x80",
        b"\xc0\xaf",
        b"\x00",
    ):
        yield whole.encode().replace(b'"t"', b'"' + bad + b'"')
        yield bad + whole.encode()


@dataclass(frozen=True, slots=True)
class BadFrames:
    """Bytes of a WebSocket client, and the code its connection closes with (None: it lives)."""

    name: str
    payload: bytes
    code: int | None


def frames() -> Iterator[BadFrames]:
    """What breaks the framing below the messages."""
    ping = b'{"type":"ping"}'
    yield BadFrames("binary", raw_frame(ping, opcode=2), 1003)
    for opcode in (*range(3, 8), *range(11, 16)):
        yield BadFrames(f"opcode {opcode}", raw_frame(ping, opcode=opcode), 1002)
    for reserved in range(1, 8):  # 4 says "compressed", which was not agreed
        yield BadFrames(f"reserved {reserved}", raw_frame(ping, reserved=reserved), 1002)
    unmasked = bytes([0x81, len(ping)]) + ping
    yield BadFrames("unmasked", unmasked, 1002)
    yield BadFrames("a continuation of nothing", raw_frame(ping, opcode=0), 1002)
    yield BadFrames(
        "a message inside another",
        raw_frame(ping[:5], final=False) + raw_frame(ping),
        1002,
    )
    for opcode in (8, 9, 10):
        yield BadFrames(f"control {opcode} too long", raw_frame(b"x" * 126, opcode=opcode), 1002)
        yield BadFrames(
            f"control {opcode} in parts", raw_frame(b"", opcode=opcode, final=False), 1002
        )
    yield BadFrames("close with half a code", raw_frame(b"\x03", opcode=8), 1002)
    for code in (0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65535):
        yield BadFrames(f"close {code}", raw_frame(code.to_bytes(2, "big"), opcode=8), 1002)
    yield BadFrames("close for a reason not UTF-8", raw_frame(b"\x03\xe8\xff", opcode=8), 1007)
    for bad in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf"):
        yield BadFrames(f"text {bad!r}", raw_frame(ping + bad), 1007)
        in_parts = raw_frame(ping, final=False) + raw_frame(bad, opcode=0)
        yield BadFrames(f"text in parts {bad!r}", in_parts, 1007)
    yield BadFrames(
        "a letter cut in two",
        raw_frame(b'{"type":"\xc3', final=False) + raw_frame(b'\xa4"}', opcode=0),
        None,
    )
    yield BadFrames(
        "a ping between parts",
        raw_frame(ping[:4], final=False) + raw_frame(b"", opcode=9) + raw_frame(ping[4:], opcode=0),
        None,
    )
    yield BadFrames("an empty message", raw_frame(b""), None)
    for length in (1 << 20 | 1, 1 << 40, 1 << 62, (1 << 64) - 1):
        payload = bytes([0x81, 0xFF]) + length.to_bytes(8, "big")
        yield BadFrames(f"a length of {length}", payload, 1009)
