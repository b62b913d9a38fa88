"""Checked steps: 100,000, in a proof a million. Workers share them class by class."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import pytest

from tests.depth import IS_PROOF, at_depth
from tests.sim.campaign import Totals, play_steps

SHARD_STEPS: Final = at_depth(50_000, proof=125_000)
SHARD_SEEDS: Final = 1_000_000
"""Shards begin this many seeds apart, so that none ever meets another."""

_TIMEOUT_S: Final = 1800
"""Of one shard: a minute of a quiet core."""

INTERESTING: Final = (
    "a batch in a graph",
    "a batch in no graph",
    "a batch that a graph would pad too much",
    "a padded batch",
    "admitted again",
    "assistant edited",
    "cancelled in decode",
    "cancelled in prefill",
    "cancelled in waiting",
    "change refused: SessionBusy",
    "close deferred",
    "close idle",
    "close in decode",
    "close in prefill",
    "close in waiting",
    "close of a closed session",
    "connection ended: 1012",
    "connection ended: 4410",
    "context full",
    "cool",
    "deltas merged",
    "discard",
    "draft accepted",
    "draft rejected",
    "drafts accepted across pages",
    "duplicate submit",
    "engine came back",
    "engine died",
    "engine died under turns",
    "engine takes no more",
    "evict",
    "evict and spare a minimum",
    "evict beside another tenant",
    "failed context_too_long",
    "failed device_failed",
    "failed internal_inconsistency",
    "failed invalid_request",
    "failed numerical_error",
    "failed quota_exceeded",
    "failed server_busy",
    "failed session_busy",
    "failed session_not_found",
    "fault alloc_page",
    "fault alloc_row",
    "fault device_nan",
    "fault device_poison",
    "fault device_raise",
    "fault engine_death",
    "fault net_drop",
    "fault net_stall",
    "fault tokenizer_slow",
    "finished cancelled",
    "finished length",
    "finished stop",
    "flush done",
    "flush refused",
    "forked",
    "late command",
    "left out for a tenant behind",
    "locked node split",
    "match",
    "match cut back to a snapshot",
    "match of a snapshot",
    "match of a window",
    "messages answered",
    "messages read",
    "node split",
    "overshoot",
    "pin refused",
    "pong",
    "probe",
    "prompt scored",
    "publish",
    "publish duplicate",
    "published pages taken back",
    "recount beside changes",
    "refused: context_too_long",
    "refused: engine_unavailable",
    "refused: invalid_request",
    "refused: session_busy",
    "refused: turn_conflict",
    "report",
    "resumed",
    "resumed after a retraction",
    "retract",
    "rewind",
    "rewound to a snapshot",
    "rewound to assistant",
    "rewound to the beginning",
    "rolled back to a snapshot",
    "session closed: client",
    "session closed: draining",
    "session closed: expired",
    "session cold: engine_restart",
    "session cold: flush",
    "session cold: pressure",
    "session resident: turn",
    "shortfall",
    "snapshot brought back",
    "snapshot evicted with its page",
    "snapshot published",
    "snapshot taken back",
    "state left at a page's end",
    "state left by a wrong draft",
    "stop in decode",
    "superseded itself",
    "tombstone",
    "tombstone filled",
    "tombstone published",
    "turn",
    "turn accepted",
    "turn cancelled by client_cancelled, keeps",
    "turn cancelled by client_cancelled, keeps nothing",
    "turn cancelled by disconnected, keeps nothing",
    "turn cancelled by session_closed, keeps nothing",
    "turn completed: length",
    "turn completed: stop",
    "turn failed: context_too_long",
    "turn failed: engine_restarting",
    "turn failed: quota_exceeded",
    "turn repeated",
    "turn undone",
    "turn waited behind another",
    "user edited",
    "went on from kept KV",
    "whole conversation goes another way",
    "whole conversation goes on",
    "window released",
)
"""What a quarter has to reach, and in a proof each shard of it; a simulator that no longer does
shows nothing."""

RARE: Final = (
    "another tenant went first",
    "connection ended: 1013",
    "connection ended: 404",
    "probe of a state",
    "refused: session_closing",
    "refused: session_not_found",
    "refused: tokenize_failed",
    "refused: turn_not_active",
    "refused: turn_not_found",
    "resume failed: offset_lost",
    "rewound to raw",
    "rewound to user",
    "rolled back to a state",
    "snapshot",
    "snapshot evicted",
    "state of a failed forward dropped",
    "turn cancelled by disconnected, keeps",
    "turn cancelled by session_closed, keeps",
    "turn completed: stop string",
    "turn failed: device_failed",
    "turn failed: numerical_error",
    "turn failed: tokenize_failed",
)
"""What a quarter of a proof has to reach besides: it is met a few times in a million steps."""


@pytest.mark.timeout(_TIMEOUT_S)
class Quarter:
    """A quarter of the million: what its two `SHARDS` must have kept and reached."""

    SHARDS: tuple[int, int]

    @pytest.mark.parametrize("half", [0, 1])
    def test_every_step_of_a_shard_keeps_every_promise(
        self, half: int, record_property: Callable[[str, object], None]
    ) -> None:
        totals = play_shard(self.SHARDS[half])
        record_property("simulated", totals.figures)
        missing = _missing(totals.coverage, at_depth((), proof=INTERESTING))
        assert not missing, missing

    def test_what_is_interesting_was_reached_and_in_a_proof_what_is_rare(self) -> None:
        first, second = map(play_shard, self.SHARDS)
        wanted = at_depth(INTERESTING, proof=(*INTERESTING, *RARE))
        missing = _missing(first.coverage + second.coverage, wanted)
        assert not missing, missing


class TestFirstQuarter(Quarter):
    SHARDS = (0, 1)


if IS_PROOF:

    class TestSecondQuarter(Quarter):
        SHARDS = (2, 3)

    class TestThirdQuarter(Quarter):
        SHARDS = (4, 5)

    class TestFourthQuarter(Quarter):
        SHARDS = (6, 7)


@functools.cache
def play_shard(shard: int) -> Totals:
    """Simulate the seeds of one shard until it has made its steps; once in a process."""
    return play_steps(shard * SHARD_SEEDS, SHARD_STEPS)


def _missing(coverage: Counter[str], names: Iterable[str]) -> list[str]:
    return [name for name in names if not coverage[name]]
