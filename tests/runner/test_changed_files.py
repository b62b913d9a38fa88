"""A file of KV that is not, in every field and byte, what was written is never used: it is refused
and put aside, nothing is raised, and what it claims is not allocated.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.types import Namespace, PoolName
from session_server.core.tier_orders import FoundFile
from session_server.runner.segment_files import SegmentFiles
from session_server.runner.segment_format import (
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    FileRefused,
    Layout,
    PoolLayout,
)
from tests.depth import at_depth
from tests.runner.kv_files import (
    FULL,
    LAYOUT,
    PAGE_SIZE,
    REFUSED,
    STATE,
    WINDOW,
    Shelf,
    Written,
    found_of,
    key_of,
    open_descriptors,
    path_of,
    with_header,
    with_text,
    written,
)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "kv")


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """One for many examples."""
    return Shelf(tmp_path_factory.mktemp("kv") / "kv")


# Changed bytes


def test_no_byte_of_a_header_can_be_changed(lasting: Shelf) -> None:
    raw = lasting.segment.raw
    for at in range(lasting.segment.header_len):
        for mask in (1, 0x20, 0x80, 0xFF)[:: at_depth(3, proof=1)]:
            changed = bytearray(raw)
            changed[at] ^= mask
            assert not lasting.is_used(bytes(changed)), f"byte {at} ^ {mask}"
    assert lasting.is_used(raw)


@settings(deadline=None, max_examples=at_depth(200, proof=2_000))
@given(data=st.data())
def test_no_bytes_of_a_payload_can_be_changed(lasting: Shelf, data: st.DataObject) -> None:
    raw = bytearray(lasting.segment.raw)
    place = st.integers(lasting.segment.header_len, len(raw) - 1)
    for at in data.draw(st.sets(place, min_size=1, max_size=4)):
        raw[at] ^= data.draw(st.integers(1, 255))
    assert not lasting.is_used(bytes(raw))


def test_a_file_has_neither_more_nor_fewer_bytes(lasting: Shelf) -> None:
    raw, begin = lasting.segment.raw, lasting.segment.header_len
    header = lasting.segment.header
    ends = [t["data_offsets"][1] + begin for n, t in header.items() if n != "__metadata__"]
    cuts = {*range(10), begin - 1, begin, begin + 1, *ends, *(end - 1 for end in ends)}
    cuts |= set(range(0, len(raw), at_depth(61, proof=1)))
    for cut in sorted(cuts - {len(raw)}):
        assert not lasting.is_used(raw[:cut]), f"cut at {cut}"
    for more in (b"\0", b"\0" * 8, raw):
        assert not lasting.is_used(raw + more)
    assert lasting.is_used(raw)


@settings(deadline=None, max_examples=at_depth(200, proof=2_000))
@given(raw=st.binary(max_size=200), length=st.integers(0, 2**64 - 1))
def test_no_other_bytes_are_a_file(lasting: Shelf, raw: bytes, length: int) -> None:
    assert not lasting.is_used(raw)
    assert not lasting.is_used(struct.pack("<Q", length) + raw)


# Changed fields


NUMBER: Final = float("inf")
KINDS: Final[tuple[object, ...]] = (0, 20, True, None, [], {}, NUMBER, 10**400, "x")
PLACES: Final[tuple[object, ...]] = ("BF16", [5, 4], [0, 0], [0, 2**63], None)


def changed_headers(segment: Written) -> Iterator[tuple[str, dict[str, Any]]]:
    """A header with each of its fields gone, and with other values that it might have."""
    header = segment.header
    metadata, tensors = header["__metadata__"], set(header) - {"__metadata__"}
    values = changed_fields(segment)
    assert values.keys() == metadata.keys()
    for field in metadata:
        for value in [*values[field], *KINDS]:
            yield f"{field}: {value!r:.80}", header | {"__metadata__": metadata | {field: value}}
        rest = {name: each for name, each in metadata.items() if name != field}
        yield f"no {field}", header | {"__metadata__": rest}
    for name in tensors:
        for field, place in itertools.product(("dtype", "shape", "data_offsets"), PLACES):
            yield f"{name}: {field} {place}", header | {name: header[name] | {field: place}}
        yield f"no {name}", {each: told for each, told in header.items() if each != name}
    yield "one tensor more", header | {"more": header["tokens"]}
    yield "no metadata", header | {"__metadata__": {}}


def changed_fields(segment: Written) -> dict[str, list[str]]:
    """Other texts that each field of the metadata might have."""
    found, crcs = segment.found, json.loads(segment.header["__metadata__"]["crc32"])
    other = key_of(path_of(seed=4), 4, Namespace("bob", "model"))
    return {
        "format": ["session-server KV 0", "session-server KV 2", ""],
        "layout": [replace(LAYOUT, identity="another").fingerprint],
        "namespace": [other.chain.hex(), ""],
        "chain": [other.chain.hex(), found.file.name.hex()],
        "name": [other.name.hex(), found.file.chain.hex()],
        "start": ["4", "-4", str(2**63), "00", " 0", "0.0"],
        "num_tokens": ["16", "24", "0", "-20", "20.0", " 20", "9" * 4000, str(2**63), "1e999"],
        "spans": [
            json.dumps({**found.spans, pool: span})
            for pool, span in itertools.product(
                (FULL, WINDOW, STATE),
                [(0, 4), (1, 5), (0, 5), (3, 5), (2, 4), (4, 4), (5, 4), (-1, 5), (0, 2**63)],
            )
            if span != found.spans[pool]
        ]
        + ["{}", "[]", "null", "nonsense", '{"full": [0, Infinity]}', '{"full": NaN}'],
        "crc32": [
            json.dumps(crcs | {name: [check[0] ^ 1, *check[1:]]}) for name, check in crcs.items()
        ]
        + [
            json.dumps(crcs | {"tokens": []}),
            json.dumps(crcs | {"another": [1]}),
            json.dumps(dict(list(crcs.items())[1:])),
            json.dumps(crcs | {"full/0": crcs["full/1"], "full/1": crcs["full/0"]}),
            json.dumps(crcs | {"full/0": [NUMBER]}),
        ],
        "sha256": ["0" * 64, ""],
    }


@pytest.mark.parametrize("signed", [False, True])
def test_no_field_of_a_header_can_be_another(shelf: Shelf, signed: bool) -> None:
    num_tried = 0
    for what, header in changed_headers(shelf.segment):
        raw = with_header(shelf.segment, header, signed=signed)
        if raw == shelf.segment.raw:
            continue  # the checksum was set right again
        num_tried += 1
        assert not shelf.is_used(raw), what
    assert num_tried > 150
    assert shelf.is_used(with_header(shelf.segment, shelf.segment.header))


HOSTILE = {
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "not a number": b'{"__metadata__": NaN}',
    "a list": b"[]",
    "text": b'"__metadata__"',
    "metadata that are text": b'{"__metadata__": "num_tokens"}',
    "a huge number": b'{"__metadata__": ' + b"9" * 100_000 + b"}",
    "half a character": b'{"__metadata__": "\xff"}',
    "UTF-16": '{"__metadata__": {}}'.encode("utf-16"),
    "a million empty lists": b"[" + b"[]," * 340_000 + b"[]]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(shelf: Shelf, name: str) -> None:
    assert not shelf.is_used(with_text(shelf.segment, HOSTILE[name]))


def test_a_key_that_comes_twice_is_refused(shelf: Shelf) -> None:
    text = json.dumps(shelf.segment.header)
    for field in ("start", "num_tokens", "spans", "layout"):
        value = json.dumps(shelf.segment.header["__metadata__"][field])
        twice = text.replace(f'"{field}":', f'"{field}": {value}, "{field}":', 1)
        assert json.loads(twice) == shelf.segment.header
        assert not shelf.is_used(with_text(shelf.segment, twice.encode()))


@pytest.mark.parametrize("length", [0, MAX_HEADER_BYTES + 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_header_of_any_other_length_is_refused(shelf: Shelf, length: int) -> None:
    assert not shelf.is_used(struct.pack("<Q", length) + shelf.segment.raw[8:])
    with shelf.path.open("wb") as file:
        file.write(struct.pack("<Q", length) + shelf.segment.raw[8:])
        file.truncate(MAX_FILE_BYTES)
    assert not shelf.is_read()


def test_what_a_header_claims_is_not_allocated(shelf: Shelf) -> None:
    """Of a file with holes that is as long as it says, but longer than any that is written."""
    tokens = np.zeros(MAX_FILE_BYTES // 2, np.int32)
    tokens[: len(shelf.tokens)] = shelf.tokens
    spans = {FULL: (0, len(tokens) // PAGE_SIZE), WINDOW: (0, 0), STATE: (0, 0)}
    checks = dict.fromkeys(("tokens", "full/0", "full/1", "window/0", "state/0"), (0,))
    header = LAYOUT.header(shelf.segment.found.file, len(tokens), spans, checks | {"state/1": ()})
    num_bytes = len(header.text) + sum(part.num_bytes for part in header.parts.values())
    with shelf.path.open("wb") as file:
        file.write(header.text)
        file.truncate(num_bytes)
    del tokens
    tracemalloc.start()
    assert not shelf.is_read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_file_that_claims_more_than_was_written_is_refused_before_its_pages_are_read(
    shelf: Shelf,
) -> None:
    """It is a whole one of the same name, of more tokens."""
    tokens = np.concatenate([shelf.tokens, np.zeros(1 << 19, np.int32)])
    other = written(shelf.files, shelf.directory, found_of(tokens))
    assert other.file == shelf.segment.file
    assert len(other.raw) > 4 << 20
    del tokens
    tracemalloc.start()
    with pytest.raises(FileRefused):
        shelf.files.read(shelf.segment.found)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


# Other files in its place


def test_whole_files_of_others_are_refused(shelf: Shelf) -> None:
    tokens = shelf.tokens
    longer = np.concatenate([tokens, path_of(1, seed=3)])
    branch = np.concatenate([tokens[:PAGE_SIZE], path_of(4, seed=5)])
    other_spans = FoundFile(
        shelf.segment.found.file, tokens, {**shelf.segment.found.spans, WINDOW: (3, 5)}
    )
    moved = FoundFile(
        shelf.segment.found.file, tokens, {**shelf.segment.found.spans, STATE: (3, 4)}
    )
    others = {
        "another path": found_of(path_of(seed=1)),
        "another tenant": found_of(tokens, namespace=Namespace("bob", "model")),
        "another model of the tenant": found_of(tokens, namespace=Namespace("alice", "other")),
        "another start": found_of(tokens, 4),
        "another chain": found_of(np.concatenate([path_of(1, seed=7), tokens]), 4),
        "shorter": found_of(tokens[:16]),
        "longer": found_of(longer),
        "the same first page": found_of(branch),
        "another window": other_spans,
        "a state of another place": moved,
    }
    for what, found in others.items():
        other = written(shelf.files, shelf.directory, found)
        if other.file != shelf.segment.file:
            (shelf.directory / other.file).rename(shelf.path)
        assert not shelf.is_read(), what
    assert shelf.is_used(shelf.segment.raw)


OTHERS = {
    "page size": Layout(8, LAYOUT.pools, LAYOUT.identity),
    "model": replace(LAYOUT, identity="other bfloat16"),
    "dtype": replace(LAYOUT, identity="model float16"),
    "shape": replace(
        LAYOUT,
        pools={**LAYOUT.pools, FULL: PoolLayout(((0, 2, 8), (1, 0, 16)), 1, is_whole=True)},
    ),
    "axis": replace(
        LAYOUT, pools={**LAYOUT.pools, WINDOW: PoolLayout(((3, 0, 4),), 0, is_whole=False)}
    ),
    "a tensor more": replace(
        LAYOUT, pools={**LAYOUT.pools, STATE: PoolLayout(((0, 6),) * 3, 0, is_whole=False)}
    ),
    "a pool less": replace(LAYOUT, pools={FULL: LAYOUT.pools[FULL]}),
    "the name of a pool": replace(
        LAYOUT, pools={PoolName(f"{name}2"): each for name, each in LAYOUT.pools.items()}
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_another_layout_are_refused(shelf: Shelf, name: str) -> None:
    other = SegmentFiles(shelf.directory, OTHERS[name])
    num_open = open_descriptors()
    assert other.find(shelf.segment.found.file, shelf.tokens) == ([], True)
    shelf.path.write_bytes(shelf.segment.raw)
    with pytest.raises(FileRefused):
        other.read(shelf.segment.found)
    assert open_descriptors() == num_open
    assert os.listdir(shelf.directory / REFUSED) == [shelf.segment.file]
