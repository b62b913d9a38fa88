"""`TierStore`: the segments in host memory and on disk, and the orders that move them between.

What a spill needs of host memory is taken from the segments used longest ago. With a disk they are
written there first, ahead of need: what is on disk can give way at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cache.tiers.segment import Segment, chains_after
from cache.tiers.segment_tree import SEGMENT_BYTES, Path, SegmentTree
from cache.tiers.tier_account import TierAccount
from cache.types import Namespace, Tokens
from session_server.core.events import TierReport
from session_server.core.tier_orders import (
    FileKey,
    FindFiles,
    FoundFile,
    ListFiles,
    Refusal,
    TierResult,
    WriteFile,
)
from session_server.engine.tiers.costs import TierCosts
from session_server.engine.tiers.order_book import OrderBook
from session_server.engine.tiers.unread_files import UnreadFiles

_FULL_DIVISOR: Final = 4
"""Segments are written to disk ahead of need while less than this part of host memory is free."""

_NUM_TRIED: Final = 8
"""Segments that one search for one that gives way looks at."""

_NUM_AHEAD: Final = 64
"""Segments that one search for one to write ahead looks at."""

MAX_FILES: Final = 1 << 20
"""Files on disk: what is known of each takes host memory too."""


@dataclass(slots=True)
class TierCounts:
    """Count what the tiers did, see `TierReport`."""

    spilled_tokens: int = 0
    spilled_bytes: int = 0
    spill_ms: float = 0.0
    restored_tokens: int = 0
    restored_bytes: int = 0
    restore_ms: float = 0.0
    lookups: int = 0
    hits: int = 0
    written_bytes: int = 0
    refused_files: int = 0
    failed_copies: int = 0
    dropped_segments: int = 0


class TierStore:
    """Hold the segments. Nothing here touches a pool. `is_listed`: what the disk has from before
    is known."""

    def __init__(self, tree: SegmentTree, *, host_bytes: int, disk_bytes: int) -> None:
        """Begin with nothing in host memory. `disk_bytes`: 0 for no disk; `start` finds what is
        there."""
        self.costs = TierCosts()
        self.tree = tree
        self.host = TierAccount(host_bytes)
        self.disk = TierAccount(disk_bytes)
        self.counts = TierCounts()
        self._unread = UnreadFiles()
        """Files that no segment stands for. Until the disk is listed: those that were found on it,
        without bytes."""

        self.is_listed = disk_bytes == 0
        self._on_listed: list[Callable[[], None]] = []
        self.orders = OrderBook()
        self._num_writing = 0
        self._unwritten: OrderedDict[int, Segment] = OrderedDict()
        """Segments in host memory that may be written to disk, those copied first in front: what
        follows one comes behind it."""

        self._failed: dict[int, Segment] = {}
        """Segments that could not be written, and may be once the disk takes another one."""

    @property
    def has_disk(self) -> bool:
        """Return whether segments may be written to disk."""
        return self.disk.max_bytes > 0

    @property
    def is_writing(self) -> bool:
        """Return whether a segment is being written to disk."""
        return self._num_writing > 0

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is kept of anybody, in host memory or on disk."""
        return self.is_listed and not (self.tree or self._unread)

    def report(self) -> TierReport:
        """Return what was done so far, and what is held now."""
        disk_bytes = self.disk.num_bytes + self._unread.num_bytes
        counted = {name: getattr(self.counts, name) for name in TierCounts.__slots__}
        return TierReport(
            **counted,
            host_bytes=self.host.num_bytes,
            disk_bytes=disk_bytes,
            host_max_bytes=self.host.max_bytes,
            disk_max_bytes=self.disk.max_bytes,
        )

    def start(self) -> None:
        """Ask what the disk has from before."""
        if not self.is_listed:
            unread = self._unread
            self.orders.add(ListFiles, lambda result: self._take_list(result, unread))

    # Host memory

    def make_room(self, num_bytes: int) -> bool:
        """Free host memory for a segment; return whether it has room now."""
        if num_bytes > self.host.max_bytes:
            return False
        while self.host.free_bytes < num_bytes:
            segment = self.host.next_to_give(self._may_leave_host, _NUM_TRIED)
            if segment is None:
                self.write_ahead()
                return False
            self._leave_host(segment)
        return True

    def enter_host(self, segment: Segment) -> None:
        """Count a segment whose copy to host memory is ordered, or is complete."""
        self.host.add(segment)

    def end_copy(self, segment: Segment, *, is_whole: bool) -> bool:
        """Note that a segment was copied to host memory, or could not be; return whether it is
        there. It is not if it was dropped meanwhile."""
        is_known = self.tree.get(segment.number) is segment
        if not (is_whole and is_known):
            if is_known:
                self.drop(segment)
            self.orders.forget_in_host(segment.number)
            return False
        segment.in_host = True
        self._unwritten[segment.number] = segment
        self.write_ahead()
        return True

    def write_ahead(self, *, is_draining: bool = False) -> None:
        """Write a segment that was used longest ago to disk, if host memory is nearly full or
        `is_draining`, and none is being written."""
        while self._write_next(is_draining=is_draining):
            pass  # one that has no room, or gave way to make it, is passed over

    def _write_next(self, *, is_draining: bool) -> bool:
        """Write the next segment, or find that it cannot be; return False if there is none."""
        if not self.has_disk or self.is_writing:
            return False
        if is_draining:
            segment = next(iter(self._unwritten.values()), None)
        elif self.host.free_bytes <= self.host.max_bytes // _FULL_DIVISOR:
            segment = self.host.next_to_give(
                lambda each: each.number in self._unwritten, _NUM_AHEAD
            )
        else:
            return False
        if segment is not None:
            self._write(segment)
        return segment is not None

    # Disk

    def is_unread(self, name: bytes | None) -> bool:
        """Return whether the disk may have a segment of this name that the tree lacks."""
        return name is not None and (name in self._unread or not self.is_listed)

    def when_listed(self, then: Callable[[], None]) -> None:
        """Do something once the files on disk are known by name."""
        if self.is_listed:
            then()
        else:
            self._on_listed.append(then)

    def find_files(
        self, namespace: Namespace, tokens: Tokens, path: Path, then: Callable[[], None]
    ) -> None:
        """Read the headers of what the disk has of `tokens` behind a path, then go on."""
        assert path.next_name is not None, "a path that goes on has a name"
        key = FileKey(path.next_name, namespace, path.chain, path.length)
        unread = self._unread

        def take(result: TierResult) -> None:
            if unread is self._unread:
                self._enter_found(namespace, tokens, result.found)
            if result.refusal is Refusal.WRONG:
                self.counts.refused_files += 1
            if not result.found:
                # One that cannot be read is not asked for again, which might go on for ever.
                self._forget_unread(key.name)
            then()

        self.orders.add(lambda number: FindFiles(number, key, tokens), take)

    def file_of(self, segment: Segment) -> FoundFile:
        """Return what the file of a segment must be."""
        content = segment.content
        key = FileKey(content.name, content.namespace, content.chain, content.start)
        return FoundFile(key, content.tokens, content.spans)

    # Use

    def find(self, namespace: Namespace, tokens: Tokens) -> Path:
        """Return what the segments hold of some tokens."""
        return self.tree.find(namespace, tokens)

    def touch(self, segments: Iterable[Segment]) -> None:
        """Count segments of a path as used now."""
        used = tuple(segments)
        self.host.touch(used)
        self.disk.touch(used)

    def is_followed(self, segment: Segment) -> bool:
        """Return whether something follows a segment, be it in a file that was not read. O(pages of
        the segment) while there are such files."""
        if segment.children or not self._unread:
            return bool(segment.children)
        content = segment.content
        chains = chains_after(content.chain, content.tokens, self.tree.page_size)
        return any(map(self._unread.has_after, chains))

    def drop_unread(self, path: Path, tokens: Tokens, num_kept: int) -> None:
        """Drop the files that the disk has of `tokens` behind a path, and behind the first tokens,
        from the last one back to where another file follows."""
        if not self._unread:
            return
        page_size = self.tree.page_size
        end = len(tokens) - len(tokens) % page_size
        # A file is named by the chain after its first page.
        names = [*chains_after(path.chain, tokens[path.length : end], page_size)]
        for number, name in reversed([*enumerate(names)]):
            if self._unread.has_after(name) or path.length + number * page_size < num_kept:
                return
            self._forget_unread(name)

    def drop(self, segment: Segment) -> None:
        """Drop a segment everywhere, and all that follow it."""
        for each in self.tree.remove(segment):
            self.counts.dropped_segments += 1
            if each in self.host:
                self.host.remove(each)
                if each.in_host:
                    self.orders.forget_in_host(each.number)
            if each in self.disk:
                self.disk.remove(each)
                if each.on_disk:
                    self.orders.forget_file(each.content.file_id)
            self._unwritten.pop(each.number, None)
            self._failed.pop(each.number, None)

    def refuse_file(self, segment: Segment) -> None:
        """Drop a segment whose file is not what it should be."""
        self.counts.refused_files += 1
        if self.tree.get(segment.number) is segment:
            self.drop(segment)

    def clear(self) -> None:
        """Drop everything: what the pools held may have been wrong."""
        for segment in self.tree.segments():
            if self.tree.get(segment.number) is segment:
                self.drop(segment)
        self._unread = UnreadFiles()  # what is being found is gone by then
        if self.has_disk:
            self.orders.forget_files()

    def violations(self) -> list[str]:
        """Recount the segments, and return where they are not as the tree and the accounts say.
        O(segments)."""
        segments = self.tree.segments()
        found = [text for segment in segments for text in self._shape(segment)]
        for name, account in (("host memory", self.host), ("disk", self.disk)):
            held = sum(each.content.num_bytes for each in segments if each in account)
            if held != account.num_bytes:
                found.append(f"{name}: segments have {held} bytes, {account.num_bytes} are counted")
            if account.num_bytes > account.max_bytes:
                found.append(f"{name}: {account.num_bytes} bytes of {account.max_bytes}")
        return found

    def _shape(self, segment: Segment) -> Iterator[str]:
        who = f"segment {segment.number}"
        if segment.in_host and segment not in self.host:
            yield f"{who} is in host memory and not counted there"
        if (segment.on_disk or segment.is_writing) and segment not in self.disk:
            yield f"{who} is on disk and not counted there"
        if segment not in self.host and segment not in self.disk:
            yield f"{who} is nowhere"
        parent, start = segment.parent, segment.content.start
        if parent is None:
            if start:
                yield f"{who} follows nothing and begins at {start}"
        elif not (
            self.tree.get(parent.number) is parent
            and parent.children.get(segment.content.name) is segment
            and parent.content.start < start <= parent.content.end
        ):
            yield f"{who} does not follow the segment that it hangs below"

    # Private

    def _may_leave_host(self, segment: Segment) -> bool:
        if not segment.in_host or segment.is_writing:
            return False
        return segment.on_disk or segment.is_refused or not self.has_disk

    def _leave_host(self, segment: Segment) -> None:
        if not segment.on_disk:
            self.drop(segment)
            return
        segment.in_host = False
        self.host.remove(segment)
        self.orders.forget_in_host(segment.number)

    def _write(self, segment: Segment) -> None:
        self._unwritten.pop(segment.number, None)
        if not self._make_room_on_disk(segment.content.num_bytes):
            segment.is_refused = True
            return
        if self.tree.get(segment.number) is not segment:
            return  # what gave way was the beginning of the same path
        # A file from before may have the name: it held the same tokens, or begins with them.
        self._forget_unread(segment.content.name)
        self.disk.add(segment)
        segment.is_writing = True
        self._num_writing += 1

        def take(result: TierResult) -> None:
            self._end_writing(segment, is_whole=result.refusal is None)

        self.orders.add(
            lambda number: WriteFile(
                number, segment.number, self.file_of(segment), segment.content.num_bytes
            ),
            take,
        )

    def _end_writing(self, segment: Segment, *, is_whole: bool) -> None:
        self._num_writing -= 1
        segment.is_writing = False
        if self.tree.get(segment.number) is not segment:
            if is_whole:
                self.orders.forget_file(segment.content.file_id)
            return
        segment.on_disk, segment.is_refused = is_whole, not is_whole
        if is_whole:
            self.counts.written_bytes += segment.content.num_bytes
            self._try_again()
        else:
            self.counts.failed_copies += 1
            self.disk.remove(segment)
            self._failed[segment.number] = segment
        self.write_ahead()

    def _try_again(self) -> None:
        """Have what could not be written written now that the disk takes something."""
        for segment in self._failed.values():
            segment.is_refused = False
        self._unwritten.update(self._failed)
        self._failed.clear()

    def _make_room_on_disk(self, num_bytes: int) -> bool:
        if num_bytes > self.disk.max_bytes:
            return False
        while (
            self.disk.num_segments + len(self._unread) >= MAX_FILES
            or self.disk.free_bytes - self._unread.num_bytes < num_bytes
        ):
            if self._unread:
                self._forget_unread(self._unread.oldest())
                continue
            segment = self.disk.next_to_give(lambda each: each.on_disk, _NUM_TRIED)
            if segment is None:
                return False
            self._leave_disk(segment)
        return True

    def _leave_disk(self, segment: Segment) -> None:
        if not segment.in_host:
            self.drop(segment)
            return
        # It is not written again: it would push out what has just pushed it out.
        segment.on_disk, segment.is_refused = False, True
        self.disk.remove(segment)
        self.orders.forget_file(segment.content.file_id)

    def _forget_unread(self, name: bytes) -> None:
        if (file_id := self._unread.pop(name)) is not None:
            self.orders.forget_file(file_id)

    def _take_list(self, result: TierResult, unread: UnreadFiles) -> None:
        self.is_listed = True
        if unread is self._unread:
            self._enter_list(result)
        on_listed, self._on_listed = self._on_listed, []
        for then in on_listed:
            then()

    def _enter_list(self, result: TierResult) -> None:
        if result.refusal is not None:
            self.disk.max_bytes = 0  # what it has cannot be counted, so it gets no more
        known = self._unread.take_all()
        for file_id, num_bytes in result.files:
            if file_id not in known:
                # It counts as what a segment of it takes at most, so that there is room for that.
                self._unread.add(file_id, num_bytes + SEGMENT_BYTES)
        self._make_room_on_disk(0)

    def _enter_found(
        self, namespace: Namespace, tokens: Tokens, found: Sequence[FoundFile]
    ) -> None:
        for each in found:
            path = self.find(namespace, tokens[: each.file.start + len(each.tokens)])
            if path.next_name != each.file.name or path.length != each.file.start:
                continue  # it was found or written by somebody else meanwhile
            if self.is_listed and each.file.name not in self._unread:
                return  # it gave way meanwhile, and its file is gone
            segment = self.tree.add(namespace, path, each.tokens, each.spans)
            self._unread.pop(segment.content.name)
            if not self.is_listed:
                # The list may have it although it is gone by then.
                self._unread.add(segment.content.file_id, 0)
            if self.disk.free_bytes - self._unread.num_bytes < segment.content.num_bytes:
                self.tree.remove(segment)
                self.orders.forget_file(segment.content.file_id)
                return
            segment.on_disk = True
            self.disk.add(segment)
