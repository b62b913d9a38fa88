"""`TierOrder` and `TierResult`: copies of KV between the pools, host memory and disk.

The contract between the engine, which decides what is where, and what carries it out beside the
forwards. Orders of one kind may be carried out in any order: the engine waits for the result of one
before it orders what depends on it. Each is answered once, but `Forget`, which is not answered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from cache.tiers.segment import SegmentContent, tenant_tag
from cache.types import Namespace, Pages, PoolName, Tokens


class FileKey(msgspec.Struct, frozen=True, gc=False):
    """Identify a segment on disk: everything of a file's header that must be as expected.

    `chain`: hash of everything before it; `start`: tokens before it. See `cache.tiers.segment`.
    """

    name: bytes
    namespace: Namespace
    chain: bytes
    start: int

    @property
    def file_id(self) -> bytes:
        """Return what the file is called; see `SegmentContent.file_id`."""
        return self.name + self.chain + tenant_tag(self.namespace.tenant)


class CopyOut(msgspec.Struct, frozen=True, gc=False):
    """Copy pages to host memory, as `segment`. `pages`: int32 [n] per pool."""

    number: int
    segment: int
    pages: Mapping[PoolName, Pages]


class FoundFile(msgspec.Struct, frozen=True, gc=False):
    """Describe a segment on disk: one that was written, or whose header was verified."""

    file: FileKey
    tokens: Tokens
    spans: Mapping[PoolName, tuple[int, int]]

    @classmethod
    def of(cls, content: SegmentContent) -> FoundFile:
        """Return what the file of a segment must be."""
        key = FileKey(content.name, content.namespace, content.chain, content.start)
        return cls(key, content.tokens, content.spans)


class ReadPart(msgspec.Struct, frozen=True, gc=False):
    """Read pages of one segment: of those it has of a pool the ones from `first` on, into `pages`.

    `found`: the file to read; None for host memory.
    """

    segment: int
    found: FoundFile | None
    pages: Mapping[PoolName, tuple[int, Pages]]


class CopyIn(msgspec.Struct, frozen=True, gc=False):
    """Copy pages back. A file that is gone or does not verify in every field fails all of it, and
    its `ReadPart.segment` is named in the result. `used_ns`: when the files were used, the first of
    them last, on the engine's clock."""

    number: int
    parts: tuple[ReadPart, ...]
    used_ns: int


class WriteFile(msgspec.Struct, frozen=True, gc=False):
    """Write a segment in host memory to disk, as `found`. `used_ns`: when it was used last, on the
    engine's clock."""

    number: int
    segment: int
    found: FoundFile
    num_bytes: int
    used_ns: int


class FindFiles(msgspec.Struct, frozen=True, gc=False):
    """Read the headers of the segments that hold `tokens`, int32 [n], from `file.start` on. The
    result names those in front of a file that is not what it should be, and refuses that."""

    number: int
    file: FileKey
    tokens: Tokens


class ListFiles(msgspec.Struct, frozen=True, gc=False):
    """List the files, those used longest ago first. Where there are more than `max_files`, those
    used longest ago are removed."""

    number: int
    max_files: int


class MeasureRoom(msgspec.Struct, frozen=True, gc=False):
    """Ask what room the disk has left for files, once those are gone that were forgotten before and
    while those are there that are forgotten after."""

    number: int


class DroppedPath(msgspec.Struct, frozen=True, gc=False):
    """Name a history of which nobody keeps what lies behind its first `num_kept` tokens, but what
    others have: `tokens`, int32 [n]."""

    namespace: Namespace
    tokens: Tokens
    num_kept: int


class Forget(msgspec.Struct, frozen=True, gc=False):
    """Drop segments from host memory, and files, by their ids, from disk; or all of either."""

    segments: tuple[int, ...] = ()
    files: tuple[bytes, ...] = ()
    all_segments: bool = False
    all_files: bool = False


class EraseFiles(msgspec.Struct, frozen=True, gc=False):
    """Answer once every file that was forgotten before is gone for good, and with them those that
    were put aside because they did not verify. Fails where something is still there.

    `paths`: histories whose files go too, whoever has written them, of a directory that is shared.
    Takes a slice of the time that this takes: `TierResult.has_more` asks for another one."""

    number: int
    paths: tuple[DroppedPath, ...] = ()


TierOrder = CopyOut | CopyIn | WriteFile | FindFiles | ListFiles | MeasureRoom | Forget | EraseFiles


def reads_disk(parts: Iterable[ReadPart]) -> bool:
    """Return whether some of these are read from disk."""
    return any(part.found is not None for part in parts)


def uses_disk(order: TierOrder) -> bool:
    """Return whether carrying out an order may wait for the disk."""
    match order:
        case CopyOut():
            return False
        case CopyIn():
            return reads_disk(order.parts)
        case WriteFile() | FindFiles() | ListFiles() | MeasureRoom() | EraseFiles():
            return True
        case Forget():
            return bool(order.files or order.all_files)


class Refusal(enum.Enum):
    """Say why a copy failed."""

    FAILED = "failed"
    """The memory or the disk did not do it now. What is on disk stays known."""

    NO_ROOM = "no room"
    """The disk has no room for a file, or would have too little left."""

    WRONG = "wrong"
    """A file is not what it should be, or cannot be read. It is used no more."""

    GONE = "gone"
    """A file is gone, which in a shared directory is nobody's fault."""


class TierResult(msgspec.Struct, frozen=True, gc=False):
    """Answer an order.

    Attributes:
        number: that of the order.
        seconds: how long it took.
        refusal: why it failed; None if it did not.
        wrong_segment: the segment whose file is not what it should be.
        found: for `FindFiles`, in order of the path.
        files: for `ListFiles`, (id of the file, bytes).
        room_bytes: for `WriteFile` and `MeasureRoom`, what files may still take, below 0 what of
            them has to go; None if the disk does not say.
        read_bytes, read_s: of `seconds`, what was read from disk and how long that took.
        has_more: for `EraseFiles`, it was a slice: another order, without paths, goes on.
    """

    number: int
    seconds: float
    refusal: Refusal | None = None
    wrong_segment: int | None = None
    found: tuple[FoundFile, ...] = ()
    files: tuple[tuple[bytes, int], ...] = ()
    room_bytes: int | None = None
    read_bytes: int = 0
    read_s: float = 0.0
    has_more: bool = False


class TierThread(enum.Enum):
    """Say where work is done: each of these does one thing at a time, in order."""

    COPY = "engine-copy"
    """Copies between memory alone."""

    DISK = "engine-disk"
    """What may wait for the disk."""


class TierWork(msgspec.Struct, frozen=True, gc=False):
    """Hold what carrying out an order takes."""

    thread: TierThread
    run: Callable[[], TierResult | None]


class TierCarrier(Protocol):
    """Carry out orders beside the forwards."""

    def prepare(self, order: TierOrder) -> TierWork:
        """Return the work of an order; called in the order of the orders, on the engine's thread.

        What it reads of host memory stays until it has run, whatever is forgotten meanwhile. `run`
        is called once, on any thread, and raises nothing that an order can cause.
        """
