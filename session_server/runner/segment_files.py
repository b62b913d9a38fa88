"""`SegmentFiles`: segments of KV on disk, one file each, never changed.

Files are written under a random name, synced and renamed, and the directory synced: a crash leaves
a whole file or none. Nothing is opened through a link. See `runner.segment_format` for what is in
one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.tiers.segment import NAME_BYTES, chain_after
from cache.types import PoolName, Tokens
from session_server.core.tier_orders import FileKey, FoundFile
from session_server.runner.segment_format import (
    FileRefused,
    Header,
    Layout,
    SegmentFile,
    checks_of,
    part_name,
)

_MAX_REFUSED: Final = 4
"""Files that did not verify which are kept for whoever wants to know why."""

_SUFFIX: Final = ".safetensors"
_REFUSED: Final = "refused"
_NEW: Final = "new-"
_HEX: Final = frozenset("0123456789abcdef")

Payload = Mapping[PoolName, Sequence[NDArray[np.uint8]]]
"""Per pool, the pages of each of its tensors as bytes."""


class SegmentFiles:
    """Write, find and read the files of one directory. One thread at a time."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        """Open the directory, which is made if there is none.

        Raises:
            OSError: it cannot be used.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        self._directory = os.open(directory, flags)
        os.fchmod(self._directory, 0o700)
        with contextlib.suppress(FileExistsError):
            os.mkdir(_REFUSED, 0o700, dir_fd=self._directory)
        self._layout = layout

    def write(
        self,
        key: FileKey,
        tokens: Tokens,
        spans: Mapping[PoolName, tuple[int, int]],
        payload: Payload,
    ) -> None:
        """Write a segment. Returns once it is on disk.

        Raises:
            OSError: it is not.
        """
        data: dict[str, NDArray[Any]] = {"tokens": np.ascontiguousarray(tokens, "<i4")}
        for pool, arrays in payload.items():
            for index, array in enumerate(arrays):
                data[part_name(pool, index)] = array
        checks = {name: checks_of(array) for name, array in data.items()}
        header = self._layout.header(key, len(tokens), spans, checks)
        temporary = _NEW + secrets.token_hex(8)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, 0o600, dir_fd=self._directory)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                _write_all(file, memoryview(header.text))
                for array in data.values():
                    _write_all(file, array.reshape(-1).view(np.uint8).data)
                os.fsync(descriptor)
            self._rename(temporary, file_name(key.name))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._directory)
            raise
        os.fsync(self._directory)

    def find(self, key: FileKey, tokens: Tokens) -> list[FoundFile]:
        """Return what the files hold of `tokens` from `key.start` on, in order of the path; as far
        as their headers and tokens verify.

        Raises:
            OSError: the disk does not answer.
        """
        found, page_size = [], self._layout.page_size
        end = len(tokens) - len(tokens) % page_size
        while key.start < end:
            try:
                with self._opened(key) as (file, header):
                    each = FoundFile(key, self._layout.tokens(file, key, header), header.spans)
            except FileNotFoundError:
                break
            except FileRefused:
                self._refuse(key.name)
                break
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
        return found

    def read(self, key: FileKey) -> tuple[FoundFile, Payload]:
        """Read a segment.

        Raises:
            FileRefused: the file is not what it should be, or is gone. One that is there is put
                aside.
            OSError: the disk does not answer.
        """
        try:
            with self._opened(key) as (file, header):
                tokens = self._layout.tokens(file, key, header)
                payload = {
                    pool: [
                        file.part(header.parts[part_name(pool, index)])
                        for index in range(len(layout.shapes))
                    ]
                    for pool, layout in self._layout.pools.items()
                }
        except FileNotFoundError as error:
            raise FileRefused("it is gone") from error
        except FileRefused:
            self._refuse(key.name)
            raise
        return FoundFile(key, tokens, header.spans), payload

    def touch(self, names: Sequence[bytes]) -> None:
        """Note that files were used, the first of them last."""
        for name in reversed(names):
            with contextlib.suppress(OSError):
                os.utime(file_name(name), dir_fd=self._directory, follow_symlinks=False)

    def remove(self, names: Sequence[bytes]) -> None:
        """Remove files, those that are there."""
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(file_name(name), dir_fd=self._directory)

    def remove_all(self) -> None:
        """Remove every file."""
        for entry in self._entries():
            with contextlib.suppress(OSError):
                os.unlink(entry.name, dir_fd=self._directory)

    def listing(self) -> list[tuple[bytes, int]]:
        """Return the name and size of every file, those used longest ago first, and remove what a
        crash has left.

        Raises:
            OSError: the disk does not answer.
        """
        files = []
        for entry in self._entries():
            name = _parsed_name(entry.name)
            status = entry.stat(follow_symlinks=False)
            if name is None or not stat.S_ISREG(status.st_mode):
                os.unlink(entry.name, dir_fd=self._directory)
                continue
            files.append((status.st_mtime_ns, name, status.st_size))
        return [(name, size) for _, name, size in sorted(files)]

    def _entries(self) -> list[os.DirEntry[str]]:
        with os.scandir(self._directory) as entries:
            return [entry for entry in entries if entry.name != _REFUSED]

    def _rename(self, name: str, new_name: str) -> None:
        os.rename(name, new_name, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def _refuse(self, name: bytes) -> None:
        """Put a file aside, in place of the one that was put aside longest ago."""
        with contextlib.suppress(OSError):
            self._rename(file_name(name), f"{_REFUSED}/{file_name(name)}")
            refused = os.open(_REFUSED, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._directory)
            try:
                with os.scandir(refused) as entries:
                    ages = sorted((entry.stat().st_ctime_ns, entry.name) for entry in entries)
                for _, old in ages[:-_MAX_REFUSED]:
                    os.unlink(old, dir_fd=refused)
            finally:
                os.close(refused)

    @contextlib.contextmanager
    def _opened(self, key: FileKey) -> Iterator[tuple[SegmentFile, Header]]:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(file_name(key.name), flags, dir_fd=self._directory)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise FileRefused("it is a link") from error
            raise
        with open(descriptor, "rb", buffering=0) as raw:
            file = SegmentFile(raw)
            yield file, self._layout.verify(file, key)


def file_name(name: bytes) -> str:
    """Return the name of a segment's file."""
    return name.hex() + _SUFFIX


def _parsed_name(text: str) -> bytes | None:
    """Return the name of the segment that a file of this name holds; None if it holds none."""
    stem, suffix = text[: 2 * NAME_BYTES], text[2 * NAME_BYTES :]
    is_name = suffix == _SUFFIX and len(stem) == 2 * NAME_BYTES and set(stem) <= _HEX
    return bytes.fromhex(stem) if is_name else None


def _write_all(file: io.FileIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]
