"""What is large is written in pieces, and read in slices of so many bytes."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from session_server.core.errors import ServerBusy
from session_server.core.session_events import ConversationItem
from session_server.sessions import session_logs
from session_server.sessions.history_change import AnswersChange, HistoryChange, ItemsChange
from session_server.sessions.opening import history_modes
from session_server.sessions.session import LogPlace, Session
from session_server.sessions.store import pieces, session_store
from session_server.sessions.store.pieces import MAX_ENTRY_BYTES, encode_pieces
from session_server.sessions.store.records import EndRecord, LogEntry, decode_entry, encode_entry
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.store.writer import Told, Write
from session_server.sessions.transcript import Transcript
from tests.sessions.slices import Slices
from tests.sessions.test_stored_sessions import Disk, state_of
from tests.sessions.world import OWNER, World, model_text, turn

NUM_TURNS = 400
SMALL = 4096
"""Bytes of an entry here, so that a session of some hundred turns is a large one."""


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_ENTRY_BYTES", SMALL)
    monkeypatch.setattr(pieces, "_PIECE_BYTES", SMALL - 1024)
    monkeypatch.setattr(session_store, "BYTES_AT_ONCE", SMALL)


def rewritten(world: World, name: str) -> None:
    """Have a session written whole."""
    session = session_of(world, name)
    assert session.life.log is not None
    session.life.log.is_behind = True
    world.manager._flow.conclusion.logs.touch(session)
    world.do(world.manager.stored())


def session_of(world: World, name: str) -> Session:
    session = world.manager._sessions.find(OWNER, name)
    assert session is not None
    return session


def entries_of(store: SessionStore, name: str) -> list[bytes]:
    row = store.find(OWNER.owner_id, name)
    assert row is not None
    found = store._database.entries(row.number)
    assert len(found) == row.num_entries
    return found


@pytest.mark.usefixtures("small")
def test_a_large_session_is_written_in_entries_of_a_bounded_size_and_read_so(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        for number in range(NUM_TURNS):
            world.run(name, turn(f"t{number}", (5, 6), max_tokens=2))
        rewritten(world, name)
        state = state_of(world, name)
        whole = entries_of(disk.store, name)
        place = session_of(world, name).life.log
        assert place is not None
        assert place.size[:2] == (len(whole), sum(map(len, whole)))
        assert max(map(len, whole)) <= SMALL
        assert len(whole) > 10
        world.run(name, turn("later", (5, 6), max_tokens=2))
        assert entries_of(disk.store, name)[:-1] == whole, "what is cut is not written again"
        state = state_of(world, name)

    num_bytes, decode = Slices(), session_store.decode_entry

    def counted(data: bytes) -> LogEntry:
        num_bytes.count(len(data))
        return decode(data)

    monkeypatch.setattr(session_store, "decode_entry", counted)

    async def load(world: World) -> None:
        async with num_bytes.watched():
            await world.manager.load(OWNER, name)

    with disk.world() as world:
        with pytest.raises(ServerBusy):
            world.manager.get(OWNER, name)
        world.do(load(world))
        assert num_bytes.total == sum(map(len, whole)) + len(entries_of(disk.store, name)[-1])
        assert num_bytes.most < 2 * SMALL
        assert state_of(world, name) == state


@pytest.mark.usefixtures("small")
def test_few_entries_that_are_large_make_a_long_session(disk: Disk) -> None:
    """Its entries are fewer than are read at once, but not their bytes."""
    with disk.world() as world:
        name = world.create(is_stored=True)
        for number in range(6):
            world.run(name, turn(f"t{number}", "Hello " * 150, max_tokens=2))
        assert len(entries_of(disk.store, name)) < session_store.ENTRIES_AT_ONCE
        state = state_of(world, name)
    with disk.world() as world:
        with pytest.raises(ServerBusy):
            world.manager.get(OWNER, name)
        world.do(world.manager.load(OWNER, name))
        assert state_of(world, name) == state


def ends(num: int) -> tuple[EndRecord, ...]:
    return tuple(
        EndRecord(key, bytes(16), "stop", "", key, key, 5, 0, 2, 0, 0, 1.0) for key in range(num)
    )


def items(sizes: list[int]) -> tuple[ConversationItem, ...]:
    return tuple(
        ConversationItem(id=f"i_{n}", turn_id=f"t{n}", role="user", content="é" * size, end_len=n)
        for n, size in enumerate(sizes)
    )


def entry_of(num_tokens: int, sizes: list[int], num_answers: int, num_turns: int) -> LogEntry:
    """A whole conversation."""
    change = HistoryChange(
        num_kept=0,
        tokens=(bytes(range(251)) * num_tokens)[: 4 * num_tokens],
        items=ItemsChange(0, items(sizes), len(sizes) + 2),
        answers=AnswersChange(0, tuple(range(num_answers)), tuple(range(num_answers))),
        tools=("tool",) if num_turns else None,
        answer_len=num_tokens // 2,
        is_end_replaced=num_answers > 0,
        num_open=len(sizes) // 2,
    )
    return LogEntry(change, ends(num_turns))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_tokens=st.sampled_from([0, 1, 3, 16_000, 16_128, 16_129, 70_000]),
    sizes=st.lists(st.sampled_from([0, 10, 9_000, 40_000]), max_size=12),
    num_answers=st.sampled_from([0, 1, 2, 9_000]),
    num_turns=st.sampled_from([0, 1, 700, 2_000]),
    has_before=st.booleans(),
)
def test_pieces_have_the_effect_of_the_whole(
    *, num_tokens: int, sizes: list[int], num_answers: int, num_turns: int, has_before: bool
) -> None:
    entry = entry_of(num_tokens, sizes, num_answers, num_turns)
    found = encode_pieces(entry)
    applied = [decode_entry(data) for data in found]
    assert all(len(data) <= MAX_ENTRY_BYTES or is_single(data) for data in found)
    assert len(found) <= 2 * sum(map(len, found)) // MAX_ENTRY_BYTES + 6
    if len(encode_entry(entry)) <= MAX_ENTRY_BYTES:
        assert applied == [entry]
    whole, parts = said(has_before), said(has_before)
    whole.apply(entry.change)
    for piece in applied:
        parts.apply(piece.change)
    turns = [each for piece in applied for each in piece.turns]
    assert tuple(turns) == entry.turns
    for transcript in (whole, parts):
        transcript.forget_taken()
    assert parts._items.num_bytes == whole._items.num_bytes
    assert parts.take_change() == whole.take_change()


def said(has_before: bool) -> Transcript:
    """A conversation, which has something already or nothing."""
    transcript = Transcript(history_modes(None, model_text()), (), now=datetime.now().astimezone())
    if has_before:
        before = HistoryChange(
            *(0, bytes(8), ItemsChange(0, items([3, 4]), 2), AnswersChange(0, (1,), (2,))),
            *(("old",), 2, False, 1),
        )
        transcript.apply(before)
    return transcript


def is_single(data: bytes) -> bool:
    """Whether an entry has one item and nothing else that could be cut."""
    change = decode_entry(data).change
    return len(change.items.added) == 1 and not change.tokens


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("change", ["fork", "written anew"])
def test_a_large_session_is_encoded_by_whoever_writes_it(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    num_encoded = 0

    def encode(entry: LogEntry) -> bytes:
        nonlocal num_encoded
        num_encoded += 1
        return encode_entry(entry)

    with disk.world() as world:
        name = world.create(is_stored=True)
        for number in range(4):
            world.run(name, turn(f"t{number}", "word " * 150))
        monkeypatch.setattr(session_logs, "MAX_ENTRY_BYTES", SMALL)
        monkeypatch.setattr(pieces, "encode_entry", encode)
        disk.store.is_slow = True
        if change == "fork":
            name = world.manager.edits.fork(OWNER, name).session_id
        else:
            place = place_of(world, name)
            place.is_behind = True
            world.manager._flow.conclusion.logs.touch(session_of(world, name))
        assert num_encoded == 0, "nobody waits for it"
        disk.store.tell()
        size, found = place_of(world, name).size, entries_of(disk.store, name)
        assert len(found) == num_encoded > 1
        assert (size.num_entries, size.num_bytes) == (len(found), sum(map(len, found)))
        assert not place_of(world, name).is_behind


@pytest.mark.usefixtures("small")
def test_what_is_added_to_a_large_session_waits_as_much_as_it_is(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the disk would have too much to write where a few large sessions go on together."""
    monkeypatch.setattr(session_logs, "MAX_ENTRY_BYTES", SMALL // 4)
    with disk.world() as world:
        name = world.create(is_stored=True)
        for number in range(4):
            world.run(name, turn(f"t{number}", "word " * 150))
        before, ask = place_of(world, name).size.num_bytes, disk.store._ask

        def counted(write: Write, told: Told, *, num_bytes: int) -> None:
            asked.append(num_bytes)
            ask(write, told, num_bytes=num_bytes)

        asked = list[int]()
        monkeypatch.setattr(disk.store, "_ask", counted)
        world.run(name, turn("more", "word " * 100))
        world.do(world.manager.stored())
        num_bytes = place_of(world, name).size.num_bytes - before
        assert num_bytes <= asked[0] < 2 * num_bytes < session_of(world, name).num_bytes


def place_of(world: World, name: str) -> LogPlace:
    place = session_of(world, name).life.log
    assert place is not None
    return place
