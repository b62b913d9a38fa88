"""The format of a segment on disk: what a header says, and how it is verified.

A file is a safetensors file that any reader of that format opens: `tokens`, int32 [n], and per
pool the pages of each tensor as bytes. Its metadata say of what model, namespace and path it is.
They are checked in every field before anything is allocated, and every block of the payload against
its checksum: KV that is wrong is worse than none. In a directory that several servers share the
checks are keyed, so that nobody who can write there, and has no key, can have his KV used.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.tiers.segment import chain_after, first_chain
from cache.types import PoolName, Tokens
from session_server.core.tier_orders import FileKey

FORMAT: Final = "session-server KV 1"

MAX_HEADER_BYTES: Final = 1 << 20
"""A longer header is refused before it is read."""

MAX_FILE_BYTES: Final = 1 << 30
"""A longer file is neither written nor read: what is read of one passes through as much memory."""

_BLOCK_BYTES: Final = 1 << 20
"""Bytes of a payload that share a checksum."""

_MAC_BYTES: Final = 16
"""Of a keyed hash: that of a header, and that of all bytes of a tensor."""

_NOT_OF_THIS_FORMAT: Final = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What taking a header apart raises that was made by somebody else."""


class FileRefused(Exception):
    """Report a file that is not what it should be; the message says in what."""


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Describe what a page of one pool is: the shape of each tensor in bytes, with 0 in place of
    the number of pages, and that place. `is_whole`: every page of a segment is there."""

    shapes: tuple[tuple[int, ...], ...]
    page_axis: int
    is_whole: bool

    def shapes_of(self, num_pages: int) -> list[tuple[int, ...]]:
        """Return the shape of so many pages of each tensor."""
        at = self.page_axis
        return [(*shape[:at], num_pages, *shape[at + 1 :]) for shape in self.shapes]


@dataclass(frozen=True, slots=True)
class Layout:
    """Describe the pages of a model: two servers may share files only if it is equal.

    `identity`: what else must be equal, such as the model's weights and dtypes. `key`: of the
    checks, where others can write files too; empty for checksums, which show damage alone.
    """

    page_size: int
    pools: Mapping[PoolName, PoolLayout]
    identity: str
    key: bytes = field(default=b"", repr=False)

    @property
    def fingerprint(self) -> str:
        """Return a hash of all of it."""
        pools = {pool: (each.shapes, each.page_axis) for pool, each in sorted(self.pools.items())}
        told = json.dumps([self.page_size, pools, self.identity])
        return hashlib.sha256(told.encode()).hexdigest()

    @property
    def name(self) -> str:
        """Return what the directory of its files is called among those of others, 32 digits."""
        assert self.key, "without a key its files share no directory with others"
        return _mac(self.key, self.fingerprint.encode()).hex()

    def verify(self, file: SegmentFile, key: FileKey) -> Header:
        """Return the header of a file that is what `key` says. It is compared as a whole with the
        one that `write` would have written.

        Raises:
            FileRefused: it is anything else.
        """
        try:
            told = json.loads(file.header)["__metadata__"]
            num_tokens = int(told["num_tokens"])
            spans = {
                PoolName(pool): (int(first), int(end))
                for pool, (first, end) in json.loads(told["spans"]).items()
            }
            checks = {
                str(name): tuple(int(check) for check in each)
                for name, each in json.loads(told[self._check_name]).items()
            }
            self._check_spans(key, num_tokens, spans)
            header = self.header(key, num_tokens, spans, checks)
        except _NOT_OF_THIS_FORMAT as error:
            raise FileRefused("its header is not of this format") from error
        if not hmac.compare_digest(header.text, file.header_text):
            raise FileRefused("it is of another model, namespace, path or layout, or was changed")
        if file.num_bytes != len(header.text) + sum(p.num_bytes for p in header.parts.values()):
            raise FileRefused("it has another length than its header says")
        return header

    def _check_spans(
        self, key: FileKey, num_tokens: int, spans: Mapping[PoolName, tuple[int, int]]
    ) -> None:
        page_size = self.page_size
        if num_tokens <= 0 or num_tokens % page_size or set(spans) != set(self.pools):
            raise ValueError("a segment has whole pages, of every pool")
        whole = key.start // page_size, (key.start + num_tokens) // page_size
        for pool, (first, end) in spans.items():
            if not whole[0] <= first <= end <= whole[1]:
                raise ValueError("pages outside of the segment")
            if self.pools[pool].is_whole and (first, end) != whole:
                raise ValueError("pages are missing")

    def tokens(self, file: SegmentFile, key: FileKey, header: Header) -> Tokens:
        """Return the tokens of a file, int32 [n], whose first page gives its name."""
        page_size = self.page_size
        tokens = (
            file.part(header.parts["tokens"], self.checks_of)
            .view("<i4")
            .astype(np.int32, copy=False)
        )
        if chain_after(key.chain, tokens[:page_size], page_size) != key.name:
            raise FileRefused("its tokens are not those of its name")
        return tokens

    def header(
        self,
        key: FileKey,
        num_tokens: int,
        spans: Mapping[PoolName, tuple[int, int]],
        checks: Mapping[str, tuple[int, ...]],
    ) -> Header:
        """Return the header of a segment."""
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {"tokens": ("I32", (num_tokens,))}
        for pool, layout in self.pools.items():
            first, end = spans[pool]
            for index, shape in enumerate(layout.shapes_of(end - first)):
                shapes[part_name(pool, index)] = ("U8", shape)
        metadata = {
            "format": FORMAT,
            "layout": self.fingerprint,
            "namespace": first_chain(key.namespace).hex(),
            "chain": key.chain.hex(),
            "name": key.name.hex(),
            "start": str(key.start),
            "num_tokens": str(num_tokens),
            "spans": json.dumps(spans),
            self._check_name: json.dumps({name: checks[name] for name in shapes}),
        }
        told = json.dumps([metadata, shapes]).encode()
        if self.key:
            metadata["mac"] = _mac(self.key, told).hex()
        else:
            metadata["sha256"] = hashlib.sha256(told).hexdigest()
        tensors: dict[str, object] = {"__metadata__": metadata}
        parts, at = {}, 0
        for name, (dtype, shape) in shapes.items():
            num_bytes = math.prod(shape) * (4 if dtype == "I32" else 1)
            tensors[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [at, at + num_bytes],
            }
            parts[name] = TensorPlace(shape, at, num_bytes, checks[name])
            at += num_bytes
        text = json.dumps(tensors).encode()
        text += b" " * (-len(text) % 8)
        return Header(struct.pack("<Q", len(text)) + text, parts, spans)

    def checks_of(self, data: NDArray[Any]) -> tuple[int, ...]:
        """Return the checks of an array: the crc32 of every block, or one keyed hash."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if self.key:
            return (int.from_bytes(_mac(self.key, flat.data), "big"),)
        starts = range(0, len(flat), _BLOCK_BYTES)
        return tuple(zlib.crc32(flat[at : at + _BLOCK_BYTES].data) for at in starts)

    @property
    def _check_name(self) -> str:
        return "hmac-sha256" if self.key else "crc32"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Describe one tensor of a file: `start`, where it begins behind the header; `checks`: see
    `Layout.checks_of`."""

    shape: tuple[int, ...]
    start: int
    num_bytes: int
    checks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """Hold the header of a file. `text`: its bytes, with the length in front."""

    text: bytes
    parts: Mapping[str, TensorPlace]
    spans: Mapping[PoolName, tuple[int, int]]


class SegmentFile:
    """Read one file. `header_text`: the bytes before its tensors."""

    def __init__(self, descriptor: int) -> None:
        """Read the header. The caller closes the descriptor."""
        status = os.fstat(descriptor)
        self._descriptor = descriptor
        self.num_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise FileRefused("it is no regular file")
        if self.num_bytes > MAX_FILE_BYTES:
            raise FileRefused(f"it has {self.num_bytes} bytes")
        length = int.from_bytes(self._read(0, 8), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, self.num_bytes - 8):
            raise FileRefused(f"its header has {length} bytes")
        self.header_text = self._read(0, 8 + length)
        self.header = self.header_text[8:]

    def part(
        self,
        part: TensorPlace,
        checks_of: Callable[[NDArray[np.uint8]], tuple[int, ...]],
        memory: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, in its shape; in `memory`, as many bytes, if given.

        Raises:
            FileRefused: they are not those that were written.
        """
        data = np.empty(part.num_bytes, np.uint8) if memory is None else memory
        at = len(self.header_text) + part.start
        num_read = 0
        while num_read < part.num_bytes:
            count = os.preadv(self._descriptor, [data[num_read:].data], at + num_read)
            if count == 0:
                raise FileRefused("it ends early")
            num_read += count
        if checks_of(data) != part.checks:
            raise FileRefused("its contents were changed")
        return data if part.num_bytes != math.prod(part.shape) else data.reshape(part.shape)

    def _read(self, at: int, num_bytes: int) -> bytes:
        data = os.pread(self._descriptor, num_bytes, at)
        if len(data) < num_bytes:
            raise FileRefused("it ends early")
        return data


def part_name(pool: PoolName, index: int) -> str:
    """Return the name of a tensor of a pool in a file."""
    return f"{pool}/{index}"


def _mac(key: bytes, data: bytes | memoryview) -> bytes:
    return hmac.digest(key, data, "sha256")[:_MAC_BYTES]
