"""The journals of all sessions under one bound."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from session_server.core.session_events import SessionClosed, TurnDelta
from session_server.sessions.footprint import entry_bytes
from session_server.sessions.journal import Journal, JournalLimits
from session_server.sessions.replay import (
    ENTRIES_PER_SLICE,
    OVERSIZE_GRACE_S,
    SWEPT_PER_ENTRY,
    Replay,
)

DELTA = TurnDelta("t", "i", "x" * 100, ())
SIZE = entry_bytes(DELTA)


class Journals:
    """Some journals that share a bound, and the time."""

    def __init__(self, count: int, *, max_bytes: int, max_age_s: float = 1e9) -> None:
        self.now_s = 0.0
        self.replay = Replay(max_bytes=max_bytes, max_age_s=max_age_s)
        self.all = [self.new() for _ in range(count)]

    def new(self, max_bytes: int = 1 << 30) -> Journal:
        limits = JournalLimits(max_bytes=max_bytes)
        return Journal(limits, replay=self.replay, clock=lambda: self.now_s)

    def write(self, *indexes: int) -> None:
        for index in indexes:
            self.now_s += 1.0
            self.all[index].append(DELTA)

    @property
    def kept(self) -> list[int]:
        return [journal.num_entries for journal in self.all]


def test_the_oldest_entry_of_all_goes_first_and_exactly_at_the_bound() -> None:
    journals = Journals(3, max_bytes=5 * SIZE)
    journals.write(0, 1, 1, 0, 2)
    assert (journals.kept, journals.replay.num_bytes) == ([2, 2, 1], 5 * SIZE)
    journals.write(2)
    assert (journals.kept, journals.replay.num_bytes) == ([1, 2, 2], 5 * SIZE)
    journals.write(2, 2)
    assert journals.kept == [1, 0, 4]
    journals.write(1)
    assert journals.kept == [0, 1, 4]


def test_an_entry_is_never_dropped_for_itself() -> None:
    journals = Journals(2, max_bytes=SIZE // 2)
    journals.write(0)
    assert journals.kept == [1, 0]
    journals.write(1)
    assert journals.kept == [0, 1]


def test_a_journal_that_dropped_entries_by_itself_is_not_the_oldest_any_more() -> None:
    journals = Journals(2, max_bytes=6 * SIZE)
    journals.all[0] = journals.new(max_bytes=2 * SIZE)
    journals.write(0, 1, 0, 0, 0)
    assert journals.kept == [2, 1]
    journals.write(1, 1, 1, 1)
    assert journals.kept == [2, 4]
    journals.now_s += 1.0
    assert journals.all[1].oldest_s == 6.0


def test_work_is_done_for_entries_that_are_dropped_and_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of a thousand journals is looked at while there is room, or nothing is due."""
    journals = Journals(1000, max_bytes=1000 * SIZE, max_age_s=5000.0)
    journals.write(*range(1000))
    looks: list[Journal] = []
    first_seq = Journal.first_seq.fget
    assert first_seq is not None

    def look(journal: Journal) -> int:
        looks.append(journal)
        return first_seq(journal)

    monkeypatch.setattr(Journal, "first_seq", property(look))
    journals.replay.drop_old(journals.now_s)
    assert looks == [journals.all[0]]
    looks.clear()
    journals.write(500)
    assert looks == [journals.all[0]]
    looks.clear()
    journals.replay.drop_old(5003.0)
    assert looks == journals.all[1:3]
    assert journals.replay.num_bytes == 999 * SIZE


def test_what_is_due_all_at_once_is_dropped_a_little_at_a_time() -> None:
    journals = Journals(1, max_bytes=1 << 30, max_age_s=10.0)
    journals.write(*[0] * (2 * ENTRIES_PER_SLICE + 1))
    left = []
    while journals.replay.drop_old(1e6):
        left.append(journals.all[0].num_entries)
    assert left == [ENTRIES_PER_SLICE + 1, 1]
    assert journals.kept == [0]


