"""What each kind of layer allows: how far its KV can be reused, cut back, and what it still reads.

The lease and the façade ask every component and take the smallest answer, so a kind with stricter
rules (a sliding window, a recurrent state) adds a class here and an entry in `_RULES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from cache.spec import CacheSpec, LayerKind
from cache.types import PoolName


class Component(Protocol):
    """Rules of the layers that share one pool. Lengths are tokens; all methods are pure."""

    @property
    def pool(self) -> PoolName:
        """The pool whose pages it rules."""
        ...

    def reusable_len(self, matched_len: int) -> int:
        """The longest prefix of a tree match that a forward can continue from."""
        ...

    def rewind_len(self, computed_len: int, to_len: int) -> int:
        """The longest length <= `to_len` to which content of `computed_len` can be cut back."""
        ...

    def live_from(self, length: int) -> int:
        """The first position a query at `length` still reads.

        Whole pages before it are neither locked nor held.
        """
        ...


class FullAttention:
    """Every position on its own: reused and cut back to any length.

    That is K and V of full attention (Vaswani et al. 2017), and the latents of MLA (DeepSeek-AI
    2024), which K and V are made from.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: PoolName) -> None:
        self._pool = pool

    @property
    def pool(self) -> PoolName:
        """The pool whose pages it rules."""
        return self._pool

    def reusable_len(self, matched_len: int) -> int:
        """All of it."""
        return matched_len

    def rewind_len(self, computed_len: int, to_len: int) -> int:
        """Anywhere: an earlier position does not know the later ones."""
        return min(computed_len, to_len)

    def live_from(self, length: int) -> int:
        """Everything is read."""
        del length
        return 0


class SlidingWindow(FullAttention):
    """K and V of the last positions (Beltagy et al. 2020). Nothing is released yet."""

    __slots__ = ()


def can_take_back(components: Iterable[Component]) -> bool:
    """Whether content computed from a wrong token can be cut off again, which guessing needs."""
    return all(component.rewind_len(2, 1) == 1 for component in components)


def components_of(spec: CacheSpec) -> tuple[Component, ...]:
    """One component per pool, in the order of the spec's groups."""
    kinds: dict[PoolName, LayerKind] = {}
    for group in spec.groups:
        if kinds.setdefault(group.pool, group.kind) is not group.kind:
            raise ValueError(f"pool {group.pool} is shared by layers of different kinds")
    return tuple(_RULES[kind](pool) for pool, kind in kinds.items())


_RULES: Final[Mapping[LayerKind, type[FullAttention]]] = MappingProxyType(
    {
        LayerKind.FULL: FullAttention,
        LayerKind.WINDOW: SlidingWindow,
        LayerKind.LATENT: FullAttention,
    }
)
