"""What copies KV out of the pools of the simulated device and back: host memory and a disk.

Nothing happens when an order is given: it is carried out later, at a moment of the caller's
choosing and in any order among those that wait. Whatever the engine does in between must not
matter. The disk may outlive its engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from cache.spec import LayerKind
from cache.tiers.segment import chain_after, chains_after, first_chain
from cache.tiers.segment_tree import SEGMENT_BYTES
from cache.types import PoolName
from session_server.core.tier_orders import (
    CopyIn,
    CopyOut,
    DroppedPath,
    EraseFiles,
    FileKey,
    FindFiles,
    Forget,
    FoundFile,
    ListFiles,
    MeasureRoom,
    Refusal,
    TierOrder,
    TierResult,
    WriteFile,
)
from tests.sim.device import EchoRunner
from tests.sim.faults import Site
from tests.sim.layers import POOLS
from tests.sim.pushed_out import PushedOut
from tests.sim.state_memory import GARBAGE

Payload = Mapping[PoolName, list[list[int]]]
"""The cells of each page, per pool."""

_COPY_S = 1e-3

_PLENTY = 1 << 40


@dataclass(slots=True)
class StoredFile:
    """A file of the simulated disk. `is_damaged`: its contents are not those that were written.
    `writer`: who has written it; `is_last`: while its engine ended; `used_ns`: its last use."""

    found: FoundFile
    payload: Payload
    num_bytes: int
    writer: EchoCarrier
    is_damaged: bool = False
    is_last: bool = False
    used_ns: int = 0


@dataclass(slots=True)
class EchoDisk:
    """Files by their ids, those used longest ago first. `is_full`: it takes no more. `max_bytes`:
    what its engine may have there. `room_bytes`: what files may take, for all that others leave of
    it; `is_shown`: it says so when it is asked. `num_changes`: of that. `is_ending`: that was told
    to end. `told_bytes`: what its engine was told last that files may take; `taken`: per order that
    asks for that, what files took when it was given. `is_stuck`: what was removed may still be
    there."""

    files: dict[bytes, StoredFile] = field(default_factory=dict)
    is_full: bool = False
    is_stuck: bool = False
    max_bytes: int = 0
    room_bytes: int = _PLENTY
    is_shown: bool = True
    num_changes: int = 0
    is_ending: bool = False
    pushed_out: PushedOut = field(default_factory=PushedOut)
    told_bytes: int = _PLENTY
    taken: dict[int, int] = field(default_factory=dict)

    def begin_engine(self, max_bytes: int) -> None:
        """An engine begins, which may have so much and was told nothing."""
        self.max_bytes, self.told_bytes = max_bytes, _PLENTY
        self.taken.clear()

    @property
    def num_bytes(self) -> int:
        """What the files take."""
        return sum(stored.num_bytes for stored in self.files.values())

    def change_room(self) -> None:
        """Have others take more of the disk, or less."""
        half = self.num_bytes // 2
        rooms = ((half, True), (_PLENTY, True), (0, True), (half, False), (3 * half, True))
        self.room_bytes, self.is_shown = rooms[self.num_changes % len(rooms)]
        self.num_changes += 1


class EchoCarrier:
    """Carries out orders when told to; `at_once`: with the order.

    `fails`: whether a fault strikes, asked each time. `num_carried`: orders carried
    out; `num_news`: orders given, and results taken. `host`: what host memory has, by the
    number of its segment. `refused`: segments whose file was not what it should be.
    """

    def __init__(self, runner: EchoRunner, page_size: int, disk: EchoDisk | None = None) -> None:
        self._page_size = page_size
        self._pools = dict(runner.memories) | (
            {} if runner.states is None else {POOLS[LayerKind.RECURRENT]: runner.states}
        )
        self.host: dict[int, Payload] = {}
        self.refused: set[int] = set()
        self._waiting: list[tuple[TierOrder, Mapping[int, Payload | None]]] = []
        self._done: list[TierResult] = []
        self.disk = disk or EchoDisk()
        self.at_once = True
        self.num_carried = self.num_news = 0
        self.fails: Callable[[Site], bool] = lambda _: False
        self.reached: Counter[str] = runner.reached

    def __len__(self) -> int:
        """Orders that were not carried out, and results that were not taken."""
        return len(self._waiting) + len(self._done)

    @property
    def num_waiting(self) -> int:
        """Orders that were not carried out."""
        return len(self._waiting)

    @property
    def waiting(self) -> Iterator[TierOrder]:
        """Orders that were not carried out."""
        return (order for order, _ in self._waiting)

    @property
    def has_results(self) -> bool:
        """Whether the next step is told of something."""
        return bool(self._done)

    def ask(self, orders: Iterable[TierOrder]) -> None:
        """Take orders."""
        for order in orders:
            self.num_news += 1
            match order:
                case Forget():
                    self._forget(order)
                    continue
                case CopyIn():
                    numbers = [part.segment for part in order.parts]
                case WriteFile():
                    numbers = [order.segment]
                    there = self.disk.files.values()
                    self.disk.pushed_out.begin(order, there, self.disk.max_bytes)
                case _:
                    numbers = []
            self.disk.pushed_out.removed.clear()
            if isinstance(order, WriteFile | MeasureRoom):
                self.disk.taken[order.number] = self.disk.num_bytes
            self._waiting.append((order, {number: self.host.get(number) for number in numbers}))
        if self.at_once:
            self.carry_all()

    def carry_all(self) -> None:
        """Carry out everything."""
        while self._waiting:
            self.carry(0)

    def carry(self, which: int) -> None:
        """Carry out one of the orders that wait."""
        order, held = self._waiting.pop(which % len(self._waiting))
        self.num_carried += 1
        match order:
            case CopyOut():
                result = self._copy_out(order)
            case CopyIn():
                result = self._copy_in(order, held)
            case WriteFile():
                result = self._write(order, held[order.segment])
            case FindFiles():
                found = tuple(self._find(order.file, order))
                result = TierResult(order.number, _COPY_S, found=found)
            case ListFiles():
                # A file is smaller than what a segment of it may take.
                files = self.disk.files.items()
                listed = ((file_id, each.num_bytes - SEGMENT_BYTES) for file_id, each in files)
                result = TierResult(order.number, _COPY_S, files=tuple(listed))
            case MeasureRoom():
                result = self._measure(order)
            case EraseFiles():
                for path in order.paths:
                    self._drop(path)
                refusal = Refusal.FAILED if self.disk.is_stuck else None
                result = TierResult(order.number, _COPY_S, refusal)
            case Forget():
                raise AssertionError("it is carried out at once")
        self._done.append(result)

    def take(self) -> list[TierResult]:
        """Return the results since the last call."""
        done, self._done = self._done, []
        self.disk.pushed_out.end(done)
        self.num_news += len(done)
        return done

    def doubt(self) -> None:
        """Let everything that was copied so far be wrong, which is what a quarantine assumes."""
        doubtful = [*self.host.values(), *(each.payload for each in self.disk.files.values())]
        for _, held in self._waiting:
            doubtful += filter(None, held.values())
        for payload in doubtful:
            for pages in payload.values():
                for cells in pages:
                    cells[:] = [GARBAGE] * len(cells)

    def _spoil(self, order: CopyIn) -> None:
        for part in order.parts:
            for pool, (_, pages) in part.pages.items():
                for page in pages.tolist():
                    self._pools[pool].damage(page)

    def _copy_out(self, order: CopyOut) -> TierResult:
        if self.fails(Site.TIER_COPY):
            self.reached["tier: copy out failed"] += 1
            return TierResult(order.number, _COPY_S, Refusal.FAILED)
        self.host[order.segment] = {
            pool: [self._pools[pool].copy_out(page) for page in pages.tolist()]
            for pool, pages in order.pages.items()
        }
        self.reached["tier: copied out"] += 1
        return TierResult(order.number, _COPY_S)

    def _copy_in(self, order: CopyIn, held: Mapping[int, Payload | None]) -> TierResult:
        is_failing = self.fails(Site.TIER_COPY)
        for part in order.parts:
            payload = held[part.segment]
            if part.found is not None:
                stored = self.disk.files.get(part.found.file.file_id)
                if stored is None or stored.is_damaged or not is_same(stored.found, part.found):
                    self.reached["tier: file refused"] += 1
                    self.refused.add(part.segment)
                    why = Refusal.GONE if stored is None else Refusal.WRONG
                    return TierResult(order.number, _COPY_S, why, part.segment)
                payload = stored.payload
                self.reached["tier: read from disk"] += 1
                is_old = stored.writer is not self
                self.reached["tier: read after an engine's death"] += is_old
                self.reached["tier: read what an engine wrote at its end"] += (
                    is_old and stored.is_last
                )
            if payload is None:
                self.reached["tier: copy forgotten before it was read"] += 1
                return TierResult(order.number, _COPY_S, Refusal.FAILED)
            for pool, (first, pages) in part.pages.items():
                for index, page in enumerate(pages.tolist(), first):
                    self._pools[pool].copy_in(page, payload[pool][index])
        if is_failing:  # it may have written anything where it was to write
            self._spoil(order)
            self.reached["tier: copy in failed"] += 1
            return TierResult(order.number, _COPY_S, Refusal.FAILED)
        self.reached["tier: copied in"] += 1
        return TierResult(order.number, _COPY_S)

    def _measure(self, order: MeasureRoom) -> TierResult:
        self._let_others_write()
        room_bytes = self._tell_room(self.disk.taken.pop(order.number))
        return TierResult(order.number, _COPY_S, room_bytes=room_bytes)

    def _let_others_write(self) -> None:
        if self.fails(Site.TIER_ROOM):
            self.disk.change_room()

    def _tell_room(self, taken_bytes: int) -> int:
        self.disk.told_bytes = self.disk.room_bytes if self.disk.is_shown else _PLENTY
        return self.disk.told_bytes - taken_bytes

    def _write(self, order: WriteFile, payload: Payload | None) -> TierResult:
        self._let_others_write()
        taken_bytes = self.disk.taken.pop(order.number)
        if payload is None or self.disk.is_full or self.fails(Site.TIER_COPY):
            self.reached["tier: file not written"] += 1
            return TierResult(order.number, _COPY_S, Refusal.FAILED)
        if taken_bytes + order.num_bytes > self.disk.room_bytes:
            self.reached["tier: no room for a file"] += self.disk.is_shown
            self.reached["tier: no room for a file, and none is missing"] += not self.disk.is_shown
            room_bytes = self._tell_room(taken_bytes)
            return TierResult(order.number, _COPY_S, Refusal.NO_ROOM, room_bytes=room_bytes)
        is_damaged = self.fails(Site.TIER_FILE)
        self.disk.files[order.found.file.file_id] = StoredFile(
            order.found,
            payload,
            order.num_bytes,
            self,
            is_damaged=is_damaged,
            is_last=self.disk.is_ending,
            used_ns=order.used_ns,
        )
        self.reached["tier: written to disk"] += 1
        room_bytes = self._tell_room(taken_bytes + order.num_bytes)
        return TierResult(order.number, _COPY_S, room_bytes=room_bytes)

    def _find(self, key: FileKey, order: FindFiles) -> Iterable[FoundFile]:
        """As `SegmentFiles.find` does."""
        tokens, page_size = order.tokens, self._page_size
        end = len(tokens) - len(tokens) % page_size
        while key.start < end:
            stored = self.disk.files.get(key.file_id)
            if stored is None or stored.found.file != key:
                return
            yield stored.found
            self.reached["tier: found on disk"] += 1
            self.reached["tier: found after an engine's death"] += stored.writer is not self
            rest, its = tokens[key.start : end], stored.found.tokens
            num_common = min(len(rest), len(its))
            differs = np.flatnonzero(its[:num_common] != rest[:num_common])
            if len(differs):
                num_common = int(differs[0]) // page_size * page_size
            chain = chain_after(key.chain, its[:num_common], page_size)
            start = key.start + num_common
            if start >= end:
                return
            name = chain_after(chain, tokens[start : start + page_size], page_size)
            key = FileKey(name, key.namespace, chain, start)

    def _drop(self, path: DroppedPath) -> None:
        """As `SharedFiles.drop` does."""
        chain = first_chain(path.namespace)
        chains = [chain, *chains_after(chain, path.tokens, self._page_size)]
        own, num_needed = {}, path.num_kept // self._page_size
        for file_id, stored in self.disk.files.items():
            key = stored.found.file
            at = chains.index(key.chain) if key.chain in chains else 0
            if chains[at : at + 2] == [key.chain, key.name]:
                own[file_id] = at
            else:
                num_needed = max(num_needed, at)
        for file_id in [each for each, at in own.items() if at >= num_needed]:
            del self.disk.files[file_id]

    def _forget(self, order: Forget) -> None:
        self.disk.pushed_out.drop(order.segments)
        for number in order.segments:
            self.host.pop(number, None)
        if order.all_segments:
            self.host.clear()
        if order.all_files:
            self.disk.files.clear()
        is_short = self.disk.num_bytes > self.disk.told_bytes
        for file_id in order.files:
            gone = self.disk.files.pop(file_id, None)
            self.reached["tier: gave way to others on the disk"] += gone is not None and is_short
            if gone is not None and gone.is_last and gone.writer is self:
                self.disk.pushed_out.remove(file_id, gone)


def is_same(found: FoundFile, expected: FoundFile) -> bool:
    """Whether a file is the one that was written or found."""
    is_like = found.file == expected.file and found.spans == expected.spans
    return is_like and np.array_equal(found.tokens, expected.tokens)
