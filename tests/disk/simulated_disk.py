"""A disk that is played from a recording, and what a crash may leave of it.

Assumed is what POSIX says, and no more: `fsync` of a file puts on disk what was written to it,
`fsync` of a directory the names in it. Everything else may be there or not, whatever came before
or after it: a write whole, in part (at the borders of sectors, or of bytes) or as a longer file
full of zeros or of rubbish; a file's new length; a name. One rename is one step. A sync that fails
has put nothing on disk, and no later one does it for what was written to the file before: a system
may forget pages that it could not write. Names it does not forget: they are in a journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.disk.recording import Kind, Operation
from tests.rig.decisions import Decisions

SECTOR: Final = 512

Piece = tuple[int, int]

Fate = Callable[[int, "Pending"], Sequence[Piece]]
"""Return which bytes are kept of the n-th thing that is not on disk for sure. Of a name or a length
nothing or anything counts."""

Image = Mapping[str, bytes | None]
"""Files by path, and directories: None."""


@dataclass(slots=True)
class Pending:
    """Something that is not on disk for sure. `names`: entries of directories, an inode each or
    None; otherwise it is a write at `offset`, or a cut to that length if `data` is None. `is_lost`:
    a sync of it has failed, so that no later one helps. `is_kept`: it is on disk, behind one that
    is lost."""

    inode: int
    offset: int = 0
    data: bytes | None = None
    names: dict[tuple[int, str], int | None] = field(default_factory=dict)
    is_lost: bool = False
    is_kept: bool = False

    @property
    def whole(self) -> list[Piece]:
        """All of it."""
        return [(0, len(self.data or b"?"))]


class SimulatedDisk:
    """Apply what was done, one thing after another; `image` is what a crash leaves then."""

    def __init__(self, root: int) -> None:
        self._inodes = {root: 0}
        self._num_inodes = 1
        self._names: dict[tuple[int, str], int] = {}
        """Names as a running program sees them."""

        self._durable_names: dict[tuple[int, str], int] = {}
        self._durable: dict[int, bytes] = {}
        self._directories = {0}
        self.pending: list[Pending] = []

    def apply(self, done: Operation) -> None:
        """Do what was done."""
        if done.error:
            if done.kind is Kind.SYNC:
                self._lose(self._inodes[done.inode])
            return
        match done.kind:
            case Kind.CREATE | Kind.MKDIR:
                self._make(done)
            case Kind.WRITE:
                self._pend(Pending(self._inodes[done.inode], done.offset, done.data))
            case Kind.TRUNCATE:
                self._pend(Pending(self._inodes[done.inode], done.offset))
            case Kind.SYNC:
                self._sync(self._inodes[done.inode])
            case Kind.UNLINK:
                self._rename({self._place(done.path): None})
            case Kind.RENAME | Kind.LINK:
                inode = self._names[self._place(done.path)]
                old = {self._place(done.path): None} if done.kind is Kind.RENAME else {}
                self._rename({**old, self._place(done.other): inode})
            case Kind.NOTE | Kind.OPEN:
                pass

    def _make(self, done: Operation) -> None:
        inode = self._inodes[done.inode] = self._num_inodes  # a number may have been another's
        self._num_inodes += 1
        if done.kind is Kind.MKDIR:
            self._directories.add(inode)
        else:
            self._durable[inode] = b""
        self._rename({self._place(done.path): inode})

    def _place(self, path: str) -> tuple[int, str]:
        *parents, name = path.split("/")
        directory = 0
        for parent in parents:
            directory = self._names[directory, parent]
        return directory, name

    def _rename(self, names: dict[tuple[int, str], int | None]) -> None:
        for place, inode in names.items():
            if inode is None:
                del self._names[place]
            else:
                self._names[place] = inode
        self._pend(Pending(-1, names=names))

    def _pend(self, pending: Pending) -> None:
        self.pending.append(pending)

    def _sync(self, inode: int) -> None:
        """What is known to be on disk is more now."""
        left, is_behind = [], False
        for pending in self.pending:
            synced = {place for place in pending.names if place[0] == inode}
            if synced:
                _enter(self._durable_names, {at: pending.names.pop(at) for at in synced})
                left += [pending] if pending.names else []
            elif pending.inode != inode:
                left.append(pending)
            elif pending.is_lost or is_behind:
                is_behind, pending.is_kept = True, not pending.is_lost
                left.append(pending)
            else:
                self._durable[inode] = _written(self._durable[inode], pending, pending.whole)
        self.pending = left

    def _lose(self, inode: int) -> None:
        for pending in self.pending:
            pending.is_lost |= pending.inode == inode and not pending.is_kept

    def is_unwritten(self, suffix: str) -> bool:
        """Return whether a file with such a name has data that is not on disk for sure."""
        inodes = {inode for (_, name), inode in self._names.items() if name.endswith(suffix)}
        return any(pending.inode in inodes and not pending.is_kept for pending in self.pending)

    def image(self, fate: Fate, *, rubbish: Decisions | None = None) -> Image:
        """Return what a crash leaves. What is not kept of a write may still make its file longer:
        with `rubbish` it does, and that is what is there."""
        names, files = dict(self._durable_names), dict(self._durable)
        for number, pending in enumerate(self.pending):
            pieces = pending.whole if pending.is_kept else fate(number, pending)
            if pending.names:
                if pieces:
                    _enter(names, pending.names)
                continue
            before = files[pending.inode]
            if rubbish is not None and pending.data is not None:
                end = pending.offset + len(pending.data)
                before += _rubbish(rubbish, end - len(before))
            files[pending.inode] = _written(before, pending, pieces)
        return dict(self._walk(names, files, 0, ""))

    def _walk(
        self,
        names: Mapping[tuple[int, str], int],
        files: Mapping[int, bytes],
        directory: int,
        above: str,
    ) -> Iterator[tuple[str, bytes | None]]:
        for (parent, name), inode in sorted(names.items()):
            if parent != directory:
                continue
            if inode in self._directories:
                yield above + name, None
                yield from self._walk(names, files, inode, f"{above}{name}/")
            else:
                yield above + name, files[inode]


def _enter(names: dict[tuple[int, str], int], added: Mapping[tuple[int, str], int | None]) -> None:
    for place, inode in added.items():
        if inode is None:
            names.pop(place, None)
        else:
            names[place] = inode


def _written(before: bytes, pending: Pending, pieces: Sequence[Piece]) -> bytes:
    if not pieces:
        return before
    if pending.data is None:
        return before[: pending.offset].ljust(pending.offset, b"\0")
    after = bytearray(before.ljust(pending.offset + pieces[-1][1], b"\0"))
    for start, end in pieces:
        after[pending.offset + start : pending.offset + end] = pending.data[start:end]
    return bytes(after)


def _rubbish(chance: Decisions, num_bytes: int) -> bytes:
    word = chance.below(1 << 32).to_bytes(4, "little")
    return (word * (num_bytes // 4 + 1))[: max(num_bytes, 0)]


def write_image(image: Image, directory: Path) -> None:
    """Make the files of an image in a new directory, for their owner alone as those of a store."""
    directory.mkdir()
    for name, data in image.items():
        path = directory / name
        if data is None:
            path.mkdir(mode=0o700)
        else:
            path.touch(mode=0o600)
            path.write_bytes(data)


def crashes(disk: SimulatedDisk, chance: Decisions, num_drawn: int) -> Iterator[Image]:
    """Yield what a crash may leave at this moment: nothing of what is not on disk for sure, all of
    it, data without names, names without data, one thing alone, all but one, one torn and what is
    behind it lost, and drawn mixtures."""
    yield disk.image(lambda _, __: ())
    if not disk.pending:
        return
    yield disk.image(lambda _, pending: pending.whole)
    yield disk.image(lambda _, pending: () if pending.names else pending.whole)
    yield disk.image(lambda _, pending: pending.whole if pending.names else ())
    last = len(disk.pending) - 1
    for number in {last, chance.between(0, last)}:
        yield disk.image(lambda at, pending, n=number: pending.whole if at == n else ())
        yield disk.image(lambda at, pending, n=number: pending.whole if at != n else ())
        for border in (SECTOR, 1):
            yield disk.image(_torn(number, chance, border))
    for _ in range(num_drawn):
        yield disk.image(_mixed(chance, SECTOR))
        rubbish = chance if chance.happens(0.5) else None
        yield disk.image(_mixed(chance, 1), rubbish=rubbish)


def _torn(number: int, chance: Decisions, border: int) -> Fate:
    def fate(at: int, pending: Pending) -> Sequence[Piece]:
        if at != number:
            return pending.whole if at < number else ()
        end = pending.whole[0][1]
        cut = chance.between(0, end)
        return [(0, min(end, cut - (pending.offset + cut) % border))] if cut >= border else ()

    return fate


def _mixed(chance: Decisions, border: int) -> Fate:
    """Each thing is kept or not; a write may be kept in part, its sectors each or up to a byte."""
    rate = chance.pick((0.1, 0.5, 0.9))

    def fate(_at: int, pending: Pending) -> Sequence[Piece]:
        if pending.data is None or border == 1 or chance.happens(0.5):
            end = pending.whole[0][1]
            cut = chance.below(end) if pending.data is not None and chance.happens(0.3) else 0
            piece = (cut, end) if chance.happens(0.5) else (0, cut or end)
            return [piece] if chance.happens(rate) else ()
        return [piece for piece in _sectors(pending) if chance.happens(rate)]

    return fate


def _sectors(pending: Pending) -> Iterator[Piece]:
    assert pending.data is not None, "no write"
    start = 0
    while start < len(pending.data):
        end = min(start + SECTOR - (pending.offset + start) % SECTOR, len(pending.data))
        yield start, end
        start = end
