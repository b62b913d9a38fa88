"""Prompt lookup against its definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from session_server.engine.ngram import MAX_MATCH, MIN_MATCH, look_up


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


def test_a_text_that_repeats_itself_is_guessed_to_go_on() -> None:
    period = [5, 6, 7]
    found = look_up(np.array(period * 3, dtype=np.int32), 7)
    assert found.tolist() == [5, 6, 7, 5, 6, 7, 5]


def test_new_text_is_not_guessed() -> None:
    assert len(look_up(np.arange(50, dtype=np.int32), 4)) == 0
    assert len(look_up(np.array([1, 2, 3, 9, 3], dtype=np.int32), 4)) == 0
