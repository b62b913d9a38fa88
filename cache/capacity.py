"""`plan_capacity`: split a budget of memory between pools. A pure function.

A session holds pages of every position in a full-attention pool, but only those of the last window
in a window pool. So there is a size at which a window pool always suffices, however long sessions
are. Memory beyond that is of no use there and goes to the pools that keep every position.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.components import Component, components_of
from cache.spec import STATES_IN_FLIGHT, STATES_PER_ROW, CacheSpec, Capacity
from cache.types import pages_for


@dataclass(frozen=True, slots=True)
class BoundedPools:
    """Configure the sizes of window pools and recurrent pools.

    `num_ahead`: positions that all turns together may have launched and not settled; `num_drafts`:
    drafts that a turn may have launched. `window_ratio`: pages of a window pool per page of a pool
    that keeps every position, if the operator has set it.
    """

    num_ahead: int = 0
    num_drafts: int = 0
    window_ratio: float | None = None

    @property
    def states_per_row(self) -> int:
        """Return the most states that one row holds. Two launches in flight write two each, but
        one that verifies drafts is alone, and writes its own and one per draft."""
        in_flight = max(STATES_IN_FLIGHT, 1 + self.num_drafts)
        return STATES_PER_ROW - STATES_IN_FLIGHT + in_flight

    def turn_pages(self, component: Component, row_pages: int) -> int:
        """Return the pages of a window pool that one turn needs, however long it is."""
        running = component.running_pages(row_pages, self.num_ahead)
        return min(row_pages, component.parked_pages(row_pages) + running)

    def pages(self, component: Component, num_rows: int, row_pages: int, share_pages: int) -> int:
        """Return the pages that a window pool needs, without padding.

        It suffices if the session of every row has what it holds while parked plus what a turn
        adds. That is three windows per row, of which a parked session holds one; the others keep
        published prefixes. `share_pages` is an upper bound, but never below one turn.
        """
        one_turn = self.turn_pages(component, row_pages)
        per_row = component.parked_pages(row_pages) + component.running_pages(row_pages, 1)
        everybody = (num_rows - 1) * min(row_pages, per_row) + one_turn
        return min(everybody, max(share_pages, one_turn))


def plan_capacity(
    spec: CacheSpec,
    *,
    budget_bytes: int,
    num_rows: int,
    max_context_len: int,
    max_total_tokens: int | None = None,
    bounded: BoundedPools = BoundedPools(),
) -> Capacity:
    """Return how many rows, states and pages per pool `budget_bytes` buys.

    Every row comes with all the states it may hold, so half of the budget limits the rows. Window
    pools have the pages that all rows may need (`BoundedPools.pages`), but no more than half of the
    budget buys, so that they do not displace the pages of long sessions, and never more than the
    other pools. The other pools are equally large and get the rest. `window_ratio` replaces this
    rule by a fixed ratio.

    `num_rows`: the most sessions that can hold KV at the same time. `max_context_len`: tokens that
    one row can address. `max_total_tokens`: the most tokens held, whatever the budget allows.

    Raises:
        ValueError: the budget buys less than one page beside the padding page, or no row's states.
    """
    per_row = bounded.states_per_row
    num_rows, num_states = _rows_with_states(spec, per_row, budget_bytes, num_rows)
    budget_bytes -= num_states * spec.bytes_per_state
    sizes = spec.paged_bytes_per_page
    equal = budget_bytes // spec.bytes_per_page
    most = budget_bytes
    if max_total_tokens is not None:
        most = pages_for(max_total_tokens, spec.page_size) + 1
    if min(equal, most) < 2:
        raise ValueError(
            f"{budget_bytes} bytes for KV buy {equal} of at least 2 pages of {spec.bytes_per_page} "
            "bytes: raise --mem-fraction-static (inspect: --memory) or lower --page-size"
        )
    passing = [c for c in components_of(spec) if c.is_bounded and c.pool in sizes]
    window_bytes = sum(sizes[component.pool] for component in passing)
    kept_bytes = spec.bytes_per_page - window_bytes
    if (ratio := bounded.window_ratio) is not None and kept_bytes:
        whole = min(most, budget_bytes / (kept_bytes + ratio * window_bytes))
        pages = {component.pool: max(2, int(whole * ratio)) for component in passing}
    else:
        share = budget_bytes // 2 // max(1, window_bytes) if kept_bytes else equal
        row_pages = pages_for(max_context_len, spec.page_size)
        room = {c.pool: bounded.pages(c, num_rows, row_pages, share) for c in passing}
        pages = {pool: min(equal, most, wanted + 1) for pool, wanted in room.items()}
    left = budget_bytes - sum(num * sizes[pool] for pool, num in pages.items())
    kept = min(most, left // kept_bytes) if kept_bytes else 0
    num_pages = {pool: pages.get(pool, kept) for pool in sizes}
    return Capacity(num_pages, num_rows, max_context_len, num_states)


def _rows_with_states(spec: CacheSpec, per_row: int, budget: int, num_rows: int) -> tuple[int, int]:
    """Return the number of rows, and of the states they come with, including padding."""
    if not spec.bytes_per_state:
        return num_rows, 0
    num_bytes = per_row * spec.bytes_per_state
    if num_bytes > budget // 2:
        raise ValueError(
            f"half of {budget} bytes for KV does not hold the {per_row} recurrent states of one "
            f"session, {num_bytes} bytes: raise --mem-fraction-static (inspect: --memory)"
        )
    num_rows = min(num_rows, budget // 2 // num_bytes)
    return num_rows, num_rows * per_row + 1
