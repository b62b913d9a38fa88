"""`CheckpointFiles`: the files that a model is loaded from, and a hash of all their bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from session_server.models.errors import CheckpointError
from session_server.models.files import find_files, opened
from session_server.models.hub import DOWNLOADED_FILES

PIECE_BYTES: Final = 64 << 20
"""Bytes of a file that one thread hashes at a time."""

MAX_THREADS: Final = 32
"""Threads that hash, one for each processor: the disk gives no more than these take."""

_READ_BYTES: Final = 1 << 20
"""Bytes that are read at a time, into memory that a processor's cache holds."""


class _State(NamedTuple):
    """Tell whether a file is still the one that it was."""

    name: str
    num_bytes: int
    changed_ns: int
    inode: int


class CheckpointFiles:
    """Name the files of a checkpoint as they are now. `num_bytes`: of all of them."""

    def __init__(self, path: Path) -> None:
        """Take a directory, or a GGUF file.

        Raises:
            CheckpointError: a file is not a regular file of the directory.
        """
        self._path = path
        self._states = self._look()
        self.num_bytes = sum(state.num_bytes for state in self._states)

    def digest(self) -> str:
        """Return the sha256 of every byte: weights, configuration and tokenizer. It is computed
        anew each time, and on all processors.

        Servers may share KV only if it is equal. Nothing less will do: weights that were trained
        further differ anywhere. What the directory or a GGUF file is called has no part in it.

        Raises:
            CheckpointError: a file cannot be read, or is not the one that it was when this was
                made, so that what was loaded may be neither.
        """
        is_one_file = self._path.is_file()
        told = [("" if is_one_file else each.name, each.num_bytes) for each in self._states]
        pieces = [
            (self._path_of(each), at)
            for each in self._states
            for at in range(0, each.num_bytes, PIECE_BYTES)
        ]
        digest = hashlib.sha256(json.dumps(told).encode())
        num_threads = min(os.cpu_count() or 1, MAX_THREADS)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="checkpoint-hash") as threads:
            for of_piece in threads.map(_piece_digest, pieces):
                digest.update(of_piece)
        if self._look() != self._states:
            raise CheckpointError(f"{self._path} was changed while it was read: start again")
        return digest.hexdigest()

    def _look(self) -> Sequence[_State]:
        if self._path.is_file():
            paths = [self._path]
        else:
            paths = [p for each in DOWNLOADED_FILES for p in find_files(self._path, each)]
        found = [(path.name, path.stat()) for path in paths]
        return [_State(name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in found]

    def _path_of(self, state: _State) -> Path:
        return self._path if self._path.is_file() else self._path / state.name


def _piece_digest(piece: tuple[Path, int]) -> bytes:
    """Return the hash of a piece of a file: its path, and where the piece begins."""
    path, start = piece
    digest, memory = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with opened(path) as file:
        at, end = start, start + PIECE_BYTES
        while at < end and (count := os.preadv(file.fileno(), [memory[: end - at]], at)):
            digest.update(memory[:count])
            at += count
    return digest.digest()
