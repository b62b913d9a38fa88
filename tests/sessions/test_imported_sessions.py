"""Files of sessions: what a server has written goes on elsewhere, what none writes is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from session_server import cli
from session_server.core.errors import UnsupportedOperation
from session_server.core.session_events import (
    ChatInput,
    ContinueInput,
    Message,
    TokenInput,
    TurnInput,
)
from session_server.sessions.ended_turns import key_of
from session_server.sessions.opening import history_modes
from session_server.sessions.store.database import Database
from session_server.sessions.store.imported import MAX_MADE, entry_of, settings_of
from session_server.sessions.store.session_file import SessionFile, file_of, write_file
from session_server.sessions.transcript import Transcript
from session_server.sessions.views import HistoryMode
from tests.sessions.test_stored_sessions import Disk
from tests.sessions.world import OWNER, World, completed, letters, model_text, turn

Place = tuple[str | int, ...]
Fields = dict[str, Any]
TURNS = (
    turn("t0", "question 0"),
    turn("raw", letters(model_text())),
    turn("t1", "question 1"),
    turn("gone", "question 2"),
)
TOOL = '{"type": "function", "function": {"name": "f", "parameters": {}}}'


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Disk:
    """A store with one session, `mine`: of its turns one was rewound, and one dropped."""
    disk = Disk(tmp_path_factory.mktemp("import") / "store")
    disk.now_s = 4e9  # nothing expires while the test runs
    with disk.world() as world:
        world.create(is_stored=True, session_id="mine")
        for request in TURNS:
            world.run("mine", request)
        items = world.manager.snapshot(OWNER, "mine").items
        world.manager.edits.rewind(OWNER, "mine", items[-3].id)
        world.submit("mine", turn("dropped", "question 3"))
        world.manager.cancel(OWNER, "mine", "dropped", keep_partial=False)
        world.engine.run()
    return disk


def exported(disk: Disk, name: str = "mine") -> SessionFile:
    with closing(Database(disk.directory, is_read_only=True)) as database:
        (row,) = database.named(None, name, name, limit=9)
        return file_of(row, database.entries(row.number))


def fields_of(file: SessionFile) -> Fields:
    fields: Fields = json.loads(write_file(file))
    return fields


def imports(disk: Disk, fields: Fields, name: str) -> bool:
    path = disk.directory.parent / "talk.json"
    path.write_text(json.dumps(fields))
    words = ["sessions", "import", str(path), "--id", name, "--owner", "owner"]
    return cli.main([*words, "--store", str(disk.directory)]) == 0


def put(fields: Fields, place: Place, value: object) -> None:
    holder: Any = fields
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value


def twice(fields: Fields) -> None:
    fields["ended_turns"].append(fields["ended_turns"][0] | {"index": 0})


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("answers", 0, "end"), 2**31 - 1, "answers[0].end must be items[1].end_len"),
        (("answers", 0, "end"), 0, "answers[0].end must be"),
        (("answers", 2, "item"), 3, "answers[2].item must be from 4 to 5"),
        (("answers", 2, "item"), 6, "answers[2].item must be from 4 to 5"),
        (("answers", 2, "item"), 4, "answers[2].item must be that of an assistant"),
        (("answer_len",), 0, "answer_len must be"),
        (("answer_len",), 5, "answer_len must be"),
        (("answer_len",), 10**6, "answer_len must be at most"),
        (("num_open",), 7, "num_open must be at most 6"),
        (("num_open",), 4, "num_open must count no raw items"),
        (("num_made",), 3, "items[2].id must be i_ and a number from 1 to num_made, 3"),
        (("num_made",), MAX_MADE + 1, "num_made must be at most"),
        (("token_ids", 3), -1, "at `$.token_ids[3]`"),
        (("token_ids", 3), 1 << 31, "at `$.token_ids[3]`"),
        (("items", 0, "id"), "", "items[0].id must be"),
        (("items", 0, "id"), "i_0", "items[0].id must be"),
        (("items", 0, "id"), "../passwd\0\x1b[31m", "items[0].id must be"),
        (("items", 0, "id"), "x" * 100_000, "items[0].id must be"),
        (("items", 1, "id"), "i_2", "items[1].id must be that of no other item"),
        (("items", 0, "turn_id"), "\x1b]0;hi\7", "items[0].turn_id must have"),
        (("items", 0, "turn_id"), "x" * 65, "items[0].turn_id must have"),
        (("items", 0, "role"), "king", "items[0].role must be one of"),
        (("items", 0, "end_len"), -5, "items[0].end_len must be"),
        (("items", 0, "end_len"), 10**15, "items[0].end_len must be"),
        (("items", 2, "end_len"), 10**6, "items[2].end_len must be from"),
        (("items", 0, "reasoning"), "hm", "items[0] must have no tool_calls and no reasoning"),
        (("items", 0, "tool_call_id"), "c", "items[0] must have no tool_call_id"),
        (("tools",), ["{not json"], "tools[0] must be the JSON text of an object"),
        (("tools",), ["[]"], "tools[0] must be the JSON text of an object"),
        (("ended_turns", 0, "index"), 2**32 - 1, "ended_turns[0].index must be less than"),
        (
            ("ended_turns", 0, "index"),
            0,
            "ended_turns[0] must name an answer: i_1 is items[1]",
        ),
        (("ended_turns", 0, "item"), 2**32 - 1, "ended_turns[0].item must be from 1"),
        (
            ("ended_turns", 0, "item"),
            2,
            "ended_turns[0] must name an answer: i_2 is items[0]",
        ),
        (("ended_turns", 2, "item"), 1, "ended_turns[2].item must be from 5"),
        (("ended_turns", 0, "kind"), "failed", "ended_turns[0].detail must be one of"),
        (("ended_turns", 0, "detail"), "\x1b[31m", "ended_turns[0].detail must be one of"),
        (("ended_turns", 0, "request_digest"), "", "ended_turns[0].request_digest must have"),
        (("ended_turns", 0, "cached_tokens"), 10**6, "ended_turns[0].cached_tokens must be"),
        (("ended_turns", 4, "output_tokens"), 6, "ended_turns[4].output_tokens must be 0"),
        (("settings", "ttl_s"), -1, "settings.ttl_s: "),
        (("settings", "metadata"), {"": ""}, "settings.metadata: "),
    ],
    ids=str,
)
def test_what_no_server_writes_is_refused_by_its_place(
    disk: Disk, capsys: pytest.CaptureFixture[str], *, place: Place, value: object, told: str
) -> None:
    fields = fields_of(exported(disk))
    put(fields, place, value)
    assert not imports(disk, fields, "fresh")
    error = capsys.readouterr().err
    assert f"{disk.directory.parent / 'talk.json'} holds " in error
    assert told in error
    assert len(error) < 1000
    with pytest.raises(ValueError, match="not enough values"):
        exported(disk, "fresh")


def test_one_turn_does_not_end_twice(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    fields = fields_of(exported(disk))
    twice(fields)
    assert not imports(disk, fields, "fresh")
    assert "ended_turns[5].id_digest must be that of no other turn" in capsys.readouterr().err


@pytest.mark.parametrize("history", [None, "template"])
@pytest.mark.parametrize("kind", ["chatml", "counting", "hermes", "thinking_tools", "thinking"])
def test_what_a_server_writes_is_taken(
    tmp_path: Path, kind: str, history: HistoryMode | None
) -> None:
    disk, name = Disk(tmp_path / "store"), "mine"
    with disk.world(kind) as world:
        opening = (Message("system", "Be brief."),)
        world.create(is_stored=True, session_id=name, messages=opening, history=history)
        for step in steps_of(world, name, history):
            step()
            check_taken(disk, world, name)
            fork = world.manager.edits.fork(OWNER, name).session_id
            check_taken(disk, world, fork)
            with contextlib.suppress(UnsupportedOperation):  # behind raw input
                world.run(fork, turn("1", "the same turn in a fork"))
            check_taken(disk, world, fork)


def steps_of(
    world: World, name: str, history: HistoryMode | None
) -> Iterator[Callable[[], object]]:
    """What a client may do with a session, one after the other."""
    manager = world.manager

    def run(turn_id: str, asked: str | TurnInput, **sampling: int) -> Callable[[], object]:
        return partial(world.run, name, turn(turn_id, asked, **sampling))

    yield run("1", "Hello")
    yield run("read", "Read this", max_tokens=0)
    yield run("answer", ChatInput(()))
    yield run("more", ContinueInput())
    yield run("long", "A long answer", max_tokens=40)
    if world.text.takes_tools:
        asked = ChatInput((Message("user", "call"),), is_whole=True, tools=(TOOL,))
        yield run("tools", asked)
        yield run("after tools", "and then?")
    items = manager.snapshot(OWNER, name).items
    yield partial(manager.edits.edit_item, OWNER, name, items[-1].id, "another")
    yield partial(manager.edits.edit_item, OWNER, name, items[0].id, "more")
    yield run("edited", "And so?")
    said = [Message(item.role, item.content) for item in manager.snapshot(OWNER, name).items]
    yield run("whole", ChatInput((*said[:-1], Message("user", "again")), is_whole=True))
    yield run("raw", TokenInput(letters(world.text)))
    yield run("raw again", TokenInput(letters(world.text)), max_tokens=0)
    if history is None and kind_appends(world):
        yield run("after raw", "a message")
    items = manager.snapshot(OWNER, name).items
    for item in reversed(items[1:]):
        yield partial(manager.edits.rewind, OWNER, name, item.id)


def kind_appends(world: World) -> bool:
    return world.text.chat is not None and world.text.chat.traits.can_append_tools


def check_taken(disk: Disk, world: World, name: str) -> None:
    """A file of the session is taken, and says what the session is."""
    file = exported(disk, name)
    entry, taken = entry_of(file), settings_of(file)
    own = world.manager._sessions.get(OWNER, name).transcript
    said = Transcript(history_modes(taken.history, world.text), (), now=own.now)
    said.apply(entry.change)
    said.check_places()
    assert (said.tokens(), said.items) == (own.tokens(), own.items)
    assert taken.history in (file.settings.history, own.mode)


PLACES: list[tuple[Place, st.SearchStrategy[object]]] = [
    *(
        ((key, index, field), values)
        for key, index, field in (
            *(("answers", index, name) for index in range(3) for name in ("item", "end")),
            *(("items", index, "end_len") for index in range(6)),
            *(("ended_turns", index, name) for index in range(5) for name in ("item", "index")),
        )
        for values in (st.integers(-1, 60),)
    ),
    *(((key,), st.integers(-1, 60)) for key in ("answer_len", "num_open", "num_made")),
    *((("answers", index, "is_end_replaced"), st.booleans()) for index in range(3)),
    *(
        (("items", index, field), values)
        for index in range(6)
        for field, values in (
            ("id", st.sampled_from(["", *(f"i_{number}" for number in range(9))])),
            ("role", st.sampled_from(["user", "assistant", "raw", "tool", "system"])),
            ("turn_id", st.sampled_from(["", "t0", "t1", "raw", "\0"])),
        )
    ),
    *(
        (("ended_turns", index, field), values)
        for index in range(5)
        for field, values in (
            ("kind", st.sampled_from(["stop", "length", "kept", "dropped", "failed"])),
            ("detail", st.sampled_from(["", "draining", "client_cancelled", "server_busy"])),
            ("output_tokens", st.integers(0, 60)),
        )
    ),
    (("token_ids",), st.lists(st.integers(0, 20), max_size=60)),
    (("items",), st.just([])),
    (("answers",), st.just([])),
    (("settings", "history"), st.sampled_from([None, "append", "template"])),
]
CHANGES = st.lists(
    st.one_of(*(st.tuples(st.just(place), values) for place, values in PLACES)),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(changes=CHANGES)
def test_a_file_is_refused_or_its_session_goes_on(
    disk: Disk, changes: list[tuple[Place, object]]
) -> None:
    fields = fields_of(exported(disk))
    for place, value in changes:
        with contextlib.suppress(IndexError):  # another change has taken all of the list
            put(fields, place, value)
    with tempfile.TemporaryDirectory() as folder:
        copy = Disk(Path(folder) / "store")
        copy.now_s = 1_000_000.0  # what was imported has not expired
        shutil.copytree(disk.directory, copy.directory)
        if not imports(copy, fields, "fresh"):
            return
        with copy.world() as world:
            check_retried(world, fields)
            check_gone_on(world)
            items = world.manager.snapshot(OWNER, "fresh").items
        with copy.world() as world:
            world.do(world.manager.load(OWNER, "fresh"))
            assert world.manager.snapshot(OWNER, "fresh").items == items


def check_retried(world: World, fields: Fields) -> None:
    """Turns that have ended are told again, unless what they said is gone."""
    manager = world.manager
    page = world.do(manager.list(OWNER))
    assert "fresh" in [view.session_id for view in page.sessions]
    there = {(item.turn_id, item.id) for item in manager.snapshot(OWNER, "fresh").items}
    ended = {record["id_digest"]: record["item"] for record in fields["ended_turns"]}
    for request in TURNS:
        item = ended[f"{key_of(request.turn_id):016x}"]
        view = world.submit("fresh", request)
        assert not (view.is_answer_lost and (request.turn_id, f"i_{item}") in there)
        world.engine.run()


def check_gone_on(world: World) -> None:
    """A client may go on from every item."""
    edits = world.manager.edits
    for number, item in enumerate(reversed(world.manager.snapshot(OWNER, "fresh").items)):
        fork = edits.fork(OWNER, "fresh", at_item=item.id).session_id
        edits.rewind(OWNER, "fresh", item.id)
        for name in (fork, "fresh"):
            with contextlib.suppress(UnsupportedOperation):  # behind raw input, in one mode
                completed(world.run(name, turn(f"chat {number}")))
            completed(world.run(name, turn(f"raw {number}", letters(world.text))))
        said = [
            Message(each.role, each.content) for each in world.manager.snapshot(OWNER, fork).items
        ]
        said = [each for each in said if each.role != "raw"]
        whole = ChatInput((*said[: number + 1], Message("user", "And?")), is_whole=True)
        completed(world.run(fork, turn("whole", whole)))
        edits.rewind(OWNER, "fresh", item.id)
        world.manager.close(OWNER, fork)
