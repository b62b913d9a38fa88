"""One exchange to disturb: a session with a past, a running turn, and a neighbour."""

from __future__ import annotations

from collections.abc import Callable

from session_server.core.session_events import TurnCompleted
from session_server.engine.config import Drafter, MemoryCheck
from tests.rig.moments import OWNER, Rig, turn
from tests.sim.hand_engine import Sizes

PROMPT = tuple(range(1, 30))
MAIN = turn("main", *PROMPT, max_tokens=16)
BEHIND = turn("behind", 5, max_tokens=5)
SIZES = (
    Sizes(num_pages=48, page_size=4, chunk_tokens=8, num_rows=8),
    Sizes(
        num_pages=160,
        page_size=1,
        chunk_tokens=4,
        num_rows=8,
        num_in_flight=1,
        memory_check=MemoryCheck.WARN,
        num_drafts=2,
        drafter=Drafter.MODEL,
    ),
)
"""Overlap and lockstep; prompts in chunks; a page of one token and guesses ahead."""


def exchange(rig: Rig) -> Callable[[], None]:
    """A session with a past, a turn in it with another behind, and a neighbour that runs too."""

    def begin() -> None:
        session_id = rig.open(session_id="mine")
        rig.run(session_id, turn("past", 2, 3, 4, max_tokens=3))
        neighbour = rig.open(session_id="neighbour")
        rig.submit(neighbour, turn("long", *PROMPT[:13], max_tokens=26))
        rig.submit(session_id, MAIN)

    return begin


def assert_completed(rig: Rig, session_id: str, turn_id: str) -> None:
    """A turn that nobody touched ended well."""
    assert isinstance(rig.manager.turn(OWNER, session_id, turn_id).end, TurnCompleted)
