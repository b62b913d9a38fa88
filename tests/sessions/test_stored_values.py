"""A store may have values that no server writes, from a hand or from an earlier version: a session
that has them is served, or refused for what it is, and none of them is the end of a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from session_server.core.errors import InternalInconsistency, UnknownModel
from session_server.sessions.store.records import (
    LAST_S,
    LogEntry,
    decode_entry,
    decode_settings,
    encode_entry,
    encode_settings,
)
from tests.sessions.test_stored_sessions import Disk
from tests.sessions.world import OWNER, completed, turn

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """Two sessions with two turns each."""
    disk = Disk(tmp_path / "store")
    with disk.world() as world:
        for name in ("a", "b"):
            world.create(is_stored=True, session_id=name)
            for number in range(2):
                world.run(name, turn(f"t{number}"))
    return disk


def change(
    disk: Disk, settings: dict[str, float], entry: Callable[[LogEntry], LogEntry] = lambda it: it
) -> None:
    """Write the session "a" again with other settings, and another last entry."""
    with disk.world():
        database = disk.store._database
        row = database.find(OWNER.owner_id, "a")
        assert row is not None
        expires_s = settings.get("expires_s", row.expires_s)
        others = {name: value for name, value in settings.items() if name != "expires_s"}
        found = encode_settings(structs.replace(decode_settings(row.settings), **others))
        *before, last = database.entries(row.number)
        row = structs.replace(row, settings=found, expires_s=expires_s, num_entries=0)
        with database.transaction():
            for position, data in enumerate([*before, encode_entry(entry(decode_entry(last)))]):
                if position:
                    database.append(structs.replace(row, num_entries=position), data)
                else:
                    database.put(row, data)


@pytest.mark.parametrize("value", [1e300, INF, -1e300, NAN])
@pytest.mark.parametrize("name", ["created_s", "now_s", "ttl_s", "expires_s"])
def test_a_time_that_no_calendar_has_is_shown_and_turns_run(
    disk: Disk, name: str, value: float
) -> None:
    if name == "expires_s" and value not in (1e300, INF):
        return  # it is over, or no value of SQLite
    change(disk, {name: value})
    with disk.world() as world:
        (first, second) = world.do(world.manager.list(OWNER)).sessions
        assert 0 <= first.created_s <= LAST_S
        assert 0 <= first.ttl_s <= LAST_S
        world.manager.tick()
        world.manager.get(OWNER, "a")
        world.manager.tick()
        completed(world.run("b", turn("next")))
        if name != "ttl_s" or value > 0:
            completed(world.run("a", turn("next")))
            world.manager.edits.rewind(OWNER, "a", None)
        world.manager.close(OWNER, "a")
        assert second.session_id == "b"


@pytest.mark.parametrize("token", [-1, 1_000_000_000, (1 << 31) - 1])
def test_token_ids_that_the_model_does_not_have_are_refused_and_can_be_deleted(
    disk: Disk, token: int
) -> None:
    def replaced(entry: LogEntry) -> LogEntry:
        tokens = np.frombuffer(entry.change.tokens, "<i4").copy()
        tokens[-1] = token
        return structs.replace(entry, change=structs.replace(entry.change, tokens=tokens.tobytes()))

    change(disk, {}, replaced)
    with disk.world() as world:
        for _ in range(2):
            with pytest.raises(UnknownModel, match="token ids that the model does not have"):
                world.manager.get(OWNER, "a")
        assert len(world.do(world.manager.list(OWNER)).sessions) == 2
        world.manager.close(OWNER, "a")
        completed(world.run("b", turn("next")))
        assert len(world.do(world.manager.list(OWNER)).sessions) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"answer_len": -1},
        {"answer_len": 1 << 40},
        {"num_open": 99},
        {"answers.indexes": (0, 0)},
        {"answers.indexes": (99,)},
        {"answers.ends": (99_999,)},
        {"answers.ends": (1 << 40,)},
        {"answers.num_kept": -1},
        {"items.num_made": -1},
        {"turns.item": -1},
        {"turns.input_tokens": 1 << 40},
        {"turns.first_token_ms": 1e300},
        {"turns.kind": "vanished"},
    ],
)
def test_numbers_that_do_not_agree_are_damage(disk: Disk, changes: dict[str, object]) -> None:
    def replaced(entry: LogEntry) -> LogEntry:
        for place, value in changes.items():
            outer, _, name = place.rpartition(".")
            if outer == "turns":
                turns = tuple(structs.replace(turn, **{name: value}) for turn in entry.turns)
                return structs.replace(entry, turns=turns)
            of = structs.replace(getattr(entry.change, outer), **{name: value}) if outer else value
            changed = structs.replace(entry.change, **{outer or name: of})
            entry = structs.replace(entry, change=changed)
        return entry

    change(disk, {}, replaced)
    with disk.world() as world:
        with pytest.raises(InternalInconsistency, match="damaged"):
            world.manager.get(OWNER, "a")
        completed(world.run("b", turn("next")))
