"""Clients that type: what they draft changes no answer, delays nobody, and leaves nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Final

import pytest

from tests.depth import at_depth
from tests.sim.config import FIRST_DRAFTING, Front
from tests.sim.configs import rich_config
from tests.sim.context import SimContext
from tests.sim.direct import DirectWorld
from tests.sim.simulation import run

NUM_STEPS: Final = at_depth(12_000, proof=200_000)

INTERESTING: Final = (
    "draft abandoned",
    "draft answered",
    "draft answered after other news",
    "draft behind a rewind",
    "draft computed in full",
    "draft computed in part",
    "draft computed not at all",
    "draft dropped by its client at rest",
    "draft goes on from the one before",
    "draft kept from the one before",
    "draft of a cold session",
    "draft of a resident session",
    "draft refused: context_too_long",
    "draft refused: engine_restarting",
    "draft replaced before it was computed",
    "draft sent at rest",
    "draft sent beside a turn",
    "draft taken by a turn: a part of it",
    "draft taken by a turn: all of it",
    "draft taken by a turn: nothing of it",
    "engine died under drafts",
    "session cold: client",
    "tail taken by a turn",
    "tails dropped for pages",
    "turn undone",
)
"""What clients that draft have to reach; see `tests/sim/test_million.py`."""


@pytest.mark.timeout(600)
def test_every_step_with_drafts_keeps_every_promise() -> None:
    reached: Counter[str] = Counter()
    num_steps, seed = 0, FIRST_DRAFTING
    while num_steps < NUM_STEPS:
        report = run(seed)
        assert report.config.habits.draft
        reached += report.coverage
        num_steps, seed = num_steps + report.steps, seed + 1
    missing = [name for name in INTERESTING if not reached[name]]
    assert not missing, missing


def test_a_thousand_sessions_that_draft_delay_no_turn_by_more_than_one_chunk() -> None:
    """`FairnessWatch` looks at each forward: a turn is in every one from the first that is planned
    after it came, and drafts have a share of it."""
    config = rich_config(1, Front.DIRECT)
    sizes = replace(config.sizes, num_rows=1100, num_pages=4000, chunk_tokens=64, num_drafts=0)
    world = DirectWorld(SimContext.of(replace(config, sizes=sizes), None))
    for number in range(1000):
        opened = {"op": "open", "s": f"s{number}", "owner": "a", "tokens": [], "pinned": False}
        world.apply(opened)
        typed = [1 + number % 31, 1 + number // 40, *range(1, 31)]
        drafted = {"op": "draft", "s": f"s{number}", "d": f"d{number}", "new": typed}
        world.apply({**drafted, "cut": 0, "lag": 0})
    advance = {"op": "step", "results": 1}
    world.apply(advance)
    drafts = world.stage.history.drafts
    assert len(drafts.owed) == 1000
    for number in range(8):
        before = len(world.stage.batches)
        world.apply(_turn(f"s{number}", f"t{number}"))
        while f"t{number}" not in world.stage.history.ended:
            world.apply(advance)
        launched = [batch for batch in world.stage.batches[before:] if batch.probe is None]
        forwards = [[row.turn_id for row in batch.rows] for batch in launched]
        mine = [f"t{number}" in rows for rows in forwards]
        assert mine[:12] == [True] * 12, "a forward without the turn"
        assert sum(len(rows) > 1 for rows in forwards[:12]) > 6, "drafts go on beside it"
    assert drafts.owed, "there were drafts all the time"
    world.finish()
    # The pool holds half of them. The others are told so, and none waits for ever.
    assert drafts.reached["draft computed in full"] > 400
    assert drafts.reached["draft computed not at all"] > 400


def _turn(session_id: str, turn_id: str) -> dict[str, Any]:
    sampling = {"max_tokens": 12, "seed": 1, "ignore_eos": True}
    turn = {"op": "submit", "s": session_id, "t": turn_id, "cut": 0, "new": [1, 2, 3], "lag": 0}
    return {**turn, "sampling": sampling, "priority": 0}
