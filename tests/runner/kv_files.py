"""Segments of KV for the tests of files: a layout of every kind, paths of tokens, their bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.tiers.segment import chain_after, first_chain
from cache.types import Namespace, PoolName
from session_server.core.tier_orders import FileKey, FoundFile
from session_server.runner.segment_files import Payload, SegmentFiles, file_name
from session_server.runner.segment_format import FileRefused, Layout, PoolLayout

PAGE_SIZE = 4
FULL, WINDOW, STATE = PoolName("full"), PoolName("window"), PoolName("state")
LAYOUT = Layout(
    PAGE_SIZE,
    {
        FULL: PoolLayout(((2, 0, 8), (1, 0, 16)), 1, is_whole=True),
        WINDOW: PoolLayout(((3, 0, 4),), 1, is_whole=False),
        STATE: PoolLayout(((0, 6), (0, 10)), 0, is_whole=False),
    },
    identity="model bfloat16",
)
NAMESPACE = Namespace("alice", "model")
PAGES = 5
REFUSED = "refused"


@dataclass(frozen=True)
class Written:
    """A segment, what was written of it, and the bytes of its file."""

    found: FoundFile
    payload: Payload
    raw: bytes

    @property
    def file(self) -> str:
        """Its name in the directory."""
        return file_name(self.found.file.file_id)

    @property
    def header_len(self) -> int:
        """Bytes in front of the tensors."""
        return 8 + int(struct.unpack_from("<Q", self.raw)[0])

    @property
    def header(self) -> dict[str, Any]:
        """The header, taken apart."""
        told: dict[str, Any] = json.loads(self.raw[8 : self.header_len])
        return told


def key_of(tokens: np.ndarray, start: int, namespace: Namespace = NAMESPACE) -> FileKey:
    """What identifies the segment of a path that begins at `start`."""
    chain = chain_after(first_chain(namespace), tokens[:start], PAGE_SIZE)
    name = chain_after(chain, tokens[start : start + PAGE_SIZE], PAGE_SIZE)
    return FileKey(name, namespace, chain, start)


def found_of(
    tokens: np.ndarray,
    start: int = 0,
    *,
    namespace: Namespace = NAMESPACE,
    lost: int = 2,
) -> FoundFile:
    """The segment that holds a path from `start` on; the bounded pools lack the `lost` first."""
    first, end = start // PAGE_SIZE, len(tokens) // PAGE_SIZE
    lost = min(first + lost, end)
    spans = {FULL: (first, end), WINDOW: (lost, end), STATE: (end - 1, end)}
    return FoundFile(key_of(tokens, start, namespace), tokens[start:], spans)


def payload_of(found: FoundFile, seed: int = 0, layout: Layout = LAYOUT) -> dict[PoolName, Any]:
    """Bytes for the pages of a segment."""
    rng = np.random.default_rng(seed)
    return {
        pool: [
            rng.integers(0, 256, shape, np.uint8)
            for shape in each.shapes_of(found.spans[pool][1] - found.spans[pool][0])
        ]
        for pool, each in layout.pools.items()
    }


def path_of(num_pages: int = PAGES, seed: int = 0, *, shared: int = 0) -> np.ndarray:
    """Tokens of whole pages; the first `shared` pages are those of any other path."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 17, num_pages * PAGE_SIZE, np.int32)
    tokens[: shared * PAGE_SIZE] = np.arange(shared * PAGE_SIZE)
    return tokens


def written(files: SegmentFiles, directory: Path, found: FoundFile, seed: int = 0) -> Written:
    """Write a segment."""
    payload = payload_of(found, seed)
    files.write(found, payload, 0)
    return Written(found, payload, (directory / file_name(found.file.file_id)).read_bytes())


def with_header(of: Written, header: Mapping[str, Any], *, signed: bool = True) -> bytes:
    """The same file with another header; `signed`: and the checksum that it would have."""
    text = resigned(header) if signed else framed(json.dumps(header).encode())
    return text + of.raw[of.header_len :]


def with_text(of: Written, text: bytes) -> bytes:
    """The same file with this in place of its header."""
    return framed(text) + of.raw[of.header_len :]


def resigned(header: Mapping[str, Any]) -> bytes:
    """The bytes of a header, with the checksum of its other fields."""
    tensors = {name: each for name, each in header.items() if name != "__metadata__"}
    shapes = {name: (each["dtype"], each["shape"]) for name, each in tensors.items()}
    metadata = {name: each for name, each in header["__metadata__"].items() if name != "sha256"}
    told = json.dumps([metadata, shapes]).encode()
    metadata["sha256"] = hashlib.sha256(told).hexdigest()
    return framed(json.dumps({"__metadata__": metadata, **tensors}).encode())


def framed(text: bytes) -> bytes:
    """A header's text with its length in front."""
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def open_descriptors() -> int:
    """How many this process has."""
    return len(os.listdir("/proc/self/fd"))


class Shelf:
    """A directory of files with one segment in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = SegmentFiles(directory, LAYOUT)
        self.tokens = path_of()
        self.segment = written(self.files, directory, found_of(self.tokens))
        self.path = directory / self.segment.file

    def is_used(self, raw: bytes) -> bool:
        """Whether a file with these bytes is."""
        self.path.write_bytes(raw)
        return self.is_read()

    def is_read(self) -> bool:
        """Whether what lies there now is used. If it is not, it was put aside or is gone."""
        num_open = open_descriptors()
        place = self.directory / REFUSED / self.segment.file
        is_there = os.path.lexists(self.path)
        uses = []
        try:
            self.files.read(self.segment.found)
            uses.append("read")
        except FileRefused:
            assert not os.path.lexists(self.path)
            if is_there and os.path.lexists(place):
                place.rename(self.path)
        found, has_refused = self.files.find(self.segment.found.file, self.tokens)
        if found == [] and is_there:
            assert has_refused
            assert not os.path.lexists(self.path)
        if found and not same(found[0], self.segment.found):
            # Another length or span is found as what it is; what was asked for is not there.
            assert len(found[0].tokens) % PAGE_SIZE == 0
        assert open_descriptors() == num_open
        return bool(uses)


def same(one: FoundFile, other: FoundFile) -> bool:
    """Whether two files say the same of themselves."""
    is_same = one.file == other.file and one.spans == other.spans
    return is_same and np.array_equal(one.tokens, other.tokens)


class FailingDisk:
    """Functions of `os` that fail from the call with a number on, or at it alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
        self.at, self.num_calls, self.lasts = -1, 0, False
        self.code = errno.EIO
        for name in names:
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def begin(self, at: int, *, lasts: bool = False, code: int = errno.EIO) -> None:
        """Fail at this call from now."""
        self.at, self.num_calls, self.lasts, self.code = at, 0, lasts, code

    @property
    def has_struck(self) -> bool:
        """Whether a call has failed since then."""
        return self.num_calls > self.at

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **keywords: Any) -> Any:
            number, self.num_calls = self.num_calls, self.num_calls + 1
            fails = self.at >= 0 and (number == self.at or (self.lasts and number > self.at))
            if name == "close":
                real(*args)  # a descriptor is closed whatever it says
            if fails:
                raise OSError(self.code, os.strerror(self.code))
            return None if name == "close" else real(*args, **keywords)

        return called
