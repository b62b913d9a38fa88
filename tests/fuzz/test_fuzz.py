"""A slice of `python -m tests.fuzz`."""

from __future__ import annotations

import asyncio

import pytest

from tests.fuzz.__main__ import fuzz_wire
from tests.fuzz.protocols import protocols

SHOTS = protocols(7)


@pytest.mark.parametrize("name", SHOTS)
def test_no_frame_makes_a_protocol_raise(name: str) -> None:
    for _ in range(2_000):
        SHOTS[name]()


def test_no_request_or_frame_is_answered_as_a_bug() -> None:
    shots = asyncio.run(fuzz_wire(1_200, seed=7))
    assert not shots.problems
    assert {"200", "400", "404"} <= set(shots.answers)
