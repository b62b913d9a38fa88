"""`SegmentFiles`: segments of KV on disk, one file each, never changed.

Files are written under a random name, synced and renamed, and the directory synced: a crash leaves
a whole file or none. Nothing is opened through a link, and what is not ours is left alone. See
`runner.segment_format` for what is in a file.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.tiers.segment import chain_after
from cache.types import PoolName, Tokens
from session_server.core.kv_place import KV_REFUSED
from session_server.core.tier_orders import DroppedPath, FileKey, FoundFile
from session_server.runner.kv_directory import (
    NEW,
    OWNER,
    SEGMENT,
    SUFFIX,
    UNFINISHED,
    claim,
    made_directory,
    open_directory,
    remove_files,
    room_left,
    set_aside,
)
from session_server.runner.segment_format import (
    MAX_FILE_BYTES,
    FileRefused,
    Header,
    Layout,
    SegmentFile,
    TensorPlace,
    part_name,
)

_SHORT_OF: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_MAX_REFUSED: Final = 4
"""Files that did not verify which are kept for whoever wants to know why, until something is
deleted: nobody knows whose they are."""

_LOG: Final = logging.getLogger("session_server.engine")

Payload = Mapping[PoolName, Sequence[NDArray[np.uint8]]]
"""Per pool, the pages of each of its tensors as bytes."""


class OtherFile(FileRefused):
    """Report a file that is as good as the one that was expected, and another one: it stays."""


class FileGone(FileRefused):
    """Report a file that is no longer there."""


class KeptForLog(OSError):
    """Report that the disk has room for a file, and that it is the log's."""


