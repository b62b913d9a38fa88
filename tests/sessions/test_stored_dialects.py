"""Responses and conversations in a store: what was told of them is there in the next process."""

from __future__ import annotations

import base64
import gzip
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from session_server.core.errors import (
    ConversationNotFound,
    InternalInconsistency,
    PreviousResponseNotFound,
    QuotaExceeded,
    ResponseNotFound,
    ServerBusy,
)
from session_server.core.owner import Owner, TenantLimits
from session_server.core.session_events import Message, TurnEnd
from session_server.sessions.kept_conversations import ConversationEntry, KeptConversation
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.response_turns import Keep, ResponseTurns, ResponseWork
from session_server.sessions.responses import Asked, ResponseContent, StoredResponse
from session_server.sessions.store.database import Database
from session_server.sessions.store.schema import SCHEMA_VERSION
from session_server.sessions.turn_ends import is_kept
from tests.sessions.test_store import row
from tests.sessions.test_stored_sessions import Disk, state_of
from tests.sessions.world import OWNER, World, completed, turn

SMALL = QuotaLimits(history_bytes=40_000)
"""Of which a quarter is for responses: a handful."""


class Desk:
    """What serves responses in one world, asked as the surface asks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.turns = ResponseTurns(world.manager, count_readers=lambda _owner, _id: 0)
        self.num_asked = 0

    def begin(
        self,
        said: str,
        previous: StoredResponse | None = None,
        *,
        name: str | None = None,
        keep: Keep = "on disk",
        conversation: KeptConversation | None = None,
        owner: Owner = OWNER,
        is_background: bool = False,
    ) -> StoredResponse:
        """Submit a response. What is not stored is known to this desk as to a connection."""
        asked = Asked((), (Message("user", said),))
        if conversation is None:
            recalled = None if previous is None else self.world.do(self.turns.recall(previous))
            place = self.turns.place(owner, asked, recalled, keep=keep)
        else:
            self.world.do(self.turns.recall_conversation(owner, conversation.key))
            before = tuple(conversation.entries.messages())
            place = self.turns.place_whole(conversation, asked, before)
        self.num_asked += 1
        response = StoredResponse(
            response_id=name or f"resp_{said}",
            owner=owner,
            place=place.said_in,
            asked=asked,
            previous=None if previous is None else previous.key,
            scope=None if keep == "on disk" else self,
            content=ResponseContent(b"begun"),
        )
        work = ResponseWork(
            response=response,
            content_of=content_of,
            entries_of=lambda answer: entries_of(response, answer),
            conversation=conversation,
            interrupted=ResponseContent(b"interrupted", "lost") if is_background else None,
            is_kept=keep != "nowhere",
        )
        request = turn(response.key, place.input, max_tokens=6, ignore_eos=True)
        self.world.do(self.turns.submit(place, request, work))
        return response

    def ask(self, *args: object, **options: object) -> StoredResponse:
        """Submit a response, and wait for its end."""
        response = self.begin(*args, **options)  # type: ignore[arg-type]
        self.world.engine.run()
        return response

    def find(self, name: str, owner: Owner = OWNER) -> StoredResponse:
        return self.turns.store.find(owner, name, scope=None)

    def converse(self, *said: str, name: str = "conv_1") -> KeptConversation:
        """Keep a conversation."""
        made = KeptConversation(name, OWNER, 7, {"a": "b"})
        entries = [ConversationEntry(f"i_{text}", Message("user", text)) for text in said]
        self.turns.conversations.add(made, entries)
        return made


def content_of(end: TurnEnd) -> ResponseContent:
    outcome = end.outcome
    answer = Message("assistant", outcome.text) if outcome.text else None
    body = f"{outcome.text} {outcome.is_durable}".encode()
    return ResponseContent(body, "said" if is_kept(end) else "lost", 5, answer)


def entries_of(response: StoredResponse, answer: Message | None) -> list[ConversationEntry]:
    said = [*response.asked.messages, *([] if answer is None else [answer])]
    return [ConversationEntry(f"{response.key}_{n}", message) for n, message in enumerate(said)]


def told(response: StoredResponse) -> tuple[object, ...]:
    """All that a client may be told of a response."""
    place = response.place
    return (
        *(response.key, response.asked, response.previous, response.content),
        *(place.session_id, place.number, response.num_bytes),
    )


def items_of(conversation: KeptConversation) -> list[ConversationEntry]:
    return [conversation.entries[index] for index in range(len(conversation.entries))]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


@contextmanager
def desk(disk: Disk, **options: object) -> Iterator[Desk]:
    """A process."""
    with disk.world(**options) as world:  # type: ignore[arg-type]
        yield Desk(world)


def rows_of(disk: Disk, table: str = "records") -> int:
    with closing(sqlite3.connect(disk.directory / Database.FILE)) as database:
        (count,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(count)


def restore_version_1(directory: Path) -> None:
    """The file of a server of version 1: a session of three turns, cut behind a question, and
    another owner's."""
    packed = Path(__file__).with_name("version_1.sqlite3.gz.b64").read_text("ascii")
    directory.mkdir(mode=0o700)
    (directory / Database.FILE).write_bytes(gzip.decompress(base64.b64decode(packed)))
    with closing(sqlite3.connect(directory / Database.FILE)) as database, database:
        query = "UPDATE sessions SET owner = ? WHERE owner = 'owner'"
        assert database.execute(query, (OWNER.owner_id,)).rowcount == 1


