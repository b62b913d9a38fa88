"""Make directories and files that are for their user alone, and have them on disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

_PIECE_BYTES: Final = 1 << 20


def make_directory(directory: Path) -> None:
    """Make a directory, and those above it, for this user alone, unless they are there. Raises
    OSError."""
    if not directory.is_dir():
        make_directory(directory.parent)
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            told = "is a file, not a directory"
            raise NotADirectoryError(errno.ENOTDIR, told, error.filename) from error


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_above(directory: Path) -> None:
    """Have the name of a directory on disk, and those of the ones that it is in: whoever has made
    one of them may have been killed before that."""
    device = directory.stat().st_dev
    for parent in directory.parents:
        if parent.stat().st_dev != device:
            return
        # Where that is not permitted the user who runs this has made nothing.
        with contextlib.suppress(PermissionError):
            sync_directory(parent)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Make a file for this user alone, and have what the block writes there on disk; where it
    cannot all be written, no file is left. Raises FileExistsError, OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
        sync_directory(path.parent)
    except BaseException as error:
        path.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_again(path: Path, num_bytes: int) -> None:
    """Have so many bytes of a file on disk as they are, if it is there. What a process that was
    killed had written may be in the system's memory alone, and to sync it is not enough: that says
    nothing of what an earlier sync could not write. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        offset = 0
        while piece := os.pread(fd, min(_PIECE_BYTES, num_bytes - offset), offset):
            offset += os.pwrite(fd, piece, offset)
        os.fsync(fd)
    finally:
        os.close(fd)