class SegmentFiles:
    """Write, find and read the files of one directory. One thread at a time. Memory for one
    segment is kept. `num_bytes_read`: of all files that were read so far."""

    def __init__(
        self,
        directory: Path | int,
        layout: Layout,
        *,
        statvfs: Callable[[int], os.statvfs_result] = os.fstatvfs,
    ) -> None:
        """Open the directory, which is made if there is none, or take over one that is open.
        `statvfs`: of its descriptor.

        Raises:
            OSError: it cannot be used.
        """
        if isinstance(directory, Path):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory = open_directory(directory)
        self._directory, self._refused = opened(directory)
        self._layout, self._statvfs = layout, statvfs
        self._is_claimed = False
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        """What the times of files say when the engine's clock says 0."""

        self._stuck: set[str] = set()
        """Files that could not be removed."""

        self._is_cleared = True
        """Whether nothing is left of what `remove_all` was to remove."""

        self._has_warned = self._is_short = False
        self._memory = np.empty(0, np.uint8)
        self.num_bytes_read = 0

    def write(self, segment: FoundFile, payload: Payload, used_ns: int) -> None:
        """Write a segment that was used last at `used_ns` of the engine's clock. Returns once it is
        on disk.

        Raises:
            OSError: it is not, and no file has its name. With a code of `NO_ROOM` if there is none.
            KeptForLog: the log would have too little left.
        """
        data: dict[str, NDArray[Any]] = {"tokens": np.ascontiguousarray(segment.tokens, "<i4")}
        for pool, arrays in payload.items():
            for index, array in enumerate(arrays):
                data[part_name(pool, index)] = array
        checks = {name: self._layout.checks_of(array) for name, array in data.items()}
        header = self._layout.header(segment.file, len(segment.tokens), segment.spans, checks)
        num_bytes = len(header.text) + sum(array.nbytes for array in data.values())
        if num_bytes > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"a segment of {num_bytes} bytes")
        self._claim()
        self._take_room(num_bytes)
        temporary, name = NEW + secrets.token_hex(8), file_name(segment.file.file_id)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, 0o600, dir_fd=self._directory)
        try:
            try:
                _write_all(descriptor, memoryview(header.text))
                for array in data.values():
                    _write_all(descriptor, array.reshape(-1).view(np.uint8).data)
                self._set_used(descriptor, used_ns)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._rename(temporary, name)
            os.fsync(self._directory)
            self._stuck.discard(name)
        except BaseException:
            # One that is renamed and may be gone after a crash would be counted by nobody.
            self._unlink(temporary)
            self._unlink(name)
            raise

    def _rename(self, temporary: str, name: str) -> None:
        try:
            os.rename(temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except IsADirectoryError:
            set_aside(name, self._directory)
            os.rename(temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def _take_room(self, num_bytes: int) -> None:
        room = self.room()
        if room is not None and room < num_bytes:
            raise KeptForLog(errno.ENOSPC, "what the disk has left is kept for the log")

    def room(self) -> int | None:
        """Return the bytes that files may still take, below 0 what of them has to go; None if the
        disk does not say."""
        try:
            room = room_left(self._statvfs(self._directory))
        except OSError:
            return None
        is_short = room is not None and room < 0
        if is_short and not self._is_short:
            _LOG.warning("the disk has too little room left, and files of KV give way to the log")
        self._is_short = is_short
        return room

    def find(self, key: FileKey, tokens: Tokens) -> tuple[list[FoundFile], bool]:
        """Return what the files hold of `tokens` from `key.start` on, in order of the path, as far
        as their headers and tokens can be read and verify; and whether one was put aside that did
        not.

        Raises:
            OSError: one could not be looked at now. It stays.
        """
        found, page_size = list[FoundFile](), self._layout.page_size
        end = len(tokens) - len(tokens) % page_size
        while key.start < end:
            try:
                with self._opened(key) as (file, header):
                    each = FoundFile(key, self._layout.tokens(file, key, header), header.spans)
            except FileNotFoundError:
                break
            except (FileRefused, OSError) as error:
                self._refuse(key.file_id, error)
                return found, True
            found.append(each)
            rest = tokens[key.start : end]
            num_common = min(len(rest), len(each.tokens))
            differs = np.flatnonzero(each.tokens[:num_common] != rest[:num_common])
            if len(differs):
                num_common = int(differs[0]) // page_size * page_size
            chain = chain_after(key.chain, each.tokens[:num_common], page_size)
            start = key.start + num_common
            if start >= end:
                break
            name = chain_after(chain, tokens[start : start + page_size], page_size)
            key = FileKey(name, key.namespace, chain, start)
        return found, False

    def read(self, expected: FoundFile) -> Payload:
        """Read the pages of a segment: all of them, because a checksum is that of many. They are
        there until the next call.

        Raises:
            FileRefused: the file is not the one that was written or found, or cannot be read, and
                is put aside; `FileGone` where there is none.
            OSError: it could not be looked at now.
        """
        key = expected.file
        try:
            with self._opened(key) as (file, header):
                if header.spans != expected.spans:
                    raise OtherFile("it has other pages than when it was found")
                if not np.array_equal(self._layout.tokens(file, key, header), expected.tokens):
                    raise OtherFile("it has other tokens than when it was found")
                places = {
                    pool: [header.parts[part_name(pool, n)] for n in range(len(layout.shapes))]
                    for pool, layout in self._layout.pools.items()
                }
                checks_of = self._layout.checks_of
                memory = self._memory_for(each for of_pool in places.values() for each in of_pool)
                self.num_bytes_read += file.num_bytes
                return {
                    pool: [file.part(each, checks_of, next(memory)) for each in of_pool]
                    for pool, of_pool in places.items()
                }
        except FileNotFoundError as error:
            raise FileGone("it is gone") from error
        except FileRefused as error:
            self._refuse(key.file_id, error)
            raise
        except OSError as error:
            self._refuse(key.file_id, error)
            raise FileRefused(str(error)) from error

    def touch(self, file_ids: Sequence[bytes], used_ns: int) -> None:
        """Note that files were used at `used_ns` of the engine's clock, the first of them last."""
        for age_ns, file_id in enumerate(file_ids):
            self._set_used(file_name(file_id), used_ns - age_ns)

    def remove(self, file_ids: Sequence[bytes]) -> None:
        """Remove files, those that are there; see `erase`."""
        for file_id in file_ids:
            self._unlink(file_name(file_id))

    def remove_all(self) -> None:
        """Remove every file of a segment, and those that were put aside.

        Raises:
            OSError: the disk does not answer.
        """
        self._is_claimed = self._is_cleared = False
        remove_files(self._directory)
        self._is_cleared = True
        self._stuck.clear()

    def erase(self) -> bool:
        """Have what was removed gone for good, also if the power fails now, and with it what was
        put aside; return False where something is still there."""
        try:
            if not self._is_cleared:
                self.remove_all()
            for name in tuple(self._stuck):
                with contextlib.suppress(FileNotFoundError):
                    self._unlink_now(name)
                self._stuck.discard(name)
            self._keep_refused(0)
            for directory in (self._refused, self._directory):
                os.fsync(directory)
        except OSError as error:
            self._warn(error)
            return False
        self._has_warned = False
        return True

    def listing(self, max_files: int) -> list[tuple[bytes, int]]:
        """Return the id and size of every file, those used longest ago first. Remove what a crash
        has left unfinished, what is of another layout, and of more than `max_files` those used
        longest ago.

        Raises:
            OSError: the disk does not answer.
        """
        self._claim()
        files: list[tuple[int, bytes, int]] = []
        num_foreign, foreign = 0, ""
        for entry in self._entries():
            match = SEGMENT.fullmatch(entry.name)
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if match is not None and stat.S_ISREG(status.st_mode):
                    file_id = bytes.fromhex(match[1])
                    heapq.heappush(files, (status.st_mtime_ns, file_id, status.st_size))
                    if len(files) > max_files:
                        self._unlink(file_name(heapq.heappop(files)[1]))
                elif UNFINISHED.fullmatch(entry.name):
                    self._unlink(entry.name)
                else:
                    num_foreign, foreign = num_foreign + 1, entry.name
        if num_foreign:
            _LOG.warning("the files of KV have %d others beside them: %r", num_foreign, foreign)
        files.sort()
        return [(file_id, size) for _, file_id, size in files]

    def drop(self, _paths: Sequence[DroppedPath]) -> bool:
        """Remove what others may have written of some histories: nobody has, of this directory.
        Returns whether that is done; see `SharedFiles.drop`."""
        return True

    def _claim(self) -> None:
        """Remove what was written of another model or otherwise, before anything is added."""
        if not self._is_claimed and (
            num_removed := claim(self._directory, self._layout.fingerprint)
        ):
            _LOG.info("removed %d files of KV that are of another model or setting", num_removed)
        self._is_claimed = True

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._directory) as entries:
            yield from (entry for entry in entries if entry.name not in (KV_REFUSED, OWNER))

    def _set_used(self, file: str | int, used_ns: int) -> None:
        """Have the time of a file, by its name or open, say when it was used: the place of files
        whose time cannot be set is that of when they were written."""
        times = (self._epoch_ns + used_ns,) * 2
        with contextlib.suppress(OSError):
            if isinstance(file, int):
                os.utime(file, ns=times)
            else:
                os.utime(file, ns=times, dir_fd=self._directory, follow_symlinks=False)

    def _unlink(self, name: str) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                self._unlink_now(name)
        except OSError as error:
            self._stuck.add(name)
            self._warn(error)

    def _unlink_now(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._directory)
        except IsADirectoryError:
            set_aside(name, self._directory)

    def _warn(self, error: OSError) -> None:
        """Log, once until all of them are gone, that files cannot be removed."""
        if not self._has_warned:
            _LOG.warning("files of KV cannot be removed, and take room uncounted: %s", error)
        self._has_warned = True

    def _refuse(self, file_id: bytes, why: Exception) -> None:
        """Put a file aside, in place of the one that was put aside longest ago; raise `why` where
        that has nothing to do with the file."""
        if isinstance(why, OSError) and why.errno in _SHORT_OF:
            raise why
        _LOG.warning("a file of KV is not used: %s", why)
        text = file_name(file_id)
        try:
            os.rename(text, text, src_dir_fd=self._directory, dst_dir_fd=self._refused)
        except OSError:
            self._unlink(text)
        with contextlib.suppress(OSError):
            self._keep_refused(_MAX_REFUSED)

    def _keep_refused(self, num_kept: int) -> None:
        """Remove all files that were put aside but the last ones. Raises OSError."""
        ages = []
        with os.scandir(self._refused) as entries:
            for entry in entries:
                is_ours = SEGMENT.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
                if is_ours:
                    ages.append((entry.stat(follow_symlinks=False).st_ctime_ns, entry.name))
        for _, old in sorted(ages)[: max(0, len(ages) - num_kept)]:
            os.unlink(old, dir_fd=self._refused)

    def _is_left_out(self, _file_id: bytes, _descriptor: int) -> bool:
        """Return whether an open file counts as gone."""
        return False

    def _memory_for(self, places: Iterable[TensorPlace]) -> Iterator[NDArray[np.uint8]]:
        """Yield memory for each of these. It is that of the last read: to touch fresh memory for
        the first time takes longer than to read what goes there."""
        sizes = [place.num_bytes for place in places]
        if sum(sizes) > len(self._memory):
            self._memory = np.empty(sum(sizes), np.uint8)
        at = 0
        for size in sizes:
            yield self._memory[at : at + size]
            at += size

    @contextlib.contextmanager
    def _opened(self, key: FileKey) -> Iterator[tuple[SegmentFile, Header]]:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(file_name(key.file_id), flags, dir_fd=self._directory)
        try:
            if self._is_left_out(key.file_id, descriptor):
                raise FileNotFoundError(errno.ENOENT, "it is about to be removed")
            file = SegmentFile(descriptor)
            yield file, self._layout.verify(file, key)
        finally:
            os.close(descriptor)


def opened(directory: int) -> tuple[int, int]:
    """Return an open directory, and that of what is put aside in it.

    Raises:
        OSError: it cannot be used, and is closed.
    """
    try:
        return directory, made_directory(KV_REFUSED, directory)
    except OSError:
        os.close(directory)
        raise


def file_name(file_id: bytes) -> str:
    """Return the name of a segment's file; see `SegmentContent.file_id`."""
    return file_id.hex() + SUFFIX


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]
