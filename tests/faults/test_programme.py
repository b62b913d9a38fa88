"""The programme is complete: no fault without tests, no test that hides, none with few points."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.points import INJECTIONS
from tests.faults.programme import EXPECTED, FEWER, NOT_YET, WANTED, injections

DECLARED_HERE = Path(__file__).name


def test_every_fault_is_injected_often_enough_or_says_why_not() -> None:
    for fault, tests in injections().items():
        points = sum(test.points for test in tests)
        assert (points >= WANTED) != (fault in FEWER), (fault, points)
    assert not EXPECTED.keys() & NOT_YET.keys()
    assert FEWER.keys() <= EXPECTED.keys()


def test_every_test_of_this_folder_says_what_it_injects() -> None:
    injections()
    for path in Path(__file__).parent.glob("test_*.py"):
        if path.name != DECLARED_HERE:
            names = set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf-8"), re.M))
            assert names, path.name
            assert names <= INJECTIONS.keys(), path.name
