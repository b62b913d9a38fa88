"""`DiskAccount`: account for files of KV, which take no more than the disk has room for.

The log lies on the same disk. It is the truth, and files are a copy of what follows from it: where
room is short, they give way.
"""

from __future__ import annotations

import math
from typing import Final

from cache.tiers.tier_account import TierAccount
from session_server.core.tier_orders import Refusal, TierResult

_QUOTA_DIVISOR: Final = 8
"""Part of the files that gives way where the disk refuses one and shows no want of room."""

QUOTA_HOLD_S: Final = 60.0
"""Seconds for which files take no more than what is left then."""


class DiskAccount(TierAccount):
    """Count files. `given_bytes`: what they may take on a disk that has room for it; `max_bytes`:
    what they may take now, which may be less than what they have. `is_short`: the disk has less
    room than what was given. `num_refused`: files that it had no room for."""

    def __init__(self, given_bytes: int) -> None:
        super().__init__(given_bytes)
        self.given_bytes = given_bytes
        self.is_short = False
        self.num_refused = 0
        self._shown_bytes = given_bytes
        self._quota_bytes, self._quota_until_s = given_bytes, -math.inf

    def give_nothing(self) -> None:
        """Let files take nothing from now on."""
        self.given_bytes = self.max_bytes = 0

    def waits_for(self, num_bytes: int) -> bool:
        """Return whether there is no room for so much at all, and may be once others leave it."""
        return self.max_bytes < num_bytes <= self.given_bytes

    def note_room(
        self, result: TierResult, *, held_bytes: int, now_s: float, asked_bytes: int = 0
    ) -> None:
        """Note what the disk says of its room while files have `held_bytes`. `asked_bytes`: what it
        was to take more."""
        room_bytes = result.room_bytes
        is_shown = room_bytes is not None and room_bytes < asked_bytes
        if result.refusal is Refusal.NO_ROOM and not is_shown:
            # A quota may be full, or there are too many files, and no count of free bytes says so.
            self._quota_bytes = held_bytes - held_bytes // _QUOTA_DIVISOR
            self._quota_until_s = now_s + QUOTA_HOLD_S
        if room_bytes is not None:
            self._shown_bytes = max(0, held_bytes + room_bytes)
        self.max_bytes = min(self.given_bytes, self._shown_bytes)
        if now_s < self._quota_until_s:
            self.max_bytes = min(self.max_bytes, self._quota_bytes)
        self.is_short = self.max_bytes < self.given_bytes
