"""`Deletions`: delete sessions of a store, long ones in parts, and say what that has freed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Final, Protocol

from session_server.sessions.store.backend import StoreVerbs
from session_server.sessions.store.deleted_rows import Freed
from session_server.sessions.store.ownership import NotOurs
from session_server.sessions.store.records import Holding
from session_server.sessions.store.writer import Told, Write, tell_nobody

MAX_RETIRED_BYTES: Final = 64 << 20
"""Of an owner's sessions that are deleted and whose tokens the engine was not told yet. Others are
deleted at once, and their KV ages out."""

RETRIED_AT_ONCE: Final = 64
"""Sessions that are deleted again once that has failed, while the disk does not fail."""


class Ask(Protocol):
    """Have something written, before what is asked for next, or some time behind it."""

    def __call__(self, write: Write, written: Told, told: Told, *, is_urgent: bool) -> None:
        """`written` is called when it is done, or has failed, and `told` then, or earlier where the
        disk does not answer."""
        ...


class Deletions:
    """Delete sessions by their numbers. `on_freed`: told of the bytes that an owner has less on
    disk."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.on_freed: Callable[[str, int], object] = lambda _owner_id, _num_bytes: None
        self.hidden: set[int] = set()
        """Sessions that are being deleted: they may still be found on disk."""

        self._begun: set[int] = set()
        """Those of them that are found by their numbers alone, because a part of them is gone."""

        self._failed: dict[int, Callable[[], None]] = {}
        """Those of them that could not be deleted yet."""

        self._told_late: dict[int, Told] = {}
        """Who was told of those, and has to know if they are refused after all."""

        self._retired_bytes: Counter[str] = Counter()
        self._expected: dict[int, int] = {}
        """What those have that are to be retired, as it was when that was asked for."""

    def is_gone(self, number: int | None) -> bool:
        """Return whether it is on disk that a session was deleted, unless that was refused; None is
        that of none."""
        return number not in self.hidden or number in self._begun

    @property
    def num_failed(self) -> int:
        """Return the sessions that are to be deleted, and could not be."""
        return len(self._failed)

    def count(self, holdings: Iterable[Holding]) -> None:
        """Count what was retired by an earlier process."""
        for holding in holdings:
            self._count_retired(holding.owner_id, holding.num_retired)

    def delete(
        self,
        number: int,
        told: Told = tell_nobody,
        *,
        epoch: int | None = None,
        is_urgent: bool = True,
    ) -> None:
        """Delete a session as it is in an epoch, None: in any. From now on it is not found; `told`
        once that is on disk, or cannot be: of a long one that is deleted in parts once the first
        part is gone, which hides it, and if it is not urgent once all of it is. One that is urgent
        is tried again; `told` once more if that is refused."""
        found: list[Freed | None] = []

        def write(database: StoreVerbs) -> None:
            found[:] = [database.delete_some(number, epoch)]

        def on_written(error: Exception | None) -> None:
            freed = found[0] if error is None else None
            if freed is not None:
                self._count_retired(freed.owner_id, -freed.num_retired)
                self.on_freed(freed.owner_id, freed.num_bytes)
            if freed is not None and not freed.is_gone:
                self._begun.add(number)
                self.delete(number, tell_nobody if is_urgent else told, is_urgent=False)
            elif error is None:
                self._begun.discard(number)

        def on_told(error: Exception | None) -> None:
            is_over = error is not None or found[0] is None or found[0].is_gone
            if is_over or is_urgent:
                told(error)

        again = partial(self.delete, number, epoch=epoch)
        self._end(number, write, (on_written, on_told), again, is_urgent=is_urgent)

    def retire(
        self,
        number: int,
        owner_id: str,
        num_bytes: int,
        told: Told = tell_nobody,
        *,
        epoch: int | None = None,
        is_urgent: bool = True,
    ) -> None:
        """Delete a session of so many bytes whose tokens are still to be read: from now on it is
        not found, and once that is on disk it is one that has expired; `told` as in `delete`. Where
        its owner has too many such it is deleted."""
        if self._retired_bytes[owner_id] + num_bytes > MAX_RETIRED_BYTES:
            self.delete(number, told, epoch=epoch, is_urgent=is_urgent)
            return
        # Once, however often it is asked for: what could not be retired yet is asked for again.
        self._retired_bytes[owner_id] += num_bytes
        self._expected[number] = num_bytes
        self._retire(number, owner_id, told, epoch=epoch, is_urgent=is_urgent)

    def _retire(
        self,
        number: int,
        owner_id: str,
        told: Told = tell_nobody,
        *,
        epoch: int | None,
        is_urgent: bool = True,
    ) -> None:
        found = [0]

        def write(database: StoreVerbs) -> None:
            found[:] = [database.retire(number, epoch)]

        def on_written(error: Exception | None) -> None:
            is_over = error is None or isinstance(error, NotOurs)
            expected = self._expected.pop(number, None) if is_over else None
            if expected is not None:  # what was being written meanwhile may be more or less
                num_retired = found[0] if error is None else 0
                self._count_retired(owner_id, num_retired - expected)

        again = partial(self._retire, number, owner_id, epoch=epoch)
        self._end(number, write, (on_written, told), again, is_urgent=is_urgent)

    def retry(self, *, is_failing: bool) -> None:
        """Delete what could not be deleted: one session while the disk fails, or else more."""
        for number in list(islice(self._failed, 1 if is_failing else RETRIED_AT_ONCE)):
            self._failed.pop(number)()

    def _end(
        self,
        number: int,
        write: Write,
        whom: tuple[Told, Told],
        again: Callable[[], None],
        *,
        is_urgent: bool,
    ) -> None:
        self.hidden.add(number)
        on_written, on_told = whom

        def written(error: Exception | None) -> None:
            if error is None:
                self.hidden.discard(number)
                self._failed.pop(number, None)
                self._told_late.pop(number, None)
            on_written(error)

        def told(error: Exception | None) -> None:
            if isinstance(error, NotOurs):  # whoever holds it deletes it, or lets it live
                self.hidden.discard(number)
                self._begun.discard(number)
                self._told_late.pop(number, tell_nobody)(error)
            elif error is not None:
                self._failed[number] = again
                if is_urgent:
                    self._told_late.setdefault(number, on_told)
            on_told(error)

        self._ask(write, written, told, is_urgent=is_urgent)

    def _count_retired(self, owner_id: str, num_bytes: int) -> None:
        held = max(0, self._retired_bytes[owner_id] + num_bytes)
        self._retired_bytes[owner_id] = held
        if not held:
            del self._retired_bytes[owner_id]
