"""Commands and events as bytes: length-prefixed msgpack over one inherited stream socket.

A frame is a big-endian u32 length and that many bytes. The first frame of a connection carries
the settings, opaque here. After it the server sends one command per frame, and the engine lists of
events. Sans-IO: bytes in, values out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import msgspec
from msgspec.msgpack import Decoder, Encoder

from session_server.core.commands import EngineCommand
from session_server.core.events import EngineEvent

MAX_FRAME_BYTES: Final = 64 << 20
"""Above the largest legal frame: a context of 2^20 tokens, or a memory report of all sessions."""

MAX_EVENTS_BYTES: Final = 64 << 10
"""Events of one step in one frame, so that the server decodes no more of them at a time. A larger
event is alone in its frame: a memory report."""

_HEADER: Final = struct.Struct(">I")

_T = TypeVar("_T")


class TransportError(Exception):
    """Report bytes that no version of this code sends; the connection is unusable."""


def frame(payload: bytes) -> bytes:
    """Return `payload` with its length in front.

    Raises:
        TransportError: it exceeds `MAX_FRAME_BYTES`.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise TransportError(f"a frame of {len(payload)} bytes exceeds {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(payload)) + payload


class FrameBuffer:
    """Cut a byte stream into frames, however the bytes arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Take bytes off the wire, and return the payloads that are complete now.

        Raises:
            TransportError: a length exceeds `MAX_FRAME_BYTES`; feed nothing afterwards.
        """
        self._bytes += data
        payloads, start = [], 0
        while len(self._bytes) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._bytes, start)
            if size > MAX_FRAME_BYTES:
                raise TransportError(f"a frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
            end = start + _HEADER.size + size
            if len(self._bytes) < end:
                break
            payloads.append(bytes(self._bytes[start + _HEADER.size : end]))
            start = end
        del self._bytes[:start]
        return payloads


class Codec:
    """Encode values as frames, and decode payloads. Not for two threads at once."""

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._commands: Decoder[EngineCommand] = Decoder(EngineCommand)
        self._events: Decoder[list[EngineEvent]] = Decoder(list[EngineEvent])

    def command_frame(self, command: EngineCommand) -> bytes:
        """Return one command as a frame."""
        return frame(self._encoder.encode(command))

    def event_frames(self, events: Sequence[EngineEvent]) -> Iterator[bytes]:
        """Yield the events of one step as frames, nearly always as one."""
        payload = self._encoder.encode(events)
        if len(payload) <= MAX_EVENTS_BYTES or len(events) == 1:
            yield frame(payload)
            return
        num_events = max(1, len(events) * MAX_EVENTS_BYTES // len(payload))
        for start in range(0, len(events), num_events):
            yield from self.event_frames(events[start : start + num_events])

    def command(self, payload: bytes) -> EngineCommand:
        """Decode a command. Raises TransportError."""
        return _decode(self._commands, payload)

    def events(self, payload: bytes) -> list[EngineEvent]:
        """Decode a list of events. Raises TransportError."""
        return _decode(self._events, payload)


def _decode(decoder: Decoder[_T], payload: bytes) -> _T:
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise TransportError(f"no message of this version: {error}") from error
