"""`StoreLock`: a store has one server, or one command that changes it, or commands that read it."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final, Self, TypeVar

from session_server.sessions.store.directories import make_directory, sync_above

_logger: Final = logging.getLogger("session_server.store")

READERS_WAIT_S: Final = 30.0
"""How long a server waits for commands that read its store."""

_LOOK_S: Final = 0.25

_OpenT = TypeVar("_OpenT")

_MADE: Final = b"sessions were kept here\n"
"""What the file says once a store was made beside it: a database without content has lost it."""


class StoreUnusable(Exception):
    """Report a store that this server cannot open; the message says what to do."""


class StoreIsRead(StoreUnusable):
    """Report a store that a command reads: it can be opened once that is over."""


async def once_unread(open_store: Callable[[], _OpenT]) -> _OpenT:
    """Open a store once no command reads it. Raises what `open_store` raises: StoreIsRead if that
    takes longer than `READERS_WAIT_S`."""
    for number in range(round(READERS_WAIT_S / _LOOK_S)):
        try:
            return open_store()
        except StoreIsRead as error:
            if number == 0:
                _logger.warning("waiting for %d s at most: %s", READERS_WAIT_S, error)
        await asyncio.sleep(_LOOK_S)
    return open_store()


class StoreLock:
    """Hold the lock of a store, which is a file beside the database. Whoever changes the store has
    it alone; those who read share it, so that nobody begins to change it meanwhile."""

    NAME: ClassVar = "lock"

    def __init__(self, path: Path, fd: int | None) -> None:
        self._path, self._fd = path, fd

    @classmethod
    def alone(cls, directory: Path) -> Self:
        """Make the directory, and lock it for this process alone.

        Raises:
            StoreIsRead: commands read it.
            StoreUnusable: another process changes it, or it cannot be used.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            make_directory(directory)
            sync_above(directory.resolve())
            fd = os.open(directory / cls.NAME, flags, 0o600)
        except OSError as error:
            raise StoreUnusable(f"--store {directory}: {error}") from error
        if _try(fd, fcntl.LOCK_EX):
            return cls(directory / cls.NAME, fd)
        # Who can share it is kept from it by those who share it, or by nobody any more.
        is_shared = _try(fd, fcntl.LOCK_SH)
        os.close(fd)
        if is_shared:
            raise StoreIsRead(f"--store {directory}: a command reads it, such as doctor --store")
        raise StoreUnusable(
            f"--store {directory}: another server has it open, or a command that changes it; pass "
            "another directory, or stop that server"
        )

    @classmethod
    def shared(cls, directory: Path) -> Self:
        """Keep a store from being changed while it is read; one that is changed already, or has no
        lock, is not locked. Raises StoreUnusable."""
        path = directory / cls.NAME
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return cls(path, None)
        except OSError as error:
            raise StoreUnusable(f"--store {directory}: {error}") from error
        if _try(fd, fcntl.LOCK_SH):
            return cls(path, fd)
        os.close(fd)
        return cls(path, None)

    @property
    def is_anothers(self) -> bool:
        """Return whether another process may change the store meanwhile."""
        return self._fd is None and self._path.exists()

    @property
    def says_made(self) -> bool:
        """Return whether a store was made here, as far as the holder of the lock can say."""
        return self._fd is not None and os.fstat(self._fd).st_size > 0

    def say_made(self) -> None:
        """Have it on disk that a store was made here."""
        assert self._fd is not None, "who has not locked a store has not made it"
        os.write(self._fd, _MADE)
        os.fsync(self._fd)

    def release(self) -> None:
        """Let others have the store; does nothing the second time."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _try(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
