"""`TierStore`: the segments in host memory and on disk, and the orders that move them between.

What a spill needs of host memory is taken from the segments used longest ago. With a disk they are
written there first, ahead of need: what is on disk can give way at once.

Work that grows with what is kept is done in slices: `advance` does one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from cache.tiers.segment import NAME_BYTES, TAG_BYTES, Chain, Segment, chains_after, tenant_tag
from cache.tiers.segment_tree import SEGMENT_BYTES, Path, SegmentTree
from cache.tiers.tier_account import TierAccount
from cache.tiers.write_queue import WriteQueue
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
from session_server.engine.tiers.counts import TierCounts
from session_server.engine.tiers.disk_account import DiskAccount
from session_server.engine.tiers.listing import Listing
from session_server.engine.tiers.misplaced import misplaced
from session_server.engine.tiers.order_book import Continue, OrderBook
from session_server.engine.tiers.pace import NUM_PER_STEP, TierPace
from session_server.engine.tiers.shared_index import SharedIndex
from session_server.engine.tiers.unread_files import UNREAD_FILE_BYTES, UnreadFiles, names_behind
from session_server.engine.tiers.use_clock import UseClock

_FULL_DIVISOR: Final = 4
"""Segments are written to disk ahead of need while less than this part of host memory is free."""

_NUM_TRIED: Final = 8
"""Segments that one search for one that gives way looks at."""

_NUM_AHEAD: Final = 64
"""Segments that one search for one to write ahead looks at."""

MAX_INDEX_BYTES: Final = 1 << 27
"""Host memory for what is known of files on disk: each takes some, and its tokens once it was
read. It is not part of what `TierPolicy.host_bytes` gives."""

_KNOWN_FILE_BYTES: Final = 2048
"""Memory for what is known of a file that was read or written, beside its tokens: at most this
much."""


class TierStore:
    """Hold the segments. Nothing here touches a pool."""

    def __init__(
        self, tree: SegmentTree, *, host_bytes: int, disk_bytes: int, is_shared: bool = False
    ) -> None:
        """Begin with nothing in host memory. `disk_bytes`: 0 for no disk; `start` finds what is
        there. `is_shared`: see `TierPolicy`."""
        self.costs = TierCosts()
        self.tree = tree
        self.host = TierAccount(host_bytes)
        self.disk = DiskAccount(disk_bytes)
        self.counts = TierCounts()
        self.uses = UseClock()
        self.orders = OrderBook(tree.page_bytes)
        own = UnreadFiles(self.disk)
        self._unread = SharedIndex(self.uses) if is_shared and disk_bytes else own
        """Files that no segment stands for."""

        self._listing = Listing(own, is_over=disk_bytes == 0 or is_shared)
        self.writes = WriteQueue()
        self.pace = TierPace()
        self._num_clears = 0

    @property
    def has_disk(self) -> bool:
        """Return whether segments may be written to disk."""
        return self.disk.given_bytes > 0

    @property
    def is_shared(self) -> bool:
        """Return whether other engines write files too, and look for those of this one."""
        return isinstance(self._unread, SharedIndex)

    @property
    def is_writing(self) -> bool:
        """Return whether a segment is being written to disk."""
        return self.writes.under_way is not None

    @property
    def is_listed(self) -> bool:
        """Return whether what the disk has from before is known."""
        return self._listing.is_over

    @property
    def has_unlisted(self) -> bool:
        """Return whether the disk did not say what it has."""
        return self._listing.has_failed

    @property
    def has_more(self) -> bool:
        """Return whether another `advance` would do something."""
        is_cut = self.pace.is_spent or self.pace.has_dropped or self.writes.may_try_again
        return is_cut or self._listing.has_more or self.is_giving_way

    @property
    def is_giving_way(self) -> bool:
        """Return whether files go because the disk has less room than they take."""
        return self.disk.free_bytes < 0 and self._next_off_disk() is not None

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is kept of anybody, in host memory or on disk."""
        return self.is_listed and not (self.is_shared or self.tree or self._unread)

    def report(self) -> TierReport:
        """Return what was done so far, and what is held now."""
        counted = {name: getattr(self.counts, name) for name in TierCounts.__slots__}
        return TierReport(
            **counted,
            host_bytes=self.host.num_bytes,
            disk_bytes=self.disk.num_bytes,
            host_max_bytes=self.host.max_bytes,
            disk_max_bytes=self.disk.max_bytes,
            disk_given_bytes=self.disk.given_bytes,
            no_room_files=self.disk.num_refused,
        )

    def start(self) -> None:
        """Ask what the disk has from before."""
        if not self.is_listed:
            max_files = MAX_INDEX_BYTES // UNREAD_FILE_BYTES
            self.orders.add(lambda number: ListFiles(number, max_files), self._take_list)

    def advance(self) -> None:
        """Do a slice of what takes long. O(1) while there is nothing of that kind."""
        was_spent = self.pace.begin_step()
        self._let_go_of_dropped()
        self._try_again()
        self.pace.begin_step()  # what is left of those keeps nobody from making room
        if self._make_room_on_disk(0, NUM_PER_STEP) and self._listing.has_more:
            # It counts as what a segment of it takes at most, so that there is room for that.
            self._listing.enter(NUM_PER_STEP, SEGMENT_BYTES)
        if was_spent:
            self.write_ahead()

    # Host memory

    def make_room(self, num_bytes: int) -> bool:
        """Free host memory for a segment; return whether it has room now. If not and the step
        `is_spent`, the next one may find the rest."""
        if num_bytes > self.host.max_bytes:
            return False
        while self.host.free_bytes < num_bytes:
            if not self.pace.take():
                return False
            segment = self.host.next_to_give(self._may_leave_host, _NUM_TRIED)
            if segment is None:
                self.write_ahead()
                return False
            self.leave_host(segment)
        return True

    def enter_host(self, segment: Segment, used_ns: int) -> None:
        """Count a segment whose copy to host memory is ordered, or is complete. `used_ns`: when it
        was used last."""
        segment.used_ns = used_ns
        for account in (self.host, self.disk):
            before = account.named(segment.content.tag, segment.content.name)
            if before is not None:  # it was dropped with what it followed
                self._let_go(before)
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
        self.writes.add(segment)
        self.write_ahead()
        return True

    def write_ahead(self) -> None:
        """Write a segment to disk, if none is being written: the one used longest ago if host
        memory is nearly full; at the engine's end the one used last."""
        while self._write_next():
            if not self.pace.take():
                return  # one that has no room, or gave way to make it, is passed over

    def _write_next(self) -> bool:
        """Write the next segment, or find that it cannot be; return False if there is none."""
        # What gives way for one file is little: where much has to, slices of it come first.
        may_write = self.has_disk and self.disk.free_bytes >= 0
        if not may_write or self.is_writing or self.writes.is_over:
            return False
        if self.writes.is_hurried or self.is_shared:
            segment = self.writes.latest()
        elif self.host.free_bytes <= self.host.max_bytes // _FULL_DIVISOR:
            segment = self.host.next_to_give(self.writes.__contains__, _NUM_AHEAD)
        else:
            return False
        segment = segment and self.writes.beginning_of(segment)
        may_wait = segment is not None and not self.writes.is_hurried
        if segment is None or (may_wait and self.disk.waits_for(segment.content.num_bytes)):
            return False
        self._write(segment)
        return True

    # Disk

    def is_unread(self, name: bytes | None) -> bool:
        """Return whether the disk may have a segment of this name that the tree lacks, and that can
        be read."""
        if name is None or self.orders.disk_watch.is_silent:
            return False
        return name in self._unread or not self.is_listed

    def may_be_written(self, num_bytes: int, used_ns: int) -> bool:
        """Return whether the disk has room for a segment, or something on it was used longer
        ago."""
        if self.disk.free_bytes >= num_bytes:
            return True
        next_to_give = self._next_off_disk()
        is_later = isinstance(next_to_give, Segment) and next_to_give.used_ns > used_ns
        return next_to_give is not None and not is_later

    def find_files(
        self, namespace: Namespace, tokens: Tokens, path: Path, then: Callable[[], None]
    ) -> None:
        """Read the headers of what the disk has of `tokens` behind a path, then go on; also if the
        disk does not answer."""
        assert path.next_name is not None, "a path that goes on has a name"
        key = FileKey(path.next_name, namespace, path.chain, path.length)
        num_clears = self._num_clears

        def enter(result: TierResult) -> None:
            if num_clears == self._num_clears:
                self._enter_found(namespace, tokens, result.found)
            if result.refusal is Refusal.WRONG:
                self.counts.refused_files += 1
            if not result.found and result.refusal is not Refusal.FAILED:
                # One that cannot be read is not asked for again, which might go on for ever. One
                # that could not be opened now is: by the next turn.
                self._forget_unread(key.name)

        def take(result: TierResult) -> None:
            enter(result)
            then()

        def give_up() -> Continue:
            then()
            return enter

        self.orders.add(lambda number: FindFiles(number, key, tokens), take, give_up=give_up)

    def expect(self, files: Iterable[tuple[bytes, int]]) -> None:
        """Take note of files that another engine has written here; what is known stays."""
        for file_id, num_bytes in files:
            known = self.disk.named(file_id[-TAG_BYTES:], file_id[:NAME_BYTES])
            if self.is_listed and known is None:
                self._unread.expect(file_id, num_bytes)

    # Use

    def find(self, namespace: Namespace, tokens: Tokens) -> Path:
        """Return what the segments hold of some tokens."""
        return self.tree.find(namespace, tokens)

    def find_readable(self, namespace: Namespace, tokens: Tokens) -> Path:
        """Return the same as far as it can be read now."""
        return self.find(namespace, tokens).readable(from_disk=not self.orders.disk_watch.is_silent)

    def touch(self, segments: Iterable[Segment], used_ns: int | None = None) -> int:
        """Count the segments of a path as used now, or at `used_ns`; return when. The first of
        them are then the last to give way."""
        used_ns, used = self.uses.next_use() if used_ns is None else used_ns, tuple(segments)
        for index, segment in enumerate(used):
            segment.used_ns = max(segment.used_ns, used_ns - index)
        self.host.touch(used)
        self.disk.touch(used)
        self.writes.touch(used)
        return used_ns

    def is_followed(self, segment: Segment) -> bool:
        """Return whether something follows a segment, be it in a file that was not read. O(pages of
        the segment) while its tenant has such files."""
        content = segment.content
        if segment.children or not self._unread.num_of(content.tag):
            return bool(segment.children)
        chains = chains_after(content.chain, content.tokens, self.tree.page_size)
        return any(map(self._unread.has_after, chains))

    def drop_unread(self, namespace: Namespace, path: Path, tokens: Tokens, num_kept: int) -> None:
        """Drop the files that the disk has of `tokens` behind a path, and behind the first tokens,
        from the last one back to where another file follows."""
        if not self._unread.num_of(tenant_tag(namespace.tenant)):
            return
        for start, name in reversed([*names_behind(self._unread, self.tree, path, tokens)]):
            if self._unread.has_after(name) or start < num_kept:
                return
            self._forget_unread(name)

    def drop_unshared(self, segment: Segment | None, num_kept: int = 0) -> None:
        """Drop a segment and those before it, as far as no session ends in them and nothing comes
        after, and they begin behind the first tokens."""
        segment = self.tree.living(segment)
        while segment is not None and segment.content.start >= num_kept:
            if segment.num_sessions or self.is_followed(segment):
                return
            before = segment.parent
            self.drop(segment)
            segment = self.tree.living(before)

    def drop(self, segment: Segment) -> None:
        """Drop a segment everywhere, and all that follow it: nobody finds those any more, and they
        count until they are let go of, which may be in later steps."""
        self._let_go(segment)
        self._let_go_of_dropped()

    def refuse_file(self, segment: Segment, refusal: Refusal) -> None:
        """Drop a segment whose file is not what it should be, or is gone."""
        self.counts.refused_files += refusal is Refusal.WRONG
        if self.tree.get(segment.number) is segment:
            self.drop(segment)

    def clear(self) -> None:
        """Drop everything at once: what the pools held may have been wrong."""
        self._num_clears += 1  # what is being found is gone by then
        self.counts.dropped_segments += len(self.tree)
        self.pace.drop(self.tree.clear(), *self._unread.clear())
        self._listing.end()
        self.writes.clear()
        for account in (self.host, self.disk):
            account.clear()
        self.orders.forget_all_in_host()
        if self.has_disk:
            self.orders.forget_all_files()

    def violations(self) -> list[str]:
        """Recount the segments, and return where they are not as the tree and the accounts say.
        O(segments)."""
        found = [*misplaced(self.tree, self.host, self.disk)]
        segments = (*self.tree.segments(), *self.tree.lost())
        for name, account in (("host memory", self.host), ("disk", self.disk)):
            held = sum(each.content.num_bytes for each in segments if each in account)
            held += self._unread.num_bytes if account is self.disk else 0
            if held != account.num_bytes:
                found.append(f"{name}: {held} bytes are there, {account.num_bytes} are counted")
            if account.num_bytes > account.max_bytes and not (self.has_more or self.is_writing):
                found.append(f"{name}: {account.num_bytes} bytes of {account.max_bytes}")
        return found

    # Private

    def _let_go(self, segment: Segment) -> None:
        """Drop one segment, and leave those that follow it to `_let_go_of_dropped`."""
        self.pace.drop(self.tree.remove(segment))
        self.counts.dropped_segments += 1
        if segment in self.host:
            self.host.remove(segment)
            if segment.in_host:
                self.orders.forget_in_host(segment.number)
        if segment in self.disk:
            self.disk.remove(segment)
            if segment.on_disk:
                self._remove_file(segment)
        self.writes.remove(segment)

    def _let_go_of_dropped(self) -> None:
        while (dropped := self.pace.next_dropped()) is not None:
            if not isinstance(dropped, Segment):
                continue  # of a file that nobody has read
            if self.tree.get(dropped.number) is dropped:
                self._let_go(dropped)
            else:
                dropped.unlink()  # everything was dropped

    def _try_again(self) -> None:
        while self.writes.may_try_again and self.pace.take():
            self.writes.try_again()

    def _may_leave_host(self, segment: Segment) -> bool:
        if not segment.in_host or segment.is_writing:
            return False
        is_left = segment.on_disk or segment.is_refused or not self.has_disk
        return is_left or self.disk.waits_for(segment.content.num_bytes)

    def leave_host(self, segment: Segment) -> None:
        """Drop a segment from host memory, and everywhere if it is not on disk."""
        if not segment.on_disk:
            self.drop(segment)
            return
        segment.in_host = False
        self.host.remove(segment)
        self.orders.forget_in_host(segment.number)

    def _write(self, segment: Segment) -> None:
        self.writes.remove(segment)
        parent = segment.parent
        # What the disk did not take before has no room for what follows it either.
        is_found = parent is None or parent.on_disk or self.writes.has_failed(parent)
        has_room = is_found and self._make_room_for(segment)
        if self.tree.get(segment.number) is not segment:
            return  # what gave way was the beginning of the same path
        if not has_room:
            segment.is_refused = not (is_found and self.pace.is_spent)
            if not segment.is_refused:
                self.writes.add(segment)  # the next step goes on
            return
        # A file from before may have the name: it held the same tokens, or begins with them.
        self._forget_unread(segment.content.name)
        self.disk.add(segment)
        segment.is_writing = True
        self.writes.under_way = segment
        file, size = FoundFile.of(segment.content), segment.content.num_bytes
        before_bytes = self.disk.num_bytes - size if self.is_listed else None
        self.orders.add(
            lambda number: WriteFile(number, segment.number, file, size, segment.used_ns),
            lambda result: self._end_writing(segment, result, before_bytes),
        )

    def _end_writing(self, segment: Segment, result: TierResult, before_bytes: int | None) -> None:
        is_whole, num_bytes = result.refusal is None, segment.content.num_bytes
        if before_bytes is not None:
            held_bytes, now_s = before_bytes + num_bytes * is_whole, self.uses.now_s
            self.disk.note_room(result, held_bytes=held_bytes, asked_bytes=num_bytes, now_s=now_s)
        self.disk.num_refused += result.refusal is Refusal.NO_ROOM
        self.writes.under_way = None
        segment.is_writing = False
        if self.tree.get(segment.number) is not segment:
            if is_whole:
                self.orders.forget_file(segment.content.file_id)
            return
        segment.on_disk = is_whole
        if is_whole:
            self.counts.written_bytes += segment.content.num_bytes
            self.writes.note_written(segment)
            self._try_again()
        else:
            self.counts.failed_copies += 1
            self.disk.remove(segment)
            self.writes.fail(segment)
        self.write_ahead()

    def _make_room_for(self, segment: Segment) -> bool:
        """Make room on disk for a segment, if what gives way for it was used longer ago. Somebody
        else who has more gives way in any case, but not at the engine's end: then nothing is
        pushed out that has just been written."""
        content = segment.content
        if content.num_bytes > self.disk.max_bytes:
            return False
        index_bytes = _KNOWN_FILE_BYTES + content.tokens.nbytes

        def may_give(other: Segment) -> bool:
            is_own = self.writes.is_draining or other.content.tag == content.tag
            return other.used_ns < segment.used_ns or not is_own

        while not self._has_room_on_disk(content.num_bytes, index_bytes):
            if not (self.pace.take() and self._give_way_on_disk(may_give)):
                return False
        return True

    def _make_room_on_disk(self, num_bytes: int, num_given: int) -> bool:
        """Have at most so many files give way for so many bytes; return whether there is room."""
        for _ in range(num_given):
            if self._has_room_on_disk(num_bytes) or not self._give_way_on_disk(lambda _: True):
                break
        return self._has_room_on_disk(num_bytes)

    def _has_room_on_disk(self, num_bytes: int, index_bytes: int = 0) -> bool:
        index_bytes += len(self._unread) * UNREAD_FILE_BYTES
        index_bytes += self.disk.num_segments * _KNOWN_FILE_BYTES + self.disk.num_token_bytes
        return self.disk.free_bytes >= num_bytes and index_bytes <= MAX_INDEX_BYTES

    def _next_off_disk(self) -> Chain | Segment | None:
        """Return what gives way next, a file that was not read by its name; None if nothing may."""
        tag = self.disk.largest()
        name = None if tag is None else self._unread.oldest(tag)
        return name or self.disk.next_to_give(lambda each: each.on_disk, _NUM_TRIED)

    def _give_way_on_disk(self, may_give: Callable[[Segment], bool]) -> bool:
        given = self._next_off_disk()
        if isinstance(given, bytes):
            self._forget_unread(given)
        elif given is not None and may_give(given):
            self._leave_disk(given)
        else:
            return False
        return True

    def _leave_disk(self, segment: Segment) -> None:
        if not segment.in_host:
            self.drop(segment)
            return
        # It is not written again before it is used: it would push out what has pushed it out.
        segment.on_disk, segment.is_refused = False, True
        self.disk.remove(segment)
        self._remove_file(segment)

    def _remove_file(self, segment: Segment) -> None:
        """Have the file of a segment removed that is forgotten here. One that is shared is not: who
        deletes a history names that (`Erasing`), and others may use it else."""
        if not self.is_shared:
            self.orders.forget_file(segment.content.file_id)

    def _forget_unread(self, name: Chain) -> None:
        if (file_id := self._unread.pop(name)) is not None:
            self.orders.forget_file(file_id)

    def _take_list(self, result: TierResult) -> None:
        if result.refusal is not None and not self.is_listed:
            self.disk.give_nothing()  # what it has cannot be counted, so it gets no more
            self._listing.has_failed = True
        self._listing.take(result.files)

    def _enter_found(
        self, namespace: Namespace, tokens: Tokens, found: Sequence[FoundFile]
    ) -> None:
        used_ns = self.uses.next_use()
        for index, each in enumerate(found):
            path = self.find(namespace, tokens[: each.file.start + len(each.tokens)])
            if path.next_name != each.file.name or path.length != each.file.start:
                continue  # it was found or written by somebody else meanwhile
            if self.is_listed and each.file.name not in self._unread:
                return  # it gave way meanwhile, and its file is gone
            if self.disk.named(tenant_tag(namespace.tenant), each.file.name) is not None:
                return  # it was dropped with what it followed, and its file goes
            segment = self.tree.add(namespace, path, each.tokens, each.spans)
            self._unread.pop(segment.content.name)
            self._listing.note_found(segment.content.file_id)
            if not self._has_room_on_disk(
                segment.content.num_bytes, _KNOWN_FILE_BYTES + segment.content.tokens.nbytes
            ):
                self.tree.remove(segment)
                self._remove_file(segment)
                return
            segment.on_disk, segment.used_ns = True, used_ns - index
            self.disk.add(segment)