def test_a_large_entry_drops_a_bounded_number_of_others_at_a_time() -> None:
    num = 3 * ENTRIES_PER_SLICE
    journals = Journals(2, max_bytes=num * SIZE)
    journals.write(*[0] * num)
    large = TurnDelta("t", "i", "x" * (100 + num * SIZE - 2 * SIZE), ())
    journals.all[1].append(large)
    assert journals.kept == [2 * ENTRIES_PER_SLICE, 1]
    journals.write(1)
    assert journals.kept == [ENTRIES_PER_SLICE, 2], "what is written meanwhile drops a slice too"
    assert journals.replay.drop_old(0.0)
    assert journals.kept == [0, 2]
    while journals.replay.drop_old(0.0):
        pass
    assert journals.kept == [0, 2]
    assert journals.replay.num_bytes <= num * SIZE


@pytest.mark.parametrize("is_oversize", [False, True])
def test_a_large_entry_drops_a_bounded_number_of_its_own_journal_at_a_time(
    is_oversize: bool,
) -> None:
    num = 3 * ENTRIES_PER_SLICE
    journals = Journals(0, max_bytes=1 << 30)
    journal = journals.new(max_bytes=num * SIZE)
    for _ in range(num):
        journal.append(DELTA)
    journal.append(TurnDelta("t", "i", "x" * ((num - 1 + 2 * is_oversize) * SIZE), ()))
    if is_oversize:
        while journals.replay.drop_old(OVERSIZE_GRACE_S - 0.1):
            pass
        assert journal.num_entries == num + 1, "who reads now gets it"
    kept = [journal.num_entries]
    while journals.replay.drop_old(OVERSIZE_GRACE_S):
        kept.append(journal.num_entries)
    assert max(before - after for before, after in pairwise(kept)) == ENTRIES_PER_SLICE
    assert journal.num_entries == 1 - is_oversize


def test_entries_dropped_by_their_own_journals_leave_nothing_behind() -> None:
    journals = Journals(1, max_bytes=1 << 30)
    journals.all[0] = journals.new(max_bytes=2 * SIZE)
    journals.write(*[0] * 10_000)
    assert journals.replay._num_elements < 2000
    journals.all[0] = journals.new()
    journals.write(*[0] * 5000)
    assert journals.replay.num_bytes == 5000 * SIZE
    del journals.all[0]
    assert journals.replay.num_bytes == 0


def test_nothing_is_swept_while_no_element_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    journals = Journals(1, max_bytes=1 << 30)
    sweeps: list[None] = []
    monkeypatch.setattr(Replay, "_sweep", lambda _: sweeps.append(None))
    journals.write(*[0] * 3000)
    assert sweeps == []


def test_a_sweep_looks_at_a_few_elements_with_each_entry_and_keeps_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journals = Journals(4, max_bytes=1 << 30)
    journals.write(*[0, 1] * 4000)
    journals.all[0] = journals.new()  # the elements of the other are void now
    looks, first_seq = [0], Journal.first_seq.fget
    assert first_seq is not None

    def look(journal: Journal) -> int:
        looks[0] += 1
        return first_seq(journal)

    monkeypatch.setattr(Journal, "first_seq", property(look))
    journals.all[3] = journals.new(max_bytes=SIZE)
    most, elements = 0, [journals.replay._num_elements]
    for _ in range(2500):
        looks[0] = 0
        journals.write(3)
        most = max(most, looks[0])
        elements.append(journals.replay._num_elements)
    assert 0 < most <= SWEPT_PER_ENTRY
    assert max(elements) < 2 * 4001 + 1100
    assert min(elements[1000:]) < 5500, "swept"
    assert journals.kept == [0, 4000, 0, 1]
    journals.replay.max_bytes = 10 * SIZE
    journals.write(2)
    while journals.replay.drop_old(0.0):
        pass  # the rest of so many goes by the slice
    assert journals.kept == [0, 8, 1, 1]
    journals.write(2, 2, 2, 2, 2, 2, 2, 2)
    assert journals.kept == [0, 0, 9, 1]


