"""Decisions of a simulation: each a hash of the seed, the site that asks, and how often it asked.

There is no stream that all sites share, so an operation left out of a run does not reshuffle what
the other sites decide. Nothing here depends on the interpreter's own hashes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, TypeVar
from zlib import crc32

_T = TypeVar("_T")

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def scramble(value: int) -> int:
    """A 64-bit bijection of the low 64 bits of `value` (the finaliser of splitmix64, Steele,
    Lea and Flood 2014)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix(*values: int) -> int:
    """A 64-bit hash of integers; their order counts."""
    state = _GOLDEN
    for value in values:
        state = scramble(state + value + _GOLDEN)
    return state


@functools.lru_cache(maxsize=256)
def name_value(name: str) -> int:
    """A name as a number, the same in every process."""
    return mix(*name.encode())


class Draws:
    """Draws of one run. A site is named by what it decides."""

    __slots__ = ("_seed", "_sites")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._sites: dict[str, int] = {}

    def below(self, site: str, bound: int) -> int:
        """A number in [0, bound)."""
        state = self._sites.get(site)
        if state is None:
            state = mix(self._seed, crc32(site.encode()))
        self._sites[site] = (state + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        return (state ^ (state >> 27)) % bound

    def between(self, site: str, first: int, last: int) -> int:
        """A number in [first, last]."""
        return first + self.below(site, last - first + 1)

    def happens(self, site: str, per_mille: int) -> bool:
        """Whether something of this frequency happens now."""
        return per_mille > 0 and self.below(site, 1000) < per_mille

    def pick(self, site: str, options: Sequence[_T]) -> _T:
        """One of some options, equally likely."""
        return options[self.below(site, len(options))]

    def weighted(self, site: str, options: Sequence[_T], cumulative: Sequence[int]) -> _T:
        """One of some options; `cumulative` are the running sums of their weights."""
        draw = self.below(site, cumulative[-1])
        for option, bound in zip(options, cumulative, strict=True):
            if draw < bound:
                return option
        raise AssertionError("the running sums do not ascend")
