"""docs/limits.md states every bound there is."""

from __future__ import annotations

from tests.docs import limits
from tests.docs.constants import GROUPS
from tests.docs.pacing import BOUND_NOTHING
from tests.docs.wire_fields import length_text, number, range_text, sized


def test_every_numeric_setting_says_its_unit_its_range_and_what_happens_there() -> None:
    incomplete = []
    for part, name, field in limits.numeric_settings():
        bound = limits.bound_of(field)
        if bound is None or not bound.at_limit or not limits.range_of(field):
            incomplete.append(f"{part}.{name}")
    assert not incomplete, "annotate them in session_server/config.py: Bound(unit, at_limit)"


def test_every_bound_of_what_serves_is_named() -> None:
    assert limits.missing_constants() == [], (
        "add them to tests/docs/constants.py, or to BOUND_NOTHING in tests/docs/pacing.py"
    )


def test_what_is_said_to_bound_nothing_is_there_and_its_name_says_nothing_else() -> None:
    found = limits.constants_in_code()
    assert found >= BOUND_NOTHING
    assert not [path for path in BOUND_NOTHING if limits.is_bound_name(path.partition(":")[2])]


def test_every_constant_named_is_there_and_named_once() -> None:
    paths = [constant.path for group in GROUPS.values() for constant in group]
    assert len(paths) == len(set(paths))
    assert all(constant.value > 0 for group in GROUPS.values() for constant in group)


def test_a_bound_is_found_by_its_name() -> None:
    names = ("MAX_HEADERS", "_MAX_TURNS", "HEADER_TIMEOUT_S", "_CANCEL_GRACE_S")
    assert all(map(limits.is_bound_name, names))
    assert not limits.is_bound_name("MAXIMUM")
    assert not limits.is_bound_name("TICK_S")


def test_a_bound_added_to_the_code_is_missing_from_the_page() -> None:
    found = limits.constants_in_code()
    assert "session_server.web.http_guard:MAX_HEADERS" in found
    assert "session_server.engine.trace:NUM_STEPS" in found
    assert not any(path.startswith("session_server.demo") for path in found)


def test_numbers_and_ranges_are_written_for_people() -> None:
    assert [number(n) for n in (0.25, 16, 10_000, (1 << 31) - 1, 1 << 30)] == [
        "0.25", "16", "10,000", "2^31 - 1", "2^30",
    ]  # fmt: skip
    assert [sized(1 << power, "bytes") for power in (16, 26, 40)] == ["64 KiB", "64 MiB", "1 TiB"]
    assert sized(1000, "bytes") == "1000 bytes"
    assert range_text(0, None, 1, None) == ", 0 to 1"
    assert range_text(None, 0, None, 1) == ", above 0 to below 1"
    assert length_text(None, 16, "entries") == " of up to 16 entries"
    assert length_text(1, 256, "entries") == " of 1 to 256 entries"
