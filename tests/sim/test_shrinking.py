"""From a failing seed to a handful of operations, and back from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache.radix import RadixCache
from cache.radix_node import RadixNode
from tests.sim.config import draw_config
from tests.sim.failure import SimFailure
from tests.sim.shrink import minimise, shrink
from tests.sim.simulation import replay, run, simulate
from tests.sim.story import Story
from tests.sim.trace import Trace


def test_minimising_finds_the_two_that_matter() -> None:
    tried: list[list[int]] = []

    def fails(items: list[int]) -> bool:
        tried.append(items)
        return {17, 71} <= set(items)

    assert minimise(range(100), fails) == [17, 71]
    assert len(tried) < 200


def test_minimising_gives_nothing_where_nothing_is_needed() -> None:
    assert minimise([1, 2, 3], lambda _: True) == []


def forget_the_upper_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split whose new node is not locked, though the receipts below pass through it."""
    split = RadixCache._split

    def forgetful(self: RadixCache, node: RadixNode, length: int) -> RadixNode:
        upper = split(self, node, length)
        upper.lock_ref = 0
        return upper

    monkeypatch.setattr(RadixCache, "_split", forgetful)


def first_failure() -> SimFailure:
    for seed in range(60):
        if draw_config(seed).front == "direct":
            try:
                run(seed)
            except SimFailure as failure:
                return failure
    raise AssertionError("nothing was found")


def test_a_split_that_forgets_a_lock_shrinks_to_a_few_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget_the_upper_half(monkeypatch)
    failure = first_failure()
    tries: list[int] = []
    small = shrink(failure, on_try=lambda count, _: tries.append(count))
    assert small.layer == failure.layer
    assert len(small.trace.ops) <= 8 < len(failure.trace.ops)
    assert tries == list(range(1, len(tries) + 1))
    assert {op["op"] for op in small.trace.ops} <= {"open", "submit", "step", "cancel", "close"}


def test_a_trace_read_from_a_file_fails_again_at_the_same_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget_the_upper_half(monkeypatch)
    failure = first_failure()
    path = tmp_path / "trace.jsonl"
    failure.trace.write(path)
    with pytest.raises(SimFailure) as again:
        replay(Trace.read(path))
    assert (again.value.layer, again.value.step) == (failure.layer, failure.step)
    assert again.value.message == failure.message


def test_a_story_has_a_line_per_step_and_per_operation() -> None:
    config = draw_config(next(s for s in range(60) if draw_config(s).front == "direct"))
    with pytest.raises(SimFailure) as found:
        simulate_with_a_wrong_answer(config.seed)
    story = Story(10_000)
    replay(found.value.trace, story)
    steps = [line for line in story.lines if not line.lstrip().startswith(">")]
    numbers = [int(line.split()[0]) for line in steps]
    assert numbers == list(range(1, len(numbers) + 1))
    assert any("> open" in line for line in story.lines)
    assert any("!length" in line for line in steps)


def simulate_with_a_wrong_answer(seed: int) -> None:
    """Not a bug of the server: a way to get a trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.sim.stage.Stage.check_empty", wrong)
        simulate(draw_config(seed))


def wrong(self: object) -> None:
    raise AssertionError("on purpose")


@pytest.mark.parametrize("text", ["", "{}", '{"config": {}}', "no json"])
def test_a_file_that_is_no_trace_says_so(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a trace"):
        Trace.read(path)
