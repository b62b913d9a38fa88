"""Keep the frames that wait for one peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

MAX_OUTBOX_FRAMES: Final = 256
"""Frames that may wait for the peer; a peer that lets more accumulate is not reading."""

MAX_OUTBOX_BYTES: Final = 1 << 20
"""Bytes of frames that may wait for the peer before its next message is read."""


_ENCODER: Final = msgspec.json.Encoder()


class FrameQueue:
    """Hold encoded frames, oldest first: the part that the protocols of all sockets share."""

    def __init__(self) -> None:
        self._outbox: list[bytes] = []
        self.outbox_bytes = 0
        self.on_refusal: Callable[[str], None] | None = None
        """Told the code of each request whose refusal is queued, once the peer is let in."""

    @property
    def is_full(self) -> bool:
        """Return whether so many bytes wait for the peer that nothing more may be received."""
        return self.outbox_bytes >= MAX_OUTBOX_BYTES

    def take_frames(self, max_bytes: int) -> list[bytes]:
        """Remove and return the next text frames to send, UTF-8; empty if none waits. The first one
        may exceed `max_bytes`."""
        num_taken = num_bytes = 0
        for frame in self._outbox:
            if num_taken and num_bytes + len(frame) > max_bytes:
                break
            num_taken += 1
            num_bytes += len(frame)
        taken = self._outbox[:num_taken]
        del self._outbox[:num_taken]
        self.outbox_bytes -= num_bytes
        return taken

    def take_frame(self) -> str | None:
        """Remove and return the next text frame to send; None if no frame waits."""
        if not self._outbox:
            return None
        frame = self._outbox.pop(0)
        self.outbox_bytes -= len(frame)
        return frame.decode()

    def _note_refusal(self, code: str) -> None:
        if self.on_refusal is not None:
            self.on_refusal(code)

    def _send(self, frame: msgspec.Struct) -> None:
        encoded = _ENCODER.encode(frame)
        self._outbox.append(encoded)
        self.outbox_bytes += len(encoded)
