"""Random servers against the engine, step by step, audited after every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from session_server.engine.settings import Drafter, Speculation
from tests.engine.bench import Stage
from tests.engine.chaos import Chaos

STAGES = {
    "roomy": Stage(num_pages=120, page_size=4, chunk_tokens=16),
    "tight": Stage(num_pages=26, page_size=4, chunk_tokens=7, max_context_len=96),
    "tiny pages": Stage(num_pages=100, page_size=1, chunk_tokens=7, max_context_len=90),
    "large pages": Stage(num_pages=9, page_size=16, chunk_tokens=64, max_context_len=128),
    "one at a time": Stage(num_pages=30, page_size=4, chunk_tokens=1, max_context_len=80),
    "pinned": Stage(num_pages=40, page_size=4, pinned_quota_pages=14, max_context_len=96),
    "few rows": Stage(num_pages=40, page_size=4, num_rows=3, max_running=3, max_context_len=96),
}

INTERESTING = (
    "retract",
    "cool",
    "overshoot",
    "publish duplicate",
    "resumed",
    "rewind",
    "cancel in waiting",
    "cancel in prefill",
    "cancel in decode",
    "close while running",
    "close while waiting",
    "stop string",
    "context full",
    "scored",
    "late command",
    "duplicate submit",
    "flush done",
    "flush refused",
    "report",
    "failed step",
    "finished stop",
    "finished length",
    "finished cancelled",
    "failed numerical_error",
    "failed device_failed",
    "failed context_too_long",
    "failed session_busy",
    "failed session_not_found",
    "failed internal_inconsistency",
    "failed invalid_request",
    "failed quota_exceeded",
    "pin refused",
    "probe",
)


@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 2, 4])
def test_every_turn_says_what_it_would_say_alone(num_in_flight: int, num_drafts: int) -> None:
    reached: Counter[str] = Counter()
    for name, stage in STAGES.items():
        for seed in range(4):
            speculation = Speculation(num_drafts, Drafter.NGRAM if seed % 2 else Drafter.MODEL)
            one = replace(
                stage,
                num_in_flight=num_in_flight,
                speculation=speculation,
                probe_interval_s=0.1 if seed % 2 else 10.0,
            )
            chaos = Chaos(seed, one, reached)
            try:
                chaos.run(num_actions=300)
            except BaseException as error:
                error.add_note(f"stage {name!r}, seed {seed}, {num_in_flight}, {speculation}")
                raise
    missing = [name for name in INTERESTING if not reached[name]]
    if num_drafts:
        missing += [name for name in ("right draft", "wrong draft") if not reached[name]]
    if num_in_flight == 1:
        missing = [name for name in missing if name != "overshoot"]
    assert not missing, f"never happened: {missing}; reached {dict(reached)}"
