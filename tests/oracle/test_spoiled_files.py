"""Files of KV that were spoiled on disk are never used: sessions go on with the tokens of an engine
that has no tiers, and each file is counted that was refused. Spoiled while no engine runs, or
between the moment an engine has found a file and the one in which it reads it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from session_server.core.commands import Shutdown
from session_server.runner.segment_files import file_name
from tests.depth import each_value
from tests.oracle.house import Guest, House
from tests.oracle.talks import Reference, Setup, assert_said
from tests.oracle.test_restored import CHUNK, FAMILIES, MODES, SHALLOW, TieredHouse, lengths_of
from tests.runner.kv_files import resigned

Spoil = Callable[[Path, Path], object]
"""Spoil a file; the other one is that of another session."""


def flipped(place: float) -> Spoil:
    """A bit is another, at this part of the file."""

    def spoil(file: Path, _: Path) -> None:
        raw = bytearray(file.read_bytes())
        raw[int(place * (len(raw) - 1))] ^= 4
        file.write_bytes(raw)

    return spoil


def rewritten(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """The metadata are others, with the checksum that these would have."""

    def spoil(file: Path, _: Path) -> None:
        raw = file.read_bytes()
        end = 8 + struct.unpack_from("<Q", raw)[0]
        header = json.loads(raw[8:end])
        change(header["__metadata__"])
        file.write_bytes(resigned(header) + raw[end:])

    return spoil


def moved(metadata: dict[str, Any]) -> None:
    """The pages of each pool are those of other places."""
    spans = json.loads(metadata["spans"])
    metadata["spans"] = json.dumps({pool: [f + 1, e + 1] for pool, (f, e) in spans.items()})


def swapped(file: Path, other: Path) -> None:
    """Each has the name of the other."""
    raw = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(raw)


def replaced(make: Callable[[Path], object]) -> Spoil:
    """Something else lies in its place."""

    def spoil(file: Path, _: Path) -> None:
        file.unlink()
        make(file)

    return spoil


def link(file: Path) -> None:
    """A link to nowhere."""
    file.symlink_to("nowhere")


REFUSED: Final[dict[str, Spoil]] = {
    "a bit of the length": flipped(0.0),
    "a bit of the header": lambda file, _: flipped(200 / file.stat().st_size)(file, file),
    "a bit of a page": flipped(0.6),
    "the last bit": flipped(1.0),
    "another model": rewritten(lambda m: m.update(layout="0" * 64)),
    "another salt": rewritten(lambda m: m.update(namespace="0" * 32)),
    "another chain": rewritten(lambda m: m.update(chain="0" * 32)),
    "another name": rewritten(lambda m: m.update(name="0" * 32)),
    "another start": rewritten(lambda m: m.update(start="16")),
    "fewer tokens": rewritten(lambda m: m.update(num_tokens=str(int(m["num_tokens"]) // 2))),
    "other pages": rewritten(moved),
    "another format": rewritten(lambda m: m.update(format="session-server KV 2")),
    "cut": lambda file, _: os.truncate(file, file.stat().st_size - 1),
    "cut in two": lambda file, _: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file, _: os.truncate(file, 0),
    "longer": lambda file, _: file.write_bytes(file.read_bytes() + b"\0"),
    "the file of another": swapped,
    "another's file in its place": lambda file, other: file.write_bytes(other.read_bytes()),
}
NO_FILES: Final[dict[str, Spoil]] = {
    "gone": replaced(lambda _: None),
    "a link": replaced(link),
    "a pipe": replaced(os.mkfifo),
    "a directory": replaced(os.mkdir),
}
SPOILS: Final = REFUSED | NO_FILES

CASES: Final = [
    Setup(family, page_size, CHUNK, overlap)
    for family, (page_size, overlap) in each_value(FAMILIES, MODES)
]
"""How files are checked is the same for every layout."""


def talked(house: TieredHouse) -> list[Guest]:
    """A session for each way to spoil a file, and one whose file stays; all are written."""
    length = lengths_of(CASES[0])[-1] + 16
    guests = []
    for index in range(len(SPOILS) + 1):
        guest = house.open((3 + index,))  # no two begin with the same page
        house.say(guest, length, 1)
        guests.append(guest)
    house.rest(Shutdown())
    assert house.engine.has_shut_down
    return guests


def files_of(house: TieredHouse, guests: list[Guest], directory: Path) -> list[Path]:
    """The first file of each session."""
    files = []
    for guest in guests:
        namespace = house.cache.slot(guest.id).namespace
        path = house.engine.inspect().tiers.store.find(namespace, house.cache.tokens(guest.id))
        files.append(directory / file_name(path.parts[0].segment.content.file_id))
    assert len({*files}) == len(guests)
    assert all(file.is_file() for file in files)
    return files


def spoil_all(files: list[Path]) -> None:
    """Spoil all files but the last, each in a way of its own. Who comes later is not swapped."""
    order = ["the file of another", *(name for name in SPOILS if name != "the file of another")]
    for name in reversed(order):
        at = list(SPOILS).index(name)
        SPOILS[name](files[at], files[-1])


@pytest.mark.parametrize("setup", CASES, ids=str)
def test_files_that_were_spoiled_while_no_engine_ran_are_not_used(
    setup: Setup,
    tmp_path: Path,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    checkpoint = checkpoints[setup.family]
    first = TieredHouse(setup, checkpoint, tmp_path)
    guests = talked(first)
    spoil_all(files_of(first, guests, tmp_path))
    again, plain = TieredHouse(setup, checkpoint, tmp_path), House(setup, checkpoint)
    for guest, name in zip(guests[:-1], SPOILS, strict=True):
        before = again.counts.refused_files
        go_on(again, plain, guest, references[setup.family])
        assert again.counts.restored_tokens == 0, name
        # What lies there and is no file is not even looked at.
        assert again.counts.refused_files - before == (name in REFUSED), name
    assert again.counts.failed_copies <= again.counts.refused_files
    again.assert_empty()


@pytest.mark.parametrize("setup", CASES[: len(MODES)], ids=str)
def test_files_that_were_spoiled_after_they_were_found_are_not_used(
    setup: Setup,
    tmp_path: Path,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    checkpoint = checkpoints[setup.family]
    talking = talked(TieredHouse(setup, checkpoint, tmp_path))
    again, plain = TieredHouse(setup, checkpoint, tmp_path), House(setup, checkpoint)
    guests = [go_on(again, plain, guest, references[setup.family]) for guest in talking]
    assert again.counts.refused_files == 0
    restored = again.counts.restored_tokens
    assert restored > 0
    for guest, _ in guests:
        again.spill(guest)
    spoil_all(files_of(again, [guest for guest, _ in guests], tmp_path))
    for (guest, its), name in zip(guests[:-1], SPOILS, strict=True):
        before = again.counts.refused_files
        again.say(guest, SHALLOW, 2)
        plain.say(its, SHALLOW, 2)
        assert guest.tokens == its.tokens, name
        assert_said(guest.tokens, guest.said, references[setup.family])
        assert again.counts.restored_tokens == restored, name
        # Whoever has removed it knew why: nothing is told.
        assert again.counts.refused_files - before == (name != "gone"), name
    again.assert_empty()


@pytest.mark.parametrize("setup", CASES[: len(MODES)], ids=str)
def test_files_of_another_model_are_not_used(
    setup: Setup,
    tmp_path: Path,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    checkpoint = checkpoints[setup.family]
    guests = talked(TieredHouse(setup, checkpoint, tmp_path))
    again = TieredHouse(setup, checkpoint, tmp_path, "another")
    plain = House(setup, checkpoint)
    for guest in guests:
        go_on(again, plain, guest, references[setup.family])
    assert again.counts.restored_tokens == 0
    assert again.counts.refused_files == 0  # those of the other one are gone from the beginning on


def go_on(
    again: TieredHouse, plain: House, guest: Guest, reference: Reference
) -> tuple[Guest, Guest]:
    """Go on with a session on two engines; both say what the reference says."""
    back, its = (house.open(tuple(guest.tokens)) for house in (again, plain))
    again.say(back, SHALLOW, 2)
    plain.say(its, SHALLOW, 2)
    assert back.tokens == its.tokens
    assert_said(back.tokens, back.said, reference)
    return back, its
