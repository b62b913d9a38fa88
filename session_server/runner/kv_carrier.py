"""`KvCarrier`: copy KV between the pools of a runner, host memory and files."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from cache.pool.page_copy import HostPages, PagedTensor, host_memory
from cache.types import PoolName
from session_server.core.os_errors import NO_ROOM
from session_server.core.tier_orders import (
    CopyIn,
    CopyOut,
    EraseFiles,
    FindFiles,
    Forget,
    ListFiles,
    MeasureRoom,
    Refusal,
    TierOrder,
    TierResult,
    TierThread,
    TierWork,
    WriteFile,
    uses_disk,
)
from session_server.runner.segment_files import FileGone, KeptForLog, Payload, SegmentFiles
from session_server.runner.segment_format import FileRefused

_LOG: Final = logging.getLogger("session_server.engine")

HostSegment = Mapping[PoolName, Sequence[HostPages]]
"""Pages of a segment, per pool and tensor."""


class KvCarrier:
    """Carry out orders; implements `core.tier_orders.TierCarrier`.

    `prepare` looks up what an order reads of host memory, so that it stays until it was read.
    """

    def __init__(
        self,
        tensors: Mapping[PoolName, Sequence[PagedTensor]],
        files: SegmentFiles | None = None,
        *,
        is_pinned: bool = False,
    ) -> None:
        """Start with nothing in host memory. `is_pinned`: see `host_memory`."""
        self._tensors = tensors
        self._files = files
        self._is_pinned = is_pinned
        self._segments: dict[int, HostSegment] = {}

    @property
    def page_bytes(self) -> Mapping[PoolName, int]:
        """Return the bytes of one page of each pool, in all its tensors."""
        return {pool: sum(t.page_bytes for t in each) for pool, each in self._tensors.items()}

    def prepare(self, order: TierOrder) -> TierWork:
        """Return the work of an order; implements `TierCarrier.prepare`."""
        match order:
            case CopyOut():
                return _work(order, partial(self._copy_out, order))
            case CopyIn():
                held = {part.segment: self._segments.get(part.segment) for part in order.parts}
                return _work(order, partial(self._copy_in, order, held))
            case WriteFile():
                segment = self._segments.get(order.segment)
                return _work(order, partial(self._write, order, segment))
            case FindFiles():
                return _work(order, partial(self._find, order))
            case ListFiles():
                return _work(order, partial(self._list, order))
            case MeasureRoom():
                return _work(order, partial(self._measure, order))
            case EraseFiles():
                return _work(order, partial(self._erase, order))
            case Forget():
                return self._forgetting(order)

    def _forgetting(self, order: Forget) -> TierWork:
        for number in order.segments:
            self._segments.pop(number, None)
        dropped: dict[int, HostSegment] = {}
        if order.all_segments:
            # Given back on the thread of copies, because so much memory takes a while.
            dropped, self._segments = self._segments, {}
        return TierWork(_thread_of(order), partial(self._forget, order, dropped))

    def _copy_out(self, order: CopyOut) -> TierResult:
        shapes = [
            tensor.shape_of(len(order.pages[pool]))
            for pool, tensors in self._tensors.items()
            for tensor in tensors
        ]
        memory = iter(host_memory(shapes, is_pinned=self._is_pinned))
        segment = {pool: [next(memory) for _ in tensors] for pool, tensors in self._tensors.items()}
        for pool, tensors in self._tensors.items():
            for tensor, pages in zip(tensors, segment[pool], strict=True):
                tensor.copy_out(order.pages[pool], pages)
        self._segments[order.segment] = segment
        return TierResult(order.number, 0.0)

    def _copy_in(self, order: CopyIn, held: Mapping[int, HostSegment | None]) -> TierResult:
        used, read_s = [], 0.0
        num_read_before = 0 if self._files is None else self._files.num_bytes_read
        for part in order.parts:
            try:
                payload: HostSegment | Payload | None = held[part.segment]
                if part.found is not None:
                    started_s = time.perf_counter()
                    payload = self._disk.read(part.found)
                    read_s += time.perf_counter() - started_s
                    used.append(part.found.file.file_id)
            except FileGone:
                return TierResult(order.number, 0.0, Refusal.GONE, part.segment)
            except FileRefused:
                return TierResult(order.number, 0.0, Refusal.WRONG, part.segment)
            if payload is None:
                return TierResult(order.number, 0.0, Refusal.FAILED)
            for pool, (first, pages) in part.pages.items():
                for tensor, source in zip(self._tensors[pool], payload[pool], strict=True):
                    tensor.copy_in(source, first, pages)
        if not used:
            return TierResult(order.number, 0.0)
        self._disk.touch(used, order.used_ns)
        read_bytes = self._disk.num_bytes_read - num_read_before
        return TierResult(order.number, 0.0, read_bytes=read_bytes, read_s=read_s)

    def _write(self, order: WriteFile, segment: HostSegment | None) -> TierResult:
        if segment is None:
            return TierResult(order.number, 0.0, Refusal.FAILED)
        refusal: Refusal | None = None
        most_bytes = math.inf
        try:
            self._disk.write(order.found, segment, order.used_ns)
        except KeptForLog:
            # A file may take more than is counted for it, which shows no want of room.
            refusal, most_bytes = Refusal.NO_ROOM, order.num_bytes - 1
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            refusal = Refusal.NO_ROOM
        room = self._disk.room()
        room = None if room is None else int(min(room, most_bytes))
        return TierResult(order.number, 0.0, refusal, room_bytes=room)

    def _measure(self, order: MeasureRoom) -> TierResult:
        return TierResult(order.number, 0.0, room_bytes=self._disk.room())

    def _find(self, order: FindFiles) -> TierResult:
        found, has_refused = self._disk.find(order.file, order.tokens)
        refusal = Refusal.WRONG if has_refused else None
        return TierResult(order.number, 0.0, refusal, found=tuple(found))

    def _list(self, order: ListFiles) -> TierResult:
        return TierResult(order.number, 0.0, files=tuple(self._disk.listing(order.max_files)))

    def _forget(self, order: Forget, dropped: dict[int, HostSegment]) -> None:
        dropped.clear()
        if order.all_files:
            try:
                self._disk.remove_all()
            except OSError as error:
                _LOG.warning("the files of KV cannot be removed: %s", error)
        if order.files:
            self._disk.remove(order.files)

    def _erase(self, order: EraseFiles) -> TierResult:
        if not self._disk.drop(order.paths):
            return TierResult(order.number, 0.0, has_more=True)
        return TierResult(order.number, 0.0, None if self._disk.erase() else Refusal.FAILED)

    @property
    def _disk(self) -> SegmentFiles:
        assert self._files is not None, "without a disk nothing is ordered of it"
        return self._files


def _thread_of(order: TierOrder) -> TierThread:
    return TierThread.DISK if uses_disk(order) else TierThread.COPY


def _work(
    order: CopyOut | CopyIn | WriteFile | FindFiles | ListFiles | MeasureRoom | EraseFiles,
    run: Callable[[], TierResult],
) -> TierWork:
    """Return work that says how long it took, and fails where memory or the disk does."""

    def timed() -> TierResult:
        started_s = time.perf_counter()
        try:
            result = run()
        except (OSError, MemoryError, RuntimeError) as error:
            _LOG.warning("a copy of KV failed: %s", error)
            result = TierResult(order.number, 0.0, Refusal.FAILED)
        return msgspec.structs.replace(result, seconds=time.perf_counter() - started_s)

    return TierWork(_thread_of(order), timed)
