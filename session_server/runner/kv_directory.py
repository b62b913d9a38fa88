"""The directory that files of KV lie in: whose they are, and how all of them go.

A file is found, and removed with the sessions that it is of, by a name that follows from their
tokens and from the model. So files that another model has written, or a server that keeps none any
more, would stay for good, and anybody who can read them can tell what was said.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
from pathlib import Path
from typing import Final

from cache.tiers.segment import NAME_BYTES, TAG_BYTES
from session_server.core.kv_place import KV_REFUSED

SUFFIX: Final = ".safetensors"
NEW: Final = "new-"
OWNER: Final = "layout"
"""The file that says whose files these are: the fingerprint of their layout."""

RESERVE_BYTES: Final = 1 << 30
"""Free bytes of the disk that files of KV leave to the log, which lies beside them."""

RESERVE_DIVISOR: Final = 8
"""Part of a small disk that is as good as that."""

_DIGITS: Final = 4 * NAME_BYTES, 4 * NAME_BYTES + 2 * TAG_BYTES
SEGMENT: Final = re.compile(f"([0-9a-f]{{{_DIGITS[1]}}}){re.escape(SUFFIX)}", re.ASCII)
_FORMER: Final = re.compile(f"[0-9a-f]{{{_DIGITS[0]}}}{re.escape(SUFFIX)}", re.ASCII)
"""A file that does not say whose it is, as builds before wrote them."""

UNFINISHED: Final = re.compile(f"{NEW}[0-9a-f]{{16}}", re.ASCII)

_ODD: Final = "odd-"
_NO_DIRECTORY: Final = (errno.ENOTDIR, errno.ELOOP)

_LOG: Final = logging.getLogger("session_server.engine")


def open_directory(path: Path | str, directory: int | None = None) -> int:
    """Open a directory, which only its owner may look into from now on."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        os.fchmod(descriptor, 0o700)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def made_directory(name: str, directory: int) -> int:
    """Make a directory in another one unless it is there, and open it. What has its name and is
    none is set aside.

    Raises:
        OSError: it cannot be used.
    """
    try:
        return _made_directory(name, directory)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY:
            raise
    set_aside(name, directory)
    return _made_directory(name, directory)


def _made_directory(name: str, directory: int) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=directory)
    return open_directory(name, directory)


def set_aside(name: str, directory: int) -> None:
    """Give another name to what only has a name of ours, and let it be.

    Raises:
        OSError: the disk does not do it.
    """
    other = _ODD + secrets.token_hex(8)
    with contextlib.suppress(FileNotFoundError):  # somebody else has done it
        os.rename(name, other, src_dir_fd=directory, dst_dir_fd=directory)
        _LOG.warning("%s among files of KV was none of ours, and is called %s now", name, other)


def room_left(status: os.statvfs_result) -> int | None:
    """Return the bytes that files of KV may still take of a disk, below 0 what of them has to go;
    None if it does not say."""
    num_bytes = status.f_blocks * status.f_frsize
    reserve = min(RESERVE_BYTES, num_bytes // RESERVE_DIVISOR)
    return status.f_bavail * status.f_frsize - reserve if num_bytes else None


def claim(directory: int, fingerprint: str) -> int:
    """Make a directory that of a layout: remove all files if it was that of another one, or of
    nobody. Returns how many.

    Raises:
        OSError: the disk does not do it.
    """
    if _owner(directory) == fingerprint.encode():
        return 0
    num_removed = remove_files(directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(OWNER, flags, 0o600, dir_fd=directory)
    try:
        os.write(descriptor, fingerprint.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.fsync(directory)
    return num_removed


def remove_left(path: Path) -> int:
    """Remove all files from a directory that nobody uses, and return how many there were.

    Raises:
        OSError: the disk does not do it.
    """
    try:
        directory = open_directory(path)
    except FileNotFoundError:
        return 0
    try:
        return remove_files(directory)
    finally:
        os.close(directory)


def remove_files(directory: int) -> int:
    """Remove every file of KV and those that were put aside, one by one, and return how many. What
    is interrupted is done by whoever comes next: the directory is nobody's from the beginning on.

    Raises:
        OSError: the disk does not do it.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(OWNER, dir_fd=directory)
        os.fsync(directory)
    num_removed = _unlink_all(directory)
    with contextlib.suppress(FileNotFoundError):
        refused = open_directory(KV_REFUSED, directory)
        try:
            num_removed += _unlink_all(refused)
        finally:
            os.close(refused)
    os.fsync(directory)
    return num_removed


def _unlink_all(directory: int) -> int:
    num_removed, is_whole = 0, False
    while not is_whole:  # a directory from which names go while it is read may leave some out
        is_whole = True
        with os.scandir(directory) as entries:
            for entry in entries:
                kinds = SEGMENT, _FORMER, UNFINISHED
                is_ours = any(kind.fullmatch(entry.name) for kind in kinds)
                if is_ours and not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=directory)
                    num_removed, is_whole = num_removed + 1, False
    return num_removed


def _owner(directory: int) -> bytes | None:
    try:
        descriptor = os.open(OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except OSError:
        return None
    try:
        return os.read(descriptor, 1 << 10)
    except OSError:
        return None
    finally:
        os.close(descriptor)
