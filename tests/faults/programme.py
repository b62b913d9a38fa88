"""Every fault the server must survive, what is expected, and the tests that inject it.

The list is section 3 of the design's page on faults. `injections` gathers what the tests declare;
the table in `docs/testing.md` is made from both.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests.faults.points import INJECTIONS, Injection

WANTED: Final = 100
"""Points that each fault is injected at, over all its tests."""

EXPECTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "disconnect mid-turn": "the turn runs on, or is canceled with what was delivered, as its "
        "client chose; the next turn continues from exactly there",
        "slow reader": "its frames are merged, then it is let go with 1013 or cut; no turn waits "
        "for it, and it may resume",
        "half-open TCP": "a peer that answers no ping is closed with 1011; its session stays, its "
        "turn runs on or is canceled as asked",
        "slow handshake, slow body": "408, or 4401, and the connection is closed; drops buy no "
        "time",
        "reconnect, resume": "exactly what was missed, or the state in its place; the newest "
        "connection has the session, the one before closes with 4409",
        "malformed JSON, UTF-8": "an error frame and the connection lives, or a 4xx; bytes that "
        "are no text, or no frame, close with 1002, 1003, 1007 or 1009; never an error in the log",
        "huge message": "1009 or 413 from the first byte beyond the bound, by announcement or as "
        "it grows; nothing is ever decompressed",
        "KV pool exhausted": "parked sessions are cooled, the youngest turns go back to waiting, "
        "and everybody gets the exact answer",
        "turn that can never fit": "`context_too_long` with the numbers, at submit; the session is "
        "as before",
        "too many sessions, connections, turns": "429 or 503 for the one too many; those within "
        "the bound go on, and a place that comes free is taken",
        "SIGTERM": "nothing new is taken, waiting turns end, running ones get their time and then "
        "keep what they have, every session is told and closed",
        "clock jump": "the wall clock is only shown; a leap of the monotonic one expires idle "
        "sessions at most",
        "close in prefill or decode": "the turn is canceled and told so, the session's last entry "
        "follows; a second close is the first one",
        "abort storm": "one terminal entry each, neighbors undisturbed, exactly the delivered "
        "part kept, or nothing",
        "duplicate submit": "same id and body: the same turn; same id, other body: `turn_conflict`",
        "second turn while one runs": "`session_busy`, or it waits in line; the first goes on",
        "tokenizer raises or hangs": "`tokenize_failed` for that turn, within its deadline; nobody "
        "else waits; invalid bytes of an answer become U+FFFD",
        "NaN or Inf in the logits": "that row's turn fails with `numerical_error`, nobody else's",
        "device error": "every turn of the forward is tried once more alone; failing again is "
        "`device_failed`",
        "worker thread death": "every turn ends with `engine_unavailable` or "
        "`engine_restarting`; the engine is rebuilt, or the server leaves with an error",
        "engine stall": "an engine that has turns and moves none of them for its limit says "
        "where its threads are and is ended like one that died",
        "worker process death": "running turns fail with `engine_restarting`, waiting ones wait, "
        "sessions go on from their tokens",
    }
)

FEWER: Final[Mapping[str, str]] = MappingProxyType({})
"""Faults with fewer points than `WANTED`, and why."""

ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "crash and restart of the server": "[chaos](#chaos)",
        "torn or partial write": "[a simulated disk](#a-simulated-disk)",
        "disk full, EIO": "[a simulated disk](#a-simulated-disk)",
        "version or model mismatch of spilled KV": "[files of KV](#files-of-kv)",
    }
)
"""Faults that tests of another folder inject."""

NOT_YET: Final[Mapping[str, str]] = MappingProxyType({})
"""Faults that nothing injects, and why."""


def injections() -> dict[str, list[Injection]]:
    """What the tests of this folder declare, by fault."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"tests.faults.{path.stem}")
    found: dict[str, list[Injection]] = {fault: [] for fault in EXPECTED}
    # In the order of the files, whichever of them a test run has imported first.
    for injection in sorted(INJECTIONS.values(), key=lambda each: each.module):
        found[injection.fault].append(injection)
    return found
