"""Where something can be made to go wrong, and when it does.

A site asks each time that its fault could strike. Mostly the rates of the configuration answer; or
one fault is planned, at the n-th opportunity of one site, and nothing else ever goes wrong. Playing
n = 1, 2, 3 ... until a run has fewer opportunities meets every one of them, which is how SQLite
tests its lack of memory (sqlite.org/testing.html).
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import Final

from tests.sim.draws import Draws


class Site(enum.StrEnum):
    """What can fail, and when it could: a place in the engine, on the device or on the wire.

    What strikes is counted as "fault" and the name.
    """

    ALLOC_PAGE = "alloc_page"
    """A turn asks for pages: there are none."""
    ALLOC_ROW = "alloc_row"
    """A turn is to begin: there is no row."""
    DEVICE_NAN = "device_nan"
    """A forward is under way: the logits of one row are not finite."""
    DEVICE_RAISE = "device_raise"
    """A forward is under way: it fails as a whole, once."""
    DEVICE_POISON = "device_poison"
    """A forward is under way: it fails, as will every one that has this turn in it."""
    ENGINE_DEATH = "engine_death"
    """Any moment of an engine's life: it is gone, with all that it held."""
    NET_DROP = "net_drop"
    """Somebody is connected: a connection breaks, and what is on its way is lost."""
    NET_STALL = "net_stall"
    """Somebody is connected and reads: a client stops reading."""
    EVICTION = "eviction"
    """Published pages lie unused: all of them are given up."""
    QUARANTINE = "quarantine"
    """A session is looked at: its KV is said to be wrong, and so is all that was copied."""
    REBUILD = "rebuild"
    """The books are looked at: they are said to be wrong."""
    TIER_COPY = "tier_copy"
    """KV is copied out of the pools, back, or to disk: it fails."""
    TIER_FILE = "tier_file"
    """A file of KV is written: it is not what it should be when it is read."""
    TIER_ROOM = "tier_room"
    """A file of KV is written, or the disk is asked for its room: others take more, or less."""
    TOKENIZER_SLOW = "tokenizer_slow"
    """A long input is tokenized: it takes longer than is waited for."""


DEVICE_SITES: Final = (Site.DEVICE_NAN, Site.DEVICE_RAISE, Site.DEVICE_POISON)
DOUBT_SITES: Final = (Site.QUARANTINE, Site.REBUILD)


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Per mille of the opportunities at which each strikes; the names are those of `Site`."""

    device_nan: int = 0
    device_raise: int = 0
    device_poison: int = 0
    alloc_page: int = 0
    alloc_row: int = 0
    engine_death: int = 0
    net_drop: int = 0
    net_stall: int = 0
    tokenizer_slow: int = 0
    eviction: int = 0
    quarantine: int = 0
    rebuild: int = 0
    tier_copy: int = 0
    tier_file: int = 0
    tier_room: int = 0


@dataclass(frozen=True, slots=True)
class OneFault:
    """The `nth` opportunity at a site, counted from 1."""

    site: Site
    nth: int


class FaultPoints:
    """Decides for one simulation. With `only`, the rates count for nothing."""

    def __init__(self, draws: Draws, rates: FaultRates, only: OneFault | None) -> None:
        self._draws = draws
        self._per_mille: dict[Site, int] = {site: getattr(rates, site) for site in Site}
        self._only = only
        self._num_asked: Counter[Site] = Counter()
        self._is_calm = False

    def strikes(self, site: Site) -> bool:
        """Whether the fault strikes at this opportunity."""
        if self._is_calm:
            return False
        if self._only is None:
            return self._draws.happens(site, self._per_mille[site])
        self._num_asked[site] += 1
        return self._only == OneFault(site, self._num_asked[site])

    def calm(self) -> None:
        """No more faults."""
        self._is_calm = True
