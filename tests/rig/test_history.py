"""The checker believes a true story, and none of the false ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.rig.history import End, SessionLog, violations


@dataclass
class Story:
    """Three turns: one completed, one cancelled and kept, one cancelled and dropped."""

    log: SessionLog
    journal: list[dict[str, Any]]
    items: list[dict[str, Any]]
    num_tokens: int

    def contradictions(self) -> list[str]:
        return list(violations(self.log, self.journal, self.items, self.num_tokens))


def end(kind: str, seq: int, turn_id: str, text: str, *, usage: tuple[int, int]) -> dict[str, Any]:
    return {
        "type": kind,
        "seq": seq,
        "turn_id": turn_id,
        "item": {"content": text},
        "usage": dict(zip(("input_tokens", "output_tokens"), usage, strict=True)),
    }


def story() -> Story:
    journal: list[dict[str, Any]] = [
        {"type": "turn.created", "seq": 1, "turn_id": "a"},
        {"type": "turn.progress", "seq": 2, "turn_id": "a"},
        {"type": "turn.delta", "seq": 5, "turn_id": "a", "text": "one ", "n": 3},
        {"type": "turn.delta", "seq": 6, "turn_id": "a", "text": "two", "n": 1},
        end("turn.completed", 7, "a", "one two", usage=(3, 4)),
        {"type": "turn.created", "seq": 8, "turn_id": "b"},
        {"type": "turn.delta", "seq": 9, "turn_id": "b", "text": "thr", "n": 1},
        end("turn.cancelled", 10, "b", "thr", usage=(9, 1)) | {"kept_partial": True},
        {"type": "turn.created", "seq": 11, "turn_id": "c"},
        end("turn.cancelled", 12, "c", "", usage=(12, 0)) | {"kept_partial": False},
    ]
    items = [
        {"turn_id": "a", "role": "raw", "content": "x", "end_len": 3},
        {"turn_id": "a", "role": "assistant", "content": "one two", "end_len": 7},
        {"turn_id": "b", "role": "assistant", "content": "thr", "end_len": 10},
    ]
    log = SessionLog()
    for turn_id, num_inputs in (("a", 3), ("b", 2), ("c", 2)):
        ask = log.ask(turn_id, {"input_ids": [7] * num_inputs})
        terminal = next(f for f in journal if f["turn_id"] == turn_id and "usage" in f)
        if turn_id != "c":
            assert log.hear(turn_id, End.of_frame(terminal)) == []
            log.ends_heard[terminal["seq"]] = (terminal["type"], turn_id)
        ask.pieces = {5: "one "} if turn_id == "a" else {}
    return Story(log, journal, items, 10)


def test_a_true_story_is_believed_with_and_without_its_unknown_ends() -> None:
    assert story().contradictions() == []
    forgetful = story()
    for ask in forgetful.log.asks.values():
        ask.end = ask.heard = None
    assert forgetful.contradictions() == []
    assert [ask.turn_id for ask in forgetful.log.unknown] == ["a", "b", "c"]


def drop(index: int) -> Callable[[Story], object]:
    return lambda s: s.journal.pop(index)


def put(index: int, **fields: Any) -> Callable[[Story], object]:
    return lambda s: s.journal[index].update(fields)


def add_again(index: int) -> Callable[[Story], object]:
    def change(s: Story) -> None:
        s.journal.append(copy.deepcopy(s.journal[index]) | {"seq": s.journal[-1]["seq"] + 1})

    return change


def swap_a_and_b(s: Story) -> None:
    """The second turn runs first: asked for after the first had been answered."""
    a, b = s.journal[:5], s.journal[5:8]
    b[2]["usage"]["input_tokens"], a[4]["usage"]["input_tokens"] = 2, 6
    s.journal = [*b, *a, *s.journal[8:]]
    for seq, frame in enumerate(s.journal, start=1):
        frame["seq"] = seq
    s.log.ends_heard.clear()
    s.items = [s.items[2] | {"end_len": 3}, s.items[1] | {"end_len": 10}]
    for ask in s.log.asks.values():
        ask.end, ask.pieces = None, {}


LIES: dict[str, tuple[Callable[[Story], object], str]] = {
    "a frame is missing": (drop(8), "turn.cancelled 12 after 10"),
    "an end is missing": (drop(9), "c: ends"),
    "an end comes twice": (add_again(4), "a: ends"),
    "a turn is created twice": (add_again(0), "a: begins"),
    "a delta is missing": (drop(3), "a: deltas say"),
    "a token is counted twice": (put(2, n=4), "a: deltas say"),
    "another text than was told": (put(3, text="too"), "a: deltas say"),
    "the client heard another beginning": (
        lambda s: s.log.asks["a"].pieces.update({2: "zero "}),
        "a: heard",
    ),
    "an end heard at a number of something else": (
        lambda s: s.log.ends_heard.update({6: ("turn.completed", "a")}),
        "frame 6 was",
    ),
    "a told end is not in the journal": (
        lambda s: [s.journal.pop(5) for _ in range(3)],
        "b: told",
    ),
    "a context too long by a token": (
        lambda s: s.journal[7]["usage"].update(input_tokens=10),
        "context of 10 tokens, not 9",
    ),
    "a dropped turn left its text": (
        lambda s: s.journal[9]["item"].update(content="oops"),
        "nothing stays of it",
    ),
    "the history lacks a kept turn": (lambda s: s.items.pop(), "the history shows"),
    "the history keeps a dropped turn": (
        lambda s: s.items.append(
            {"turn_id": "c", "role": "assistant", "content": "", "end_len": 12}
        ),
        "the history shows",
    ),
    "the history has another length": (
        lambda s: setattr(s, "num_tokens", 12),
        "the history has 12 tokens",
    ),
    "a turn that nobody asked for": (lambda s: s.log.asks.pop("c"), "nobody asked"),
    "turns in another order than they were asked": (swap_a_and_b, "ran before"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_false_story_is_not_believed(name: str) -> None:
    change, words = LIES[name]
    false = story()
    change(false)
    found = false.contradictions()
    assert any(words in line for line in found), found


def test_two_ends_of_one_turn_contradict_each_other_at_once() -> None:
    log = SessionLog()
    log.ask("a", {})
    first = End("completed", "x", 3, 1)
    assert log.hear("a", first) == log.hear("a", first) == []
    assert log.hear("a", End("cancelled", "x", 3, 1))
