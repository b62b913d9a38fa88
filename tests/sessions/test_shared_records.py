"""Responses and conversations that several replicas read and write."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from session_server.core.errors import (
    ConversationNotFound,
    InternalInconsistency,
    InvalidRequest,
    ItemNotFound,
    ResponseNotFound,
    ServerBusy,
    SessionMoved,
    SessionNotFound,
)
from session_server.core.owner import Owner
from session_server.core.session_events import Message
from session_server.sessions.kept_conversations import (
    MAX_CHANGES,
    ConversationEntry,
    ConversationForm,
    KeptConversation,
)
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.shared_sessions import RECOUNT_S
from session_server.sessions.store.records import RESPONSES, Parts, RecordRow
from tests.sessions.test_replicas import Cluster, Replica
from tests.sessions.test_stored_dialects import Desk
from tests.sessions.world import OWNER


@pytest.fixture
def cluster(url: str) -> Iterator[Cluster]:
    made = Cluster(url)
    yield made
    for replica in list(made.replicas):
        made.stop(replica)
    made.loop.close()


def state_of(replica: Replica, desk: Desk, name: str) -> str:
    """How a response is shown by a replica."""
    replica.world.do(desk.turns.store.load(OWNER, name))
    return desk.find(name).content.state


@pytest.mark.parametrize("odd", ["a\0b", "\0", "\ud800"])
def test_nothing_is_there_of_a_name_that_no_column_has(cluster: Cluster, odd: str) -> None:
    replica = cluster.start()
    manager, desk, do = replica.world.manager, Desk(replica.world), replica.world.do
    do(manager.load(OWNER, odd))
    with pytest.raises(SessionNotFound):
        manager.get(OWNER, odd)
    with pytest.raises(SessionNotFound):
        do(manager.exits.delete(OWNER, odd))
    with pytest.raises(InvalidRequest):
        do(manager.list(OWNER, after=odd))
    with pytest.raises(InvalidRequest):
        replica.world.create(session_id=odd, is_stored=True)
    do(desk.turns.store.load(OWNER, odd))
    with pytest.raises(ResponseNotFound):
        desk.find(odd)
    do(desk.turns.store.records.look_up_made_in(OWNER, odd))
    assert replica.store.failure is None


# -- responses in the background


def test_a_response_that_another_replica_runs_is_shown_as_running(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    here, there = Desk(first.world), Desk(second.world)
    here.begin("one", is_background=True)
    assert state_of(second, there, "resp_one") == "running"
    with pytest.raises(SessionMoved, match="at http://replica-0: ask there"):
        there.find("resp_one").check_here()
    assert state_of(first, here, "resp_one") == "running"
    here.find("resp_one").check_here()
    first.world.engine.run()
    first.world.do(first.world.manager.stored())
    assert state_of(second, there, "resp_one") == "said"
    there.find("resp_one").check_here()


def test_a_response_has_failed_once_the_lease_of_its_replica_is_over(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    there = Desk(second.world)
    Desk(first.world).begin("one", is_background=True)
    assert state_of(second, there, "resp_one") == "running"
    cluster.pause(first)
    first.lease._until_s = 0.0
    cluster.until(lambda: second.database.address_of(first.database.replica_id) is None)
    assert state_of(second, there, "resp_one") == "lost"
    assert there.find("resp_one").content.body == b"interrupted"
    there.find("resp_one").check_here()
    # It begins another lease, in which nothing runs.
    first.world.do(first.lease._renew())
    assert state_of(second, there, "resp_one") == "lost"


def test_a_response_that_ends_while_it_is_asked_for_is_not_shown_as_failed(
    cluster: Cluster,
) -> None:
    first, second = cluster.start(), cluster.start()
    there = Desk(second.world)
    Desk(first.world).begin("one", is_background=True)

    async def asked_when_it_has_left(_replica_id: int) -> None:
        first.world.engine.run()
        await first.world.manager.stored()

    there.turns.store._log.address_of = asked_when_it_has_left  # type: ignore[method-assign]
    assert state_of(second, there, "resp_one") == "said"


# -- conversations that several replicas change


def ids_in(replica: Replica, desk: Desk) -> list[str]:
    """The items of the conversation, as a replica finds them."""
    found = replica.world.do(desk.turns.conversations.load(OWNER, "conv_1"))
    return [found.entries[index].id for index in range(len(found.entries))]


def entry(name: str) -> ConversationEntry:
    return ConversationEntry(name, Message("user", name))


@pytest.fixture
def pair(cluster: Cluster) -> tuple[Replica, Replica, Desk, Desk]:
    """Two replicas, and what serves a conversation of one item in each."""
    first, second = cluster.start(), cluster.start()
    here, there = Desk(first.world), Desk(second.world)
    here.converse("hello")
    first.world.do(first.world.manager.stored())
    assert ids_in(second, there) == ["i_hello"]
    return first, second, here, there


Pair = tuple[Replica, Replica, Desk, Desk]


def meanwhile(pair: Pair, act: Callable[[KeptConversation], object]) -> None:
    """Have the other replica change the conversation."""
    _, second, _, there = pair
    second.world.do(there.turns.conversations.change(OWNER, "conv_1", act))


def append_at_once(replica: Replica, name: str) -> None:
    """Have a replica append something before anybody else does anything."""
    database = replica.database
    found = database.find_record(OWNER.owner_id, "conv_1")
    assert found is not None
    record = KeptConversation("conv_1", OWNER, 7, {})
    record.entries.append(entry(name), number=100 + found.num_writes)
    with database.transaction():
        database.change_record(found, ConversationForm().items(record, 0), [])


def late(pair: Pair, act: Callable[[KeptConversation], object], *others: str) -> list[int]:
    """Change the conversation here, while the other replica appends something each time this one
    has read it; return how often it was read."""
    first, second, here, _ = pair
    num_read = []

    def change(conversation: KeptConversation) -> None:
        num_read.append(len(conversation.entries))
        if len(num_read) <= len(others):
            append_at_once(second, others[len(num_read) - 1])
        act(conversation)

    first.world.do(here.turns.conversations.change(OWNER, "conv_1", change))
    return num_read


def test_items_that_two_replicas_append_at_once_are_both_there(pair: Pair) -> None:
    first, second, here, there = pair
    append = partial(here.turns.conversations.append, entries=[entry("ours")])
    assert late(pair, append, "theirs", "theirs too") == [1, 2, 3]
    expected = ["i_hello", "theirs", "theirs too", "ours"]
    assert ids_in(first, here) == ids_in(second, there) == expected


def test_many_items_that_two_replicas_append_at_once_are_there_once(pair: Pair) -> None:
    first, second, here, there = pair
    kept = set[str]()

    async def append(desk: Desk, name: str) -> None:
        change = partial(desk.turns.conversations.append, entries=[entry(name)])
        await asyncio.sleep(random.random() * 0.05)  # so that some come while others are written
        with contextlib.suppress(ServerBusy):
            await desk.turns.conversations.change(OWNER, "conv_1", change)
            kept.add(name)

    async def append_all(tag: int) -> None:
        desks = (here, there)
        named = [(desks[number % 2], f"i_{tag}_{number}") for number in range(24)]
        await asyncio.gather(*(append(*each) for each in named))

    for tag in range(6):
        first.world.do(append_all(tag))
    assert len(kept) > 6 * 12
    found = ids_in(first, here)
    assert len(set(found)) == len(found)
    assert found == ids_in(second, there)
    assert kept <= set(found)


def test_one_in_which_two_items_have_one_id_is_damaged_and_can_be_deleted(pair: Pair) -> None:
    first, second, here, _ = pair
    found = second.database.find_record(OWNER.owner_id, "conv_1")
    assert found is not None
    record = KeptConversation("conv_1", OWNER, 7, {})
    record.entries.append(entry("i_hello"), number=100)
    with second.database.transaction():
        second.database.change_record(found, ConversationForm().items(record, 0), [])
    with pytest.raises(InternalInconsistency, match="damaged"):
        ids_in(first, here)
    assert here.turns.conversations.records.remove_unread(OWNER, "conv_1") is not None
    first.world.do(first.world.manager.stored())
    with pytest.raises(ConversationNotFound):
        ids_in(first, here)


def test_one_that_is_deleted_while_it_is_read_is_not_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, here, there = pair
    meanwhile(pair, partial(there.turns.conversations.append, entries=[entry("theirs")]))
    read = first.store.read_parts

    async def read_late(number: int) -> list[Parts]:
        with second.database.transaction():
            second.database.delete_record(number)
        return await read(number)

    monkeypatch.setattr(first.store, "read_parts", read_late)
    with pytest.raises(ConversationNotFound):
        ids_in(first, here)


def test_an_item_is_deleted_and_metadata_changed_beside_others(pair: Pair) -> None:
    _, second, here, there = pair
    late(pair, partial(here.turns.conversations.delete_item, item_id="i_hello"), "theirs")
    late(pair, partial(here.turns.conversations.update, metadata={"b": "c"}), "more")
    assert ids_in(second, there) == ["theirs", "more"]
    found = second.world.do(there.turns.conversations.load(OWNER, "conv_1"))
    assert found.metadata == {"b": "c"}
    with pytest.raises(ItemNotFound):
        late(pair, partial(here.turns.conversations.delete_item, item_id="i_hello"))


def test_who_finds_it_changed_again_and_again_is_told_to_ask_again(pair: Pair) -> None:
    first, _, here, _ = pair
    append = partial(here.turns.conversations.append, entries=[entry("ours")])
    others = [f"other_{number}" for number in range(MAX_CHANGES)]
    with pytest.raises(ServerBusy, match="at the same time"):
        late(pair, append, *others)
    assert ids_in(first, here) == ["i_hello", *others]


def test_one_is_deleted_of_which_a_change_is_refused_meanwhile(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, here, there = pair
    responses, conversations = here.turns.store.records, here.turns.conversations
    look_up = responses.look_up_made_in

    async def look_up_once_all_is_written(owner: Owner, session_id: str) -> None:
        await first.world.manager.stored()
        await look_up(owner, session_id)

    monkeypatch.setattr(responses, "look_up_made_in", look_up_once_all_is_written)

    async def delete() -> None:
        conversation = await conversations.load(OWNER, "conv_1")
        append_at_once(second, "theirs")
        conversations.append(conversation, [entry("ours")])
        await here.turns.forget_conversation(OWNER, "conv_1")
        await first.world.manager.stored()

    first.world.do(delete())
    for replica, desk in ((first, here), (second, there)):
        with pytest.raises(ConversationNotFound):
            ids_in(replica, desk)


@pytest.mark.parametrize("is_read_again", [False, True])
def test_what_a_response_says_is_added_behind_what_came_meanwhile(
    pair: Pair, cluster: Cluster, is_read_again: bool
) -> None:
    first, second, here, there = pair
    conversation = first.world.do(here.turns.conversations.load(OWNER, "conv_1"))
    here.begin("one", conversation=conversation)
    meanwhile(pair, partial(there.turns.conversations.append, entries=[entry("theirs")]))
    if is_read_again:
        assert ids_in(first, here) == ["i_hello", "theirs"]
    first.world.engine.run()
    first.world.do(first.world.manager.stored())
    expected = ["i_hello", "theirs", "resp_one_0", "resp_one_1"]
    cluster.until(lambda: not here.turns.conversations._tasks)
    assert ids_in(second, there) == ids_in(first, here) == expected


# -- those of earlier replicas


def stored_bytes(replica: Replica) -> int:
    """The bytes of all records in the store."""
    return sum(row.num_bytes for row in replica.database.records())


def recount(cluster: Cluster, replica: Replica) -> None:
    replica.world.now_s += RECOUNT_S
    cluster.loop.call_soon(replica.world.manager.tick)
    ends = replica.world.manager._sessions.on_disk._restorer.ends  # type: ignore[union-attr]
    cluster.loop.run_until_complete(ends.recount())


def test_records_of_replicas_that_are_over_make_room(cluster: Cluster) -> None:
    # Room for five, and a little more.
    limits = QuotaLimits(history_bytes=40_000)
    for life in range(4):
        replica = cluster.start(quotas=limits)
        desk = Desk(replica.world)
        counted = replica.world.manager._quotas.stored_bytes
        assert counted.total >= stored_bytes(replica), "those of others count from the start"
        for number in range(4):
            desk.ask(f"{life}_{number}")
        replica.world.do(replica.world.manager.stored())
        recount(cluster, replica)
        assert stored_bytes(replica) <= desk.turns.store.records.budget.limit
        assert len(replica.database.records()) == min(4 * (life + 1), 5)
        assert state_of(replica, desk, f"resp_{life}_3") == "said"
        cluster.stop(replica)


def test_an_owner_has_its_share_of_the_store_whatever_replicas_know(cluster: Cluster) -> None:
    half, limits = Owner("half", share=0.5), QuotaLimits(history_bytes=80_000)
    first, second = cluster.start(quotas=limits), cluster.start(quotas=limits)
    desks = [(replica, Desk(replica.world)) for replica in (first, second)]
    desks[1][1].ask("other")
    for number in range(8):
        replica, desk = desks[number % 2]
        desk.ask(f"{number}", owner=half)
        replica.world.do(replica.world.manager.stored())
    assert len(second.database.records()) == 9
    recount(cluster, second)
    kept = [row.record_id for row in second.database.records()]
    assert kept == ["resp_other", *(f"resp_{number}" for number in range(3, 8))]


def test_one_record_tells_that_a_session_has_others(cluster: Cluster) -> None:
    replica, other = cluster.start(), cluster.start()
    desk = Desk(replica.world)
    response = desk.ask("one")
    replica.world.do(replica.world.manager.stored())
    records, names = desk.turns.store.records, [f"elsewhere_{number}" for number in range(20)]
    with other.database.transaction():
        for number, name in enumerate(names, 1):
            place = OWNER.owner_id, name, response.made_in
            other.database.put_record(RecordRow(number, RESPONSES, *place, 10, number), [])
    replica.world.do(records.look_up_beside(OWNER, response.key))
    assert len(records) == records.num_made_in(OWNER, response.made_in) == 2
    with other.database.transaction():
        for number in range(1, len(names) + 1):
            other.database.delete_record(number)
    replica.world.do(records.look_up_beside(OWNER, response.key))
    assert records.num_made_in(OWNER, response.made_in) == 1
