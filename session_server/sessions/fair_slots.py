"""Share a few slots between owners: whoever holds none comes first, then in rotation."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from itertools import islice

from session_server.core.errors import ServerBusy
from session_server.core.owner import Owner


class FairSlots:
    """Grant `num_slots` slots to owners in rotation, to each in the order of its requests.

    An owner is granted a second slot only while no owner that holds fewer waits. Its requests,
    however many, count as one in the rotation.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_held: Counter[Owner] = Counter()
        self._waiting: dict[Owner, OrderedDict[asyncio.Future[None], None]] = {}
        """Requests by owner; the owner served last is the last key."""

    @contextlib.asynccontextmanager
    async def slot(self, owner: Owner, *, max_wait_s: float) -> AsyncIterator[None]:
        """Hold a slot during the block. Raises ServerBusy if none was free within `max_wait_s`."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, OrderedDict())[granted] = None
        self._grant()
        try:
            try:
                async with asyncio.timeout(max_wait_s):
                    await granted
            except TimeoutError:
                raise ServerBusy("too many inputs wait to be tokenized") from None
            yield
        finally:
            self._leave(owner, granted)

    def _grant(self) -> None:
        while self._waiting and self._num_held.total() < self._num_slots:
            # At most `num_slots` owners hold one, so the first that holds none is among these.
            first = islice(self._waiting, self._num_slots)
            owner = min(first, key=lambda each: self._num_held[each])
            waiting = self._waiting.pop(owner)
            granted, _ = waiting.popitem(last=False)
            if not granted.cancelled():
                granted.set_result(None)
                self._num_held[owner] += 1
            if waiting:
                self._waiting[owner] = waiting

    def _leave(self, owner: Owner, granted: asyncio.Future[None]) -> None:
        """Release a slot, or leave the queue if none was granted."""
        if granted.done() and not granted.cancelled():
            self._num_held[owner] -= 1
            if not self._num_held[owner]:
                del self._num_held[owner]
            self._grant()
            return
        waiting = self._waiting.get(owner, OrderedDict())
        waiting.pop(granted, None)
        if not waiting:
            self._waiting.pop(owner, None)
