"""Records that go to make room for another one go in slices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest

from session_server.core.errors import QuotaExceeded, ServerBusy
from session_server.core.owner import Owner
from session_server.core.session_events import Message
from session_server.sessions.backlog import SLICE, Backlog
from session_server.sessions.kept_conversations import (
    CONVERSATION_BYTES,
    ConversationEntry,
    KeptConversation,
    KeptConversations,
)
from session_server.sessions.quotas import KEPT_DIVISOR, QuotaLimits, Quotas
from session_server.sessions.record_log import RecordLog
from tests.sessions.world import OWNER

NUM = 8 * SLICE
HALF, OTHER = Owner("half", share=0.5), Owner("other", share=0.5)
EITHER = pytest.mark.parametrize("owner", [OWNER, HALF], ids=["may hold all", "may hold half"])


class Desk:
    """Keeps conversations: as many small ones of an owner as there is room for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Owner) -> None:
        self.loop, backlog = loop, Backlog()
        backlog.bind(loop)
        self.allowed = NUM * CONVERSATION_BYTES
        quotas = QuotaLimits(history_bytes=int(KEPT_DIVISOR * self.allowed / owner.share))
        self.kept = KeptConversations(Quotas(quotas), RecordLog(), backlog)
        self.records, self.budget = self.kept.records, self.kept.records.budget
        self.backlog = backlog
        for number in range(NUM):
            self.add(owner, f"c{number}")
        assert len(self.records) == NUM

    def add(self, owner: Owner, name: str, num_chars: int | None = None) -> KeptConversation:
        made = KeptConversation(name, owner, 0, {})
        said = [] if num_chars is None else [Message("user", "x" * num_chars)]
        self.kept.add(made, [ConversationEntry(f"i_{name}", message) for message in said])
        return made

    def turn(self) -> None:
        """Let the event loop do what it has to do, once."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def finish(self) -> None:
        while len(self.backlog):
            self.turn()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@EITHER
def test_the_many_that_a_large_one_replaces_go_in_slices(
    loop: asyncio.AbstractEventLoop, owner: Owner
) -> None:
    desk = Desk(loop, owner)
    left = [NUM + 1]
    large = desk.add(owner, "large", desk.allowed * 7 // 8)
    left.append(len(desk.records))
    while len(desk.backlog):
        desk.turn()
        left.append(len(desk.records))
    assert desk.records.is_kept(large)
    assert len(desk.records) <= NUM // 4
    assert max(before - after for before, after in pairwise(left)) <= SLICE


@EITHER
def test_until_they_have_gone_their_owner_gets_no_more(
    loop: asyncio.AbstractEventLoop, owner: Owner
) -> None:
    desk = Desk(loop, owner)
    desk.add(owner, "large", desk.allowed // 2)
    assert desk.allowed < desk.budget.held_by(owner) <= 2 * desk.allowed
    with pytest.raises((QuotaExceeded, ServerBusy)):
        desk.add(owner, "another")
    desk.finish()
    assert desk.budget.held_by(owner) <= desk.allowed
    desk.add(owner, "another")


def test_others_are_served_meanwhile_and_lose_nothing(loop: asyncio.AbstractEventLoop) -> None:
    desk = Desk(loop, HALF)
    desk.add(OTHER, "theirs")
    desk.add(HALF, "large", desk.allowed // 2)
    desk.add(OTHER, "theirs too")
    desk.finish()
    assert desk.budget.held_by(HALF) <= desk.allowed
    assert [desk.kept.find(OTHER, name).key for name in ("theirs", "theirs too")]


def test_one_that_has_grown_beyond_all_room_goes_itself_at_last(
    loop: asyncio.AbstractEventLoop,
) -> None:
    desk = Desk(loop, OWNER)
    grown = desk.kept.find(OWNER, "c0")
    grown.entry_bytes += desk.allowed
    desk.records.recount(grown)
    assert len(desk.records) == NUM - SLICE
    desk.finish()
    assert len(desk.records) == 0
    assert desk.budget.total == 0