def test_an_entry_larger_than_its_journal_may_be_goes_once_it_could_be_read() -> None:
    journals = Journals(0, max_bytes=1 << 30)
    journal = journals.new(max_bytes=1000)
    journal.append(DELTA)
    journals.now_s = 5.0
    journal.append(TurnDelta("t", "i", "x" * 2000, ()))
    journals.replay.drop_old(5.0 + OVERSIZE_GRACE_S - 0.1)
    assert [found.seq for found in journal.read(1)] == [2]
    journals.replay.drop_old(5.0 + OVERSIZE_GRACE_S)
    assert (journal.num_entries, journals.replay.num_bytes) == (0, 0)
    journal.append(TurnDelta("t", "i", "x" * 2000, ()))
    journal.append(DELTA)
    journals.replay.drop_old(1000.0)
    assert [found.seq for found in journal.read(3)] == [4]


def test_what_is_around_an_entry_larger_than_its_journal_may_be_is_read_with_it() -> None:
    """A turn's last delta, its end with many scores and the session's end come in one go."""
    journals = Journals(0, max_bytes=1 << 30)
    journal = journals.new(max_bytes=1000)
    journal.append(DELTA)
    journal.append(TurnDelta("t", "i", "x" * 2000, ()))
    journal.append(SessionClosed("single_turn"))
    assert [found.seq for found in journal.read(0)] == [1, 2, 3]
    journals.replay.drop_old(OVERSIZE_GRACE_S)
    assert journal.first_seq == 3


def test_one_entry_larger_than_its_journal_may_be_is_kept_at_a_time() -> None:
    journals = Journals(0, max_bytes=1 << 30)
    journal = journals.new(max_bytes=1000)
    for now_s in (0.0, 9.0):
        journals.now_s = now_s
        journal.append(DELTA)
        journal.append(TurnDelta("t", "i", "x" * 2000, ()))
    assert [found.seq for found in journal.read(2)] == [3, 4]
    journals.replay.drop_old(OVERSIZE_GRACE_S)
    assert journal.first_seq == 3, "the grace of another entry is over"
    journals.replay.drop_old(9.0 + OVERSIZE_GRACE_S)
    assert journal.num_entries == 0


def test_the_end_of_a_session_is_kept_as_long_as_somebody_reads_it() -> None:
    journals = Journals(2, max_bytes=2 * SIZE, max_age_s=10.0)
    journals.write(0, 0)
    closed = journals.all[0]
    closed.append(SessionClosed("client"))
    journals.write(1, 1, 1)
    journals.replay.drop_old(1e6)
    assert [found.entry for found in closed.read(2)] == [SessionClosed("client")]
    assert journals.replay.num_bytes == closed.num_bytes
    del closed, journals.all[:]
    assert journals.replay.num_bytes == 0


@given(
    writes=st.lists(st.integers(0, 4), max_size=60),
    bound=st.integers(1, 20),
    own=st.integers(1, 10),
    dead=st.integers(0, 60),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_what_is_kept_is_what_a_list_of_all_entries_would_keep(
    writes: list[int], bound: int, own: int, dead: int
) -> None:
    journals = Journals(5, max_bytes=bound * SIZE)
    journals.all[0] = journals.new(max_bytes=own * SIZE)
    kept: list[int] = []
    for number, index in enumerate(writes):
        if number == dead:
            journals.all[4] = journals.new()
            kept = [each for each in kept if each != 4]
        journals.write(index)
        kept.append(index)
        if kept.count(0) > own:
            kept.remove(0)
        del kept[: max(0, len(kept) - bound)]
        assert journals.kept == [kept.count(each) for each in range(5)]
        assert journals.replay.num_bytes == len(kept) * SIZE
