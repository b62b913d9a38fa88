"""Hundreds of bad connections, and nothing stuck, lost, doubled or left over.

A proof makes a thousand, `make chaos` five thousand.
"""

from __future__ import annotations

import asyncio

import pytest

from session_server.local_server import LocalServer
from tests.chaos.load import FLAGS, run_load
from tests.depth import at_depth
from tests.rig.proxy import Fault

CONNECTIONS = at_depth(180, proof=1000)
MAX_GROWTH_MIB = 64.0
"""Of the server's process over the whole run; it grows while the first wave warms it up."""

MUST_HAPPEN = {
    *("resumed", "ghosts", "take_over", "hang_up", "storm", "babble", "speak_ahead", "vanish"),
    *("first connection closed 4409", "library reconnects", "library two_at_once"),
    *("rest stream", "rest hang_up", "rest cancel 200", "refused turn_not_active"),
    *("turn.completed", "turn.cancelled and kept", "turn.cancelled and dropped"),
}


@pytest.mark.timeout(1200)
def test_bad_connections_leave_every_client_told_the_truth_and_nothing_held() -> None:
    lines: list[str] = []
    with LocalServer(FLAGS, on_line=lines.append) as server:
        report = asyncio.run(run_load(server, connections=CONNECTIONS, seed=1))
        assert server.stop() == 0
    print(report)
    assert report.problems == []
    assert lines == [f"listening on {server.url}"], "whoever loses a line writes none into the log"

    assert report.connections >= CONNECTIONS
    did = {*(fault.value for fault in Fault), "stall", "split", "repeated"}
    assert did <= set(report.did)
    missing = {what for what in MUST_HAPPEN if not report.saw.get(what)}
    assert not missing, missing

    before, after = report.before, report.after
    assert after.sessions == before.sessions == 0
    assert after.held_pages == before.held_pages == 0
    assert (after.tasks, after.descriptors) == (before.tasks, before.descriptors)
    assert after.rows_free == before.rows_free
    free, pages = report.pages_after_flush
    assert free == pages - 1, "all but the padding page"
    assert report.checks["runs"] > 0
    assert report.checks["violations"] == 0, report.checks
    assert after.server_mib - before.server_mib < MAX_GROWTH_MIB
