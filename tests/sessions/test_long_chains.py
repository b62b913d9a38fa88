"""Responses and conversations that are long are read from the disk a little at a time, and others
are served meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from session_server.core.errors import ConversationNotFound, InvalidRequest, ServerBusy
from session_server.core.session_events import Message
from session_server.sessions.kept_conversations import ConversationEntries, ConversationEntry
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.response_turns import CHAINED_AT_ONCE
from session_server.sessions.responses import Asked, ResponseContent, SaidIn, StoredResponse
from session_server.sessions.store.session_store import PARTS_AT_ONCE
from tests.sessions.slices import Slices
from tests.sessions.test_stored_dialects import Desk, desk
from tests.sessions.test_stored_sessions import Disk
from tests.sessions.world import OWNER

NUM_RESPONSES = 10 * CHAINED_AT_ONCE
NUM_ITEMS = 4 * PARTS_AT_ONCE + 3
NAME = "conv_1"


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


def keep_chain(this: Desk) -> None:
    """Keep responses that go on from each other, of a session that is gone."""
    previous = None
    for number in range(NUM_RESPONSES):
        answer = Message("assistant", f"answer {number}")
        response = StoredResponse(
            response_id=f"resp_{number}",
            owner=OWNER,
            place=SaidIn("gone", 7),
            asked=Asked((), (Message("user", f"question {number}"),)),
            previous=previous,
            scope=None,
            content=ResponseContent(b"{}", "said", 1, answer),
        )
        this.turns.store.records.add(response)
        this.turns.store.records.put(response)
        previous = response.key


def last_of(this: Desk) -> StoredResponse:
    return this.find(f"resp_{NUM_RESPONSES - 1}")


def test_a_chain_whose_session_is_gone_is_read_in_slices(disk: Disk) -> None:
    with desk(disk) as this:
        keep_chain(this)
    with desk(disk) as this:
        reads = Slices()
        reader = disk.store._database._reader
        reader.set_trace_callback(lambda _query: reads.count())

        async def recall() -> tuple[Message, ...]:
            async with reads.watched():
                recalled = await this.turns.recall(last_of(this))
            return this.turns.messages_before(recalled)

        said = this.world.do(recall())
        reader.set_trace_callback(None)
        expected = [f"{who} {n}" for n in range(NUM_RESPONSES) for who in ("question", "answer")]
        assert [message.content for message in said] == expected
        assert reads.total >= NUM_RESPONSES
        assert reads.most <= 2 * CHAINED_AT_ONCE + 4  # and whether its session is there


def test_a_chain_in_memory_is_walked_in_slices_too(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with desk(disk) as this:
        keep_chain(this)
        steps, find = Slices(), this.turns.store.find

        def counted(*args: object, **options: object) -> StoredResponse:
            steps.count()
            return find(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(this.turns.store, "find", counted)

        async def recall() -> None:
            async with steps.watched():
                await this.turns.recall(last_of(this))

        this.world.do(recall())
        assert steps.total == NUM_RESPONSES
        assert steps.most <= CHAINED_AT_ONCE + 1


@pytest.mark.parametrize("is_too_long", [False, True])
def test_a_chain_has_a_bound(disk: Disk, is_too_long: bool) -> None:
    limits = SessionLimits(max_messages=2 * NUM_RESPONSES - 2 * is_too_long)
    with desk(disk, limits=limits) as this:
        keep_chain(this)
        if is_too_long:
            with pytest.raises(InvalidRequest, match="more messages than a turn may have"):
                this.world.do(this.turns.recall(last_of(this)))
        else:
            recalled = this.world.do(this.turns.recall(last_of(this)))
            assert len(this.turns.messages_before(recalled)) == 2 * NUM_RESPONSES


@pytest.mark.parametrize("num_clients", [1, 3])
def test_a_conversation_is_read_in_slices_and_once(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, num_clients: int
) -> None:
    said = [f"{number}" for number in range(NUM_ITEMS)]
    with desk(disk) as this:
        this.converse(*said)
    with desk(disk) as this:
        conversations = this.turns.conversations
        with pytest.raises(ServerBusy):
            conversations.find(OWNER, NAME)
        items, append = Slices(), ConversationEntries.append

        def counted(entries: ConversationEntries, *args: object, **options: object) -> None:
            items.count()
            append(entries, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(ConversationEntries, "append", counted)

        async def load() -> None:
            async with items.watched():
                loads = (conversations.load(OWNER, NAME) for _ in range(num_clients))
                assert len(set(await asyncio.gather(*loads))) == 1

        this.world.do(load())
        found = conversations.find(OWNER, NAME)
        assert [message.content for message in found.entries.messages()] == said
        assert items.total == NUM_ITEMS
        assert items.most <= PARTS_AT_ONCE


def test_a_conversation_that_is_deleted_while_it_is_read_is_gone(disk: Disk) -> None:
    with desk(disk) as this:
        this.converse(*(f"{number}" for number in range(NUM_ITEMS)))
    with desk(disk) as this:
        conversations = this.turns.conversations

        async def read() -> None:
            loading = asyncio.create_task(conversations.load(OWNER, NAME))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert conversations.records.remove_unread(OWNER, NAME) is not None
            with pytest.raises(ConversationNotFound):
                await loading

        this.world.do(read())
        this.converse("another")
        assert conversations.find(OWNER, NAME).entries[0] == ConversationEntry(
            "i_another", Message("user", "another")
        )
