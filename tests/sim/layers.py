"""What kinds of layers a simulated model has, and the pools they need."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cache.capacity import BoundedPools, plan_capacity
from cache.spec import CacheSpec, Capacity, LayerGroup, LayerKind
from cache.types import PoolName, pages_for
from tests.sim.device import PoolShape

POOLS: Final = {kind: PoolName(kind.value) for kind in LayerKind}
"""The pool of each kind of layer."""


class Mixture(enum.Enum):
    """Kinds of layers side by side."""

    FULL = "full"
    FULL_AND_WINDOW = "full + window"
    LATENT = "latent"
    WINDOW = "window"
    FULL_AND_RECURRENT = "full + recurrent"


_KINDS: Final[Mapping[Mixture, tuple[LayerKind, ...]]] = {
    Mixture.FULL: (LayerKind.FULL,),
    Mixture.FULL_AND_WINDOW: (LayerKind.FULL, LayerKind.WINDOW),
    Mixture.LATENT: (LayerKind.LATENT,),
    Mixture.WINDOW: (LayerKind.WINDOW,),
    Mixture.FULL_AND_RECURRENT: (LayerKind.FULL, LayerKind.RECURRENT),
}


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of one simulated model. `window`: positions that a window sees; `window_pages`:
    pages of its pool, padding aside, where it is another number than that of the others;
    `num_states`: of the recurrent one, where rows do not come with all they may ever hold.
    """

    mixture: Mixture = Mixture.FULL
    window: int = 8
    window_pages: int | None = None
    num_states: int | None = None

    @property
    def read_window(self) -> int:
        """Positions that an answer depends on; 0 where it is all of them."""
        return self.window if self.mixture is Mixture.WINDOW else 0

    def spec(self, page_size: int) -> CacheSpec:
        """One group per kind of layers."""
        groups = []
        for index, kind in enumerate(_KINDS[self.mixture]):
            pool = POOLS[kind]
            if kind is LayerKind.RECURRENT:
                groups.append(LayerGroup(pool, kind, (index,), 0, 0, 4, state_shapes=((1,),)))
                continue
            window = self.window if kind is LayerKind.WINDOW else 0
            qk_rope_head_dim = 1 if kind is LayerKind.LATENT else 0
            groups.append(LayerGroup(pool, kind, (index,), 1, 1, 4, window, qk_rope_head_dim))
        return CacheSpec(tuple(groups), page_size)

    def capacity(
        self, num_pages: int, num_rows: int, max_context_len: int, num_drafts: int
    ) -> Capacity:
        """`num_pages` in each pool of positions, without the padding page."""
        pages = {}
        for kind in self._paged:
            is_other = kind is LayerKind.WINDOW and self.window_pages is not None
            pages[POOLS[kind]] = 1 + (self.window_pages or 0 if is_other else num_pages)
        num_states = 0
        if self.mixture is Mixture.FULL_AND_RECURRENT:
            # As many as the planner gives to so many rows, when memory is no object.
            plenty = plan_capacity(
                self.spec(1),
                budget_bytes=1 << 30,
                num_rows=num_rows,
                max_context_len=1,
                bounded=BoundedPools(num_drafts=num_drafts),
            )
            num_states = plenty.num_states if self.num_states is None else 1 + self.num_states
        return Capacity(pages, num_rows, max_context_len, num_states)

    def shapes(self, capacity: Capacity, page_size: int) -> dict[PoolName, PoolShape]:
        """The device's pools of positions, one per kind, the one that keeps everything first."""
        shapes = {}
        for kind in self._paged:
            shapes[POOLS[kind]] = PoolShape(
                num_pages=capacity.num_pages[POOLS[kind]],
                page_size=page_size,
                num_rows=capacity.num_rows,
                row_pages=pages_for(capacity.max_context_len, page_size),
                window=self.window if kind is LayerKind.WINDOW else 0,
            )
        return shapes

    @property
    def _paged(self) -> tuple[LayerKind, ...]:
        """The kinds whose pages are of positions."""
        return tuple(kind for kind in _KINDS[self.mixture] if kind is not LayerKind.RECURRENT)
