"""Prompt lookup against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from session_server.engine import ngram
from session_server.engine.ngram import (
    MANY_ENDS,
    MAX_MATCH,
    MIN_MATCH,
    NEAR,
    WINDOW,
    look_up,
)


def by_definition(text: list[int], num_drafts: int) -> list[int]:
    best_end, best_len = None, 0
    for end in range(len(text) - 1):
        length = 0
        while length < min(MAX_MATCH, end + 1) and text[end - length] == text[-1 - length]:
            length += 1
        if length >= best_len:
            best_end, best_len = end, length
    if best_end is None or best_len < MIN_MATCH:
        return []
    guessed = list(text)
    for _ in range(num_drafts):
        best_end += 1
        guessed.append(guessed[best_end])
    return guessed[len(text) :]


@given(text=st.lists(st.integers(0, 3), max_size=40), num_drafts=st.integers(0, 6))
def test_it_is_what_followed_the_latest_longest_occurrence(
    text: list[int], num_drafts: int
) -> None:
    found = look_up(np.array(text, dtype=np.int32), num_drafts)
    assert found.tolist() == by_definition(text, num_drafts)


@pytest.mark.parametrize(("near", "many_ends"), [(3, 0), (12, 0), (12, 3), (60, 0), (60, 3)])
@given(data=st.data())
def test_it_is_the_same_however_the_ends_are_compared(
    near: int, many_ends: int, data: st.DataObject
) -> None:
    text = data.draw(st.lists(st.integers(0, 2), max_size=60))
    text += data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=10)) * data.draw(
        st.integers(0, 4)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "NEAR", near)
        patch.setattr(ngram, "MANY_ENDS", many_ends)
        found = look_up(np.array(text, dtype=np.int32), 4)
    assert found.tolist() == by_definition(text, 4)


LONG_TEXTS = {
    "one token": [7] * WINDOW,
    "three tokens": [1, 2, 3] * (WINDOW // 3),
    "the longest is far away": [*([7] * WINDOW), 8, *([7, 9, 7] * NEAR), 8, 7],
    "none is as long as can be": [*([7, 7, 7, 8] * MANY_ENDS * 2), 9, 7, 7, 7],
    "it is new": [*([7] * WINDOW), 8, 9],
}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_long_texts_are_searched_as_short_ones_are(text: list[int]) -> None:
    assert look_up(np.array(text, dtype=np.int32), 5).tolist() == by_definition(text, 5)


class Watched(np.ndarray[tuple[int], np.dtype[np.int32]]):
    """Tokens that count how many of them were asked for by their indices."""

    num_asked = 0

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, np.ndarray):
            Watched.num_asked += len(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_few_ends_are_compared_one_by_one(text: list[int]) -> None:
    Watched.num_asked = 0
    look_up(np.array(text, dtype=np.int32).view(Watched), 5)
    assert Watched.num_asked <= 2 * MANY_ENDS * MAX_MATCH, "near, and then in all of it"


def test_a_text_that_repeats_itself_is_guessed_to_go_on() -> None:
    period = [5, 6, 7]
    found = look_up(np.array(period * 3, dtype=np.int32), 7)
    assert found.tolist() == [5, 6, 7, 5, 6, 7, 5]


def test_new_text_is_not_guessed() -> None:
    assert len(look_up(np.arange(50, dtype=np.int32), 4)) == 0
    assert len(look_up(np.array([1, 2, 3, 9, 3], dtype=np.int32), 4)) == 0
