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
from session_server.sessions.store.disk_health import explain
from session_server.sessions.store.open_files import LOCK_NAME, check_kinds

_logger: Final = logging.getLogger("session_server.store")

COMMANDS_WAIT_S: Final = 30.0
"""How long a server waits for commands that have its store open."""

_LOOK_S: Final = 0.25

_OpenT = TypeVar("_OpenT")

_MADE: Final = b"sessions were kept here\n"
"""What the file says once a store was made beside it: a database without content has lost it."""


class StoreUnusable(Exception):
    """Report a store that this server cannot open; the message says what to do."""


class StoreAway(StoreUnusable):
    """Report a database that cannot be reached now, as one that starts at the same time."""


class StoreIsBusy(StoreUnusable):
    """Report a store that a command reads or changes: it can be opened once that is over."""


class StoreIsServed(StoreUnusable):
    """Report a store that a server has open: nobody waits for that."""


def refusal(directory: Path, error: Exception) -> StoreUnusable:
    """Return what to raise of a store that could not be opened."""
    advice = "; pass a --store that it can write" if isinstance(error, PermissionError) else ""
    return StoreUnusable(f"--store {directory}: {explain(error, directory)}{advice}")


async def once_free(open_store: Callable[[], _OpenT]) -> _OpenT:
    """Open a store once no command has it open. Raises what `open_store` raises: StoreIsBusy if
    that takes longer than `COMMANDS_WAIT_S`."""
    for number in range(int(COMMANDS_WAIT_S / _LOOK_S)):
        try:
            return open_store()
        except StoreIsBusy as error:
            if number == 0:
                _logger.warning("waiting for %d s at most: %s", COMMANDS_WAIT_S, error)
        await asyncio.sleep(_LOOK_S)
    return open_store()


class StoreLock:
    """Hold the lock of a store, which is a file beside the database. Whoever changes the store has
    it alone; those who read share it, so that nobody begins to change it meanwhile. A server locks
    the directory too, so that another one can tell it from a command."""

    NAME: ClassVar = LOCK_NAME

    def __init__(self, path: Path, *fds: int) -> None:
        self._path, self._fds = path, [*fds]
        """Of the lock and the directory; none where another process has the lock."""

    @classmethod
    def alone(cls, directory: Path) -> Self:
        """Make the directory, and lock it for this process alone.

        Raises:
            StoreIsBusy: a command has it open.
            StoreIsServed: a server has it open.
            StoreUnusable: it cannot be used.
        """
        lock, flags = cls(directory / cls.NAME), os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            make_directory(directory)
            sync_above(directory.resolve())
            check_kinds(directory)
            lock._fds.append(os.open(lock._path, flags | os.O_RDWR | os.O_CREAT, 0o600))
            lock._fds.append(os.open(directory, os.O_CLOEXEC | os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            lock.release()
            raise refusal(directory, error) from error
        if _try(lock._fds[0], fcntl.LOCK_EX):
            return lock
        is_served = not _try(lock._fds[1], fcntl.LOCK_SH)
        lock.release()
        if not is_served:
            raise StoreIsBusy(
                f"--store {directory}: a command has it open, such as doctor or sessions vacuum"
            )
        raise StoreIsServed(
            f"--store {directory}: another server has it open; pass another directory, or stop "
            "that server"
        )

    @classmethod
    def shared(cls, directory: Path) -> Self:
        """Keep a store from being changed while it is read; one that is changed already, or has no
        lock, is not locked. Raises StoreUnusable."""
        path = directory / cls.NAME
        try:
            check_kinds(directory)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return cls(path)
        except OSError as error:
            raise refusal(directory, error) from error
        if _try(fd, fcntl.LOCK_SH):
            return cls(path, fd)
        os.close(fd)
        return cls(path)

    def serve(self) -> None:
        """Say that who has the store alone is a server, for which nobody waits. Raises StoreIsBusy
        if a program of somebody else's has locked the directory, as some do that copy it."""
        if not _try(self._fds[1], fcntl.LOCK_EX):
            directory = self._path.parent
            raise StoreIsBusy(f"--store {directory}: another program has locked this directory")

    @property
    def is_anothers(self) -> bool:
        """Return whether another process may change the store meanwhile."""
        return not self._fds and self._path.exists()

    @property
    def says_made(self) -> bool:
        """Return whether a store was made here, as far as the holder of the lock can say."""
        return bool(self._fds) and os.fstat(self._fds[0]).st_size > 0

    def say_made(self) -> None:
        """Have it on disk that a store was made here."""
        os.write(self._fds[0], _MADE)
        os.fsync(self._fds[0])

    def release(self) -> None:
        """Let others have the store; does nothing the second time."""
        while self._fds:
            os.close(self._fds.pop())


def _try(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
