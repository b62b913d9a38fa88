"""Two sessions of one tenant on a small cache: where most scenarios begin."""

from __future__ import annotations

from cache.types import SessionId
from tests.cache.kv_world import NAMESPACES, World, make_cache

ALICE, BOB = NAMESPACES
A, B, C = SessionId("a"), SessionId("b"), SessionId("c")
PROMPT = [1, 2, 0, 1, 2, 2, 1, 0, 0, 1]
"""Ten tokens: two whole pages of four and a half one."""


def make_world(page_size: int = 4, *, num_pages: int = 33, num_rows: int = 4) -> World:
    world = World(make_cache(page_size, num_pages=num_pages, num_rows=num_rows), page_size)
    for session_id in (A, B):
        world.open(session_id, ALICE)
    return world


def run_turn(
    world: World, session_id: SessionId, new_tokens: list[int], num_outputs: int = 3
) -> int:
    """A turn from input to answer; returns its cached length."""
    loan = world.begin(session_id, new_tokens)
    for _ in range(num_outputs):
        world.step(session_id, 64)
    world.end(session_id, len(world.turns[session_id].tokens))
    world.check()
    return loan.cached_len
