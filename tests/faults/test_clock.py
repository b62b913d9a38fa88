"""Clocks jump: the wall clock decides nothing, and a monotonic one that leaps harms nobody."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from session_server.sessions.journal import JournalLimits
from session_server.sessions.quotas import SessionLimits
from tests.faults.exchange import BEHIND, SIZES, assert_completed, exchange
from tests.faults.points import Points, injects
from tests.rig.moments import Rig, at_every_moment

ROOT = Path(__file__).resolve().parents[2]
CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "gmtime"),
    ("time", "localtime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
}
MAY_SHOW_THE_TIME = {
    ("session_server/wiring.py", "make_services"): "when the model was loaded, for /v1/models",
    ("session_server/metrics/tracing.py", "__init__"): "when the spans of a trace began",
    ("session_server/sessions/opening.py", "new"): "created_at, and the template's date",
    ("session_server/sessions/opening.py", "again"): "where a journal begins to count",
    ("session_server/sessions/store/session_store.py", "__init__"): (
        "how long no server ran: `StoreClock` believes it, and some time later if that is much"
    ),
    ("session_server/sessions/store/session_store.py", "in_directory"): "the same",
    ("session_server/session_command.py", "_line_of"): "what is left of a session's time",
    (
        "session_server/sessions/store/examination.py",
        "_sessions",
    ): "how many sessions of a store have expired",
    ("session_server/session_command.py", "_import"): "when a session was imported",
    ("session_server/sessions/response_turns.py", "_measure"): "the template's date, in a count",
    (
        "session_server/runner/segment_files.py",
        "__init__",
    ): "when files of KV were used, for their places",
    ("session_server/key_command.py", "run"): "the date in the comment of a key",
    ("session_server/web/websocket.py", "_first_message_credential"): "server_time of a pong",
    ("session_server/web/websocket.py", "_read"): "server_time of a pong",
}
"""Functions of the server that read the wall clock, and what they show it for."""

DEVELOPERS = ("session_server/bench", "session_server/demo")


def wall_clocks() -> Iterator[tuple[str, str]]:
    """(file, function) of every reading of the wall clock in the server."""
    for package in ("cache", "session_server"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(DEVELOPERS):
                continue
            for function in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from ((name, function.name) for _ in readings(function))


def readings(function: ast.AST) -> Iterator[ast.Attribute]:
    """Where a function names a wall clock."""
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in CLOCKS:
                yield node


@injects("clock jump", "every reading of the wall clock in the server", points=6)
def test_the_wall_clock_is_shown_and_decides_nothing(points: Points) -> None:
    found = set(wall_clocks())
    assert found == MAY_SHOW_THE_TIME.keys()
    points.strike(len(found))


@injects("clock jump", "the monotonic clocks leap at every moment, forward and back", points=100)
def test_a_clock_that_leaps_costs_idle_sessions_at_most(points: Points) -> None:
    limits = SessionLimits(journal=JournalLimits(max_age_s=1e12))
    for leap_s in (1e7, -1e7):
        with Rig(SIZES[0], limits=limits) as rig:
            for _ in at_every_moment(rig, exchange(rig)):
                rig.submit("mine", BEHIND)
                rig.now_s += leap_s
                rig.engine.now_s += leap_s
                rig.loop.skipped_s += max(0.0, leap_s)
                rig.manager.tick()
                rig.forget_closed()  # a session that was idle for so long has expired
                rig.rest()
                assert_completed(rig, "mine", "main")
                assert_completed(rig, "mine", "behind")
                rig.assert_recovered()
                points.strike()
