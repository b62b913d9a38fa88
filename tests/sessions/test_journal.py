from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from session_server.core.session_events import SessionClosed, SessionUpdated, TurnCreated, TurnDelta
from session_server.sessions.journal import Journal, JournalLimits, OffsetLost
from session_server.sessions.replay import Replay


def delta(text: str, num_tokens: int = 0) -> TurnDelta:
    return TurnDelta("t", "i", text, tuple(range(num_tokens)))


def seqs(journal: Journal, after_seq: int) -> list[int]:
    return [found.seq for found in journal.read(after_seq)]


def test_entries_are_numbered_from_one_without_gaps() -> None:
    journal = Journal()
    assert [journal.append(delta("x")) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert seqs(journal, 0) == [1, 2, 3, 4, 5]
    assert seqs(journal, 3) == [4, 5]
    assert seqs(journal, 5) == []


def test_what_is_gone_or_from_another_epoch_is_said_to_be_lost() -> None:
    journal = Journal(JournalLimits(max_entries=3))
    for _ in range(10):
        journal.append(delta("x"))
    assert seqs(journal, 7) == [8, 9, 10]
    with pytest.raises(OffsetLost) as caught:
        journal.read(6)
    assert (caught.value.first_seq, caught.value.last_seq) == (8, 10)
    with pytest.raises(OffsetLost):
        journal.read(11)
    with pytest.raises(OffsetLost):
        journal.read(-1)
    assert Journal().epoch != journal.epoch


def test_bytes_are_bounded_and_the_newest_entry_always_stays() -> None:
    journal = Journal(JournalLimits(max_bytes=10_000))
    for _ in range(100):
        journal.append(delta("x" * 200, 50))
        assert journal.num_bytes <= 10_000
    journal.append(delta("x" * 1_000_000))
    assert seqs(journal, 100) == [101]


def test_metadata_counts_too() -> None:
    """At the price of an empty entry, a journal of 1 MiB would be one of 40 MB."""
    journal = Journal(JournalLimits(max_bytes=100_000))
    for number in range(1000):
        metadata = {f"{number}/{key}": "\N{OWL}" * 512 for key in range(16)}
        journal.append(SessionUpdated(60.0, metadata))
    assert 1 <= len(seqs(journal, journal.first_seq - 1)) <= 4


def test_old_entries_are_forgotten() -> None:
    now = [0.0]
    replay = Replay(max_bytes=1 << 20, max_age_s=10.0)
    journal = Journal(replay=replay, clock=lambda: now[0])
    for _ in range(5):
        journal.append(delta("x"))
        now[0] += 4.0
    replay.drop_old(now[0])
    assert journal.first_seq == 4
    assert replay.num_bytes == journal.num_bytes > 0
    replay.drop_old(now[0] + 1000)
    assert (journal.first_seq, journal.last_seq, replay.num_bytes) == (6, 5, 0)
    assert seqs(journal, 5) == []


@given(
    count=st.integers(0, 40),
    max_entries=st.integers(1, 40),
    after_seq=st.integers(0, 40),
    max_read=st.integers(1, 50),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_read_is_the_tail_or_a_loss_and_never_anything_else(
    count: int, max_entries: int, after_seq: int, max_read: int
) -> None:
    journal = Journal(JournalLimits(max_entries=max_entries))
    for index in range(count):
        journal.append(TurnCreated(str(index + 1), 0))
    kept = range(max(1, count - max_entries + 1), count + 1)
    try:
        found = journal.read(after_seq, max_entries=max_read)
    except OffsetLost:
        assert after_seq > count or after_seq + 1 < kept.start
    else:
        wanted = list(range(after_seq + 1, count + 1))[:max_read]
        assert [entry.seq for entry in found] == wanted
        assert [entry.entry for entry in found] == [TurnCreated(str(seq), 0) for seq in wanted]


def test_a_read_holds_a_bounded_number_of_bytes_and_at_least_one_entry() -> None:
    journal = Journal()
    for _ in range(4):
        journal.append(delta("x" * 100))
    size = journal.num_bytes // 4
    for max_bytes, num_entries in ((1, 1), (2 * size - 1, 1), (2 * size, 2), (2 * size + 1, 2)):
        assert [found.seq for found in journal.read(0, max_bytes=max_bytes)] == [1, 2][:num_entries]
        assert [found.seq for found in journal.read(2, max_bytes=max_bytes)] == [3, 4][:num_entries]


def test_many_readers_wake_on_one_entry_and_all_on_the_last() -> None:
    async def play() -> None:
        journal = Journal()
        readers = [asyncio.create_task(journal.wait(0)) for _ in range(5)]
        late = asyncio.create_task(journal.wait(7))
        await asyncio.sleep(0)
        assert not any(reader.done() for reader in readers)
        journal.append(delta("x"))
        assert await asyncio.gather(*readers) == [True] * 5
        assert await journal.wait(0)
        assert not late.done()
        journal.append(SessionClosed("client"))
        assert await late is False
        assert journal.is_closed
        assert await journal.wait(2) is False

    asyncio.run(play())


def test_a_reader_that_goes_leaves_nothing_behind() -> None:
    async def play() -> None:
        journal = Journal()
        reader = asyncio.create_task(journal.wait(0))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        journal.append(delta("x"))
        assert await journal.wait(0)

    asyncio.run(play())


def test_following_a_writer_misses_nothing() -> None:
    async def play() -> None:
        journal = Journal()

        async def read() -> list[int]:
            seen: list[int] = []
            while await journal.wait(seen[-1] if seen else 0):
                seen += seqs(journal, seen[-1] if seen else 0)
            return seen

        readers = [asyncio.create_task(read()) for _ in range(3)]
        for index in range(200):
            journal.append(delta("x"))
            if index % 7 == 0:
                await asyncio.sleep(0)
        journal.append(SessionClosed("client"))
        assert await asyncio.gather(*readers) == [list(range(1, 202))] * 3

    asyncio.run(play())