def test_a_store_of_version_1_is_brought_to_this_one(disk: Disk) -> None:
    restore_version_1(disk.directory)
    with desk(disk) as this:
        state = state_of(this.world, "told")
        items = [item.content for item in state["items"]]  # type: ignore[attr-defined]
        assert items == ["Be brief.", "question 0", "ccddca", "question 1", "acdcdd", "question 2"]
        assert (len(this.world.history("told")), state["num_turns"]) == (68, 3)
        assert this.world.manager.get(Owner("b"), "other").num_tokens == 0
        end = completed(this.world.run("told", turn("next", "And then?")))
        assert end.outcome.is_durable is True
        first = this.ask("one")
    with closing(sqlite3.connect(disk.directory / Database.FILE)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert is_clustered(database)
        query = (
            "SELECT num_bytes - (SELECT sum(length(entry)) FROM entries WHERE session = number)"
            " FROM sessions WHERE num_bytes > 0"
        )
        assert set(database.execute(query)) == {(0,)}
    with closing(Database(disk.directory)) as store:
        store.vacuum()
    with closing(sqlite3.connect(disk.directory / Database.FILE)) as database:
        assert not is_clustered(database)
    with desk(disk) as this:
        assert told(this.find("resp_one")) == told(first)
        assert state_of(this.world, "told")["num_turns"] == 4


def is_clustered(database: sqlite3.Connection) -> bool:
    """Whether entries and parts are kept as earlier versions did."""
    made = database.execute("SELECT sql FROM sqlite_schema WHERE name IN ('entries', 'parts')")
    found = {"WITHOUT ROWID" in sql for (sql,) in made}
    assert len(found) == 1
    return found.pop()


def test_a_store_takes_little_more_than_what_is_counted(disk: Disk) -> None:
    with closing(Database(disk.directory)) as database, database.transaction():
        assert not is_clustered(database._writer)
        for number in range(1, 301):
            database.put(row(number), bytes(1200))
            database.append(row(number, num_entries=1), bytes(2000))
    counted = 300 * 3200
    assert counted < (disk.directory / Database.FILE).stat().st_size < 1.5 * counted


def test_a_store_of_version_1_is_read_as_it_is_beside_a_server(disk: Disk) -> None:
    restore_version_1(disk.directory)
    with closing(Database(disk.directory, is_read_only=True)) as database:
        assert [row.session_id for row in database.walk(None)] == ["told", "other"]


def test_responses_go_on_in_the_next_process_with_the_same_tokens(disk: Disk) -> None:
    with World() as world:
        alone = Desk(world)
        first = alone.ask("one")
        second = alone.ask("two", first)
        branch = alone.ask("three", first)
        reference = [first, second, branch, alone.ask("four", second), alone.ask("five", branch)]
    with desk(disk) as this:
        found = [this.ask("one")]
        found.append(this.ask("two", found[0]))
        found.append(this.ask("three", found[0]))
        before = [told(each) for each in found]
    with desk(disk) as this:
        again = [this.find(each.key) for each in found]
        assert [told(each) for each in again] == before
        assert [each.place.epoch for each in again] == [""] * 3
        found.append(this.ask("four", again[1]))
        found.append(this.ask("five", again[2]))
        assert found[3].place.session_id == found[1].place.session_id
        assert this.world.manager.stats().sessions == 2
    assert [each.content.answer for each in found] == [each.content.answer for each in reference]


def test_nobody_is_told_of_a_response_before_it_is_on_disk(disk: Disk) -> None:
    with desk(disk) as this:
        conversation = this.converse("hello")
        disk.store.is_slow = True
        response = this.ask("one", conversation=conversation)
        assert response.content.state == "running"
        with pytest.raises(Exception, match="has not ended"):
            this.world.do(this.turns.previous(OWNER, response.key, scope=None))
        assert (rows_of(disk), rows_of(disk, "parts"), rows_of(disk, "entries")) == (1, 2, 0)
        assert disk.store.num_untold == 1  # all of it in one commit
        disk.store.tell()
        assert response.content.state == "said"
        assert response.content.body.endswith(b"True")
        assert (rows_of(disk), rows_of(disk, "parts"), rows_of(disk, "entries")) == (2, 5, 1)
        unheard = this.ask("two", response)
        assert unheard.content.state == "running"
    with desk(disk) as this:
        with pytest.raises(ResponseNotFound):
            this.find(unheard.key)
        assert this.ask("again", this.find(response.key)).content.answer is not None
        assert len(this.turns.conversations.find(OWNER, "conv_1").entries) == 3


def test_a_full_disk_loses_nothing_that_the_next_write_can_bring(disk: Disk) -> None:
    with desk(disk) as this:
        conversation = this.converse("hello")
        disk.store.fails = True
        response = this.ask("one", conversation=conversation)
        assert response.content.body.endswith(b"False")
        entry = ConversationEntry("i_more", Message("user", "more"))
        this.turns.conversations.append(conversation, [entry])
        this.turns.conversations.delete_item(conversation, "i_hello")
        other = this.converse("other", name="conv_2")
        this.world.manager.tick()
        stats = this.world.manager.stats().store
        assert stats is not None
        assert (stats.num_behind, stats.is_failing) == (4, True)
        this.world.do(this.turns.forget_conversation(OWNER, other.key))
        disk.store.fails = False
        this.world.manager.tick()
        this.world.manager.tick()
        stats = this.world.manager.stats().store
        assert stats is not None
        assert (stats.num_behind, stats.is_failing) == (0, False)
        before = told(response), items_of(conversation)
    with desk(disk) as this:
        found = this.turns.conversations.find(OWNER, "conv_1")
        assert (told(this.find(response.key)), items_of(found)) == before
        with pytest.raises(ConversationNotFound):
            this.turns.conversations.find(OWNER, "conv_2")


def test_an_item_behind_one_that_was_not_written_is_not_on_disk_without_it(disk: Disk) -> None:
    with desk(disk) as this:
        conversation = this.converse("one")
        add, disk.store.is_slow = this.turns.conversations.append, True
        add(conversation, [ConversationEntry("i_two", Message("user", "two"))])
        this.turns.conversations.update(conversation, {"c": "d"})
        disk.store.fails = True
        disk.store.tell(1)
        disk.store.fails = False
        disk.store.tell(1)
        assert rows_of(disk, "parts") == 2
        add(conversation, [ConversationEntry("i_three", Message("user", "three"))])
        disk.store.tell()
        assert rows_of(disk, "parts") == 4  # all of it, once it was known that something is missing
        before = items_of(conversation)
    with desk(disk) as this:
        found = this.turns.conversations.find(OWNER, "conv_1")
        assert (items_of(found), found.metadata) == (before, {"c": "d"})


def test_records_on_disk_are_bounded_as_those_in_memory(disk: Disk) -> None:
    with desk(disk, quotas=SMALL) as this:
        for number in range(30):
            this.ask(f"{number}")
        in_memory = list(this.turns.store.records._by_owner[OWNER])
        held = this.turns.store.records.budget.total
        assert 1 < len(in_memory) < 30
        assert rows_of(disk) == len(in_memory)
    with desk(disk, quotas=SMALL) as this:
        records = this.turns.store.records
        assert list(records._by_owner[OWNER]) == in_memory
        assert records.budget.total == held
        assert this.world.manager._quotas.history_bytes.held_by(OWNER) == held
        this.ask("more")
        assert in_memory[0] not in records._by_owner[OWNER]
        assert rows_of(disk) == len(records) == len(in_memory)
        for each in in_memory[1:]:
            this.turns.forget(this.find(each))
        this.turns.forget(this.find("resp_more"))
        assert (records.budget.total, rows_of(disk)) == (0, 0)
        disk.now_s += 10_000  # those of responses that had gone before
        this.world.manager.tick()
        assert rows_of(disk, "sessions") == 0


def test_what_is_not_to_be_stored_leaves_nothing_in_a_session_that_is(disk: Disk) -> None:
    with desk(disk) as this:
        first = this.ask("one")
        tokens = this.world.history(first.place.session_id)
        for keep in ("here", "nowhere"):
            unstored = this.ask(f"not {keep}", first, keep=keep)
            assert unstored.place.session_id != first.place.session_id
            assert unstored.content.body.endswith(b"None")
        assert this.world.history(first.place.session_id) == tokens
        assert (rows_of(disk), rows_of(disk, "sessions")) == (1, 1)
        # One that is stored behind one that was not brings what it goes on from.
        alone = this.ask("alone", keep="here")
        later = this.ask("stored", alone)
        assert later.place.session_id == alone.place.session_id
        assert rows_of(disk, "sessions") == 2
    with desk(disk) as this:
        answer = this.ask("and then", this.find(later.key))
        assert answer.place.session_id == later.place.session_id


def test_a_response_in_the_background_is_on_disk_as_one_that_failed_until_it_ends(
    disk: Disk,
) -> None:
    with desk(disk) as this:
        ended = this.ask("two", is_background=True)
        this.begin("three", is_background=True)
        refused = this.begin("four", is_background=True)
        this.turns.forget(refused)
    with desk(disk) as this:
        assert told(this.find("resp_two")) == told(ended)
        found = this.find("resp_three").content
        assert (found.body, found.state) == (b"interrupted", "lost")
        with pytest.raises(ResponseNotFound):
            this.find("resp_four")


def test_another_owner_finds_nothing(disk: Disk) -> None:
    with desk(disk) as this:
        this.ask("one")
        this.converse("hello")
    with desk(disk) as this:
        other = Owner("other")
        for _ in range(2):
            with pytest.raises(ResponseNotFound):
                this.find("resp_one", other)
            assert not this.turns.forget_unread(other, "resp_one")
            with pytest.raises(ConversationNotFound):
                this.world.do(this.turns.forget_conversation(other, "conv_1"))
            assert this.find("resp_one").owner == OWNER


def test_what_is_damaged_is_refused_and_can_be_deleted(disk: Disk) -> None:
    with desk(disk) as this:
        this.ask("one")
        this.ask("two")
        this.converse("hello", name="conv_1")
        this.converse("hello", name="conv_2")
    with closing(sqlite3.connect(disk.directory / Database.FILE)) as database, database:
        database.execute(
            "UPDATE parts SET part = x'00112233445566' WHERE record IN"
            " (SELECT number FROM records WHERE id IN ('resp_one', 'conv_1'))"
        )
        database.execute(
            "DELETE FROM parts WHERE position = 0 AND record ="
            " (SELECT number FROM records WHERE id = 'conv_2')"
        )
    with desk(disk) as this:
        with pytest.raises(InternalInconsistency, match="damaged"):
            this.find("resp_one")
        for name in ("conv_1", "conv_2"):
            with pytest.raises(InternalInconsistency, match="damaged"):
                this.turns.conversations.find(OWNER, name)
            this.world.do(this.turns.forget_conversation(OWNER, name))
        assert this.find("resp_two").content.answer is not None
        assert this.turns.forget_unread(OWNER, "resp_one")
        assert rows_of(disk) == 1


def test_a_disk_that_cannot_be_read_is_told_of(disk: Disk) -> None:
    with desk(disk) as this:
        this.ask("one")
    with desk(disk) as this:
        with closing(sqlite3.connect(disk.directory / Database.FILE)) as database:
            database.execute("ALTER TABLE parts RENAME TO elsewhere")
            with pytest.raises(ServerBusy, match="cannot be read"):
                this.find("resp_one")
            database.execute("ALTER TABLE elsewhere RENAME TO parts")
        assert this.find("resp_one").content.state == "said"


@pytest.mark.parametrize("what", ["expires", "is damaged", "has another tokenizer"])
def test_a_response_whose_session_is_gone_goes_on_from_what_is_kept_of_it(
    disk: Disk, what: str
) -> None:
    with desk(disk) as this:
        first = this.ask("one")
        second = this.ask("two", first)
    if what == "expires":
        disk.now_s += 10_000
    if what == "is damaged":
        with closing(sqlite3.connect(disk.directory / Database.FILE)) as database, database:
            database.execute("UPDATE entries SET entry = x'00'")
    options = {"model": b"another"} if what == "has another tokenizer" else {}
    with desk(disk, **options) as this:
        third = this.ask("three", this.find(second.key))
        assert third.place.session_id != second.place.session_id
        items = this.world.manager.snapshot(OWNER, third.place.session_id).items
        assert [item.content for item in items if item.role == "user"] == ["one", "two", "three"]
        this.turns.forget(this.find(first.key))
        alone = this.ask("other")
        assert alone.content.state == "said"
        if what == "expires":
            with pytest.raises(PreviousResponseNotFound):
                this.world.do(this.turns.recall(this.find(second.key)))


def test_sessions_of_responses_make_room_on_disk_too(disk: Disk) -> None:
    owner = Owner("tenant", limits=TenantLimits(max_sessions=2))
    with desk(disk) as this:
        one = this.ask("one", owner=owner)
        this.ask("two", owner=owner)
        used = this.ask("three", owner=owner)  # in place of the first
        assert rows_of(disk, "sessions") == 2
        this.world.manager.update(owner, used.place.session_id, ttl_s=60.0)  # it is somebody's now
    with desk(disk) as this:
        this.world.create(owner=owner, is_stored=True)  # in place of the second
        assert rows_of(disk, "sessions") == 2
        assert this.world.manager.get(owner, used.place.session_id).ttl_s == 60.0
        with pytest.raises(QuotaExceeded):
            this.world.create(owner=owner, is_stored=True)
        with pytest.raises(QuotaExceeded):
            this.ask("four", this.find(one.key, owner), owner=owner)


def test_a_session_that_somebody_has_used_outlives_its_responses(disk: Disk) -> None:
    with desk(disk) as this:
        mine, theirs = this.ask("one"), this.ask("two")
        this.world.run(theirs.place.session_id, turn("by its id"))
    with desk(disk) as this:
        for each in (mine, theirs):
            assert this.turns.forget_unread(OWNER, each.key)
        left = [view.session_id for view in this.world.do(this.world.manager.list(OWNER)).sessions]
        assert left == [theirs.place.session_id]
