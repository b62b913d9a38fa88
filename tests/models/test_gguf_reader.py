"""Files that are no GGUF, or damaged, truncated or of kinds that are not read, are refused."""

from __future__ import annotations

import math
import os
import struct
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from session_server.models.errors import CheckpointError, ModelError, UnsupportedModel
from session_server.models.gguf.config import ARCHITECTURES
from session_server.models.gguf.reader import read_gguf, read_range
from session_server.models.gguf.types import TENSOR_TYPES, UNSUPPORTED_TYPES
from session_server.models.registry import gguf_config, load_config
from session_server.runner.weights import load_decoder, open_checkpoint
from tests.oracle.checkpoints import write_checkpoint
from tests.oracle.gguf_files import write_gguf


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("twin") / "hf", num_hidden_layers=1)


@pytest.fixture
def path(twin: Path, tmp_path: Path) -> Path:
    return write_gguf(twin, tmp_path / "model.gguf")


def as_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, array) else value


def write(path: Path, describe: Callable[[GGUFWriter], None], architecture: str = "llama") -> Path:
    writer = GGUFWriter(path, architecture)
    describe(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_header_is_read_as_the_gguf_package_reads_it(path: Path) -> None:
    ours, theirs = read_gguf(path), GGUFReader(path)
    assert len(ours.tensors) == len(theirs.tensors) > 9
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.start, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        content = read_range(path, mine.start, mine.num_bytes)
        assert bytes(content) == tensor.data.tobytes()
    for key, value in ours.metadata.items():
        field = theirs.get_field(key)
        assert field is not None
        assert field.contents() == as_list(value)


def test_metadata_of_every_type_comes_back(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "uint8": 200,
        "int8": -100,
        "uint16": 60_000,
        "int16": -30_000,
        "uint32": 4_000_000_000,
        "int32": -2_000_000_000,
        "uint64": 1 << 60,
        "int64": -(1 << 60),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "žluťoučký",
        "array": ["a", "", "ü"],
    }

    def describe(writer: GGUFWriter) -> None:
        for name, value in values.items():
            getattr(writer, f"add_{name}")(f"x.{name}", value)
        writer.add_array("x.numbers", [1, -2, 3])
        writer.add_array("x.flags", [True, False])

    metadata = read_gguf(write(tmp_path / "m.gguf", describe)).metadata
    assert {name: metadata[f"x.{name}"] for name in values} == values
    assert metadata["x.numbers"].tolist() == [1, -2, 3]
    assert metadata["x.flags"] == [True, False]


def test_the_types_and_their_sizes_are_those_of_the_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        known = GGMLQuantizationType(number)
        assert known.name == kind.name
        assert gguf.GGML_QUANT_SIZES[known] == (kind.block, kind.block_bytes)
    for number, name in UNSUPPORTED_TYPES.items():
        assert GGMLQuantizationType(number).name == name


def test_a_file_that_ends_too_early_is_refused_wherever_it_ends(path: Path) -> None:
    content = path.read_bytes()
    header = read_gguf(path).num_header_bytes
    cuts = [*range(0, header, 61), header, len(content) - 1]
    for cut in cuts:
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"truncated|not a GGUF"):
            read_gguf(path)


def test_random_damage_to_a_header_is_refused_or_harmless(path: Path) -> None:
    content = path.read_bytes()
    header = read_gguf(path).num_header_bytes
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for at in rng.integers(4, header, 3):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path, load_config(path))
        except ModelError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "damaged: it has 1,152"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "damaged: a string"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 2), "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 1 << 50), "damaged: it has"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 1 << 20), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ1s", 3, 0, 1, 1, b"a", 8, 1, b"\xff"), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "architecture 'None' is not implemented"),
    ],
)
def test_what_a_header_must_not_say(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        load_config(path)


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_gguf(tmp_path / "m.gguf")


def test_a_part_of_a_split_file_says_how_to_join_it(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*--merge"):
        read_gguf(path)


def test_an_unknown_architecture_names_those_that_are_known(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lambda _: None, architecture="mamba")
    with pytest.raises(UnsupportedModel, match=r"'mamba' is not implemented.*") as refused:
        load_config(path)
    assert all(name in str(refused.value) for name in ARCHITECTURES)


def test_an_unknown_type_of_tensor_names_those_that_are_known(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.IQ4_NL
    packed = np.zeros((4, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    path = write(
        tmp_path / "m.gguf",
        lambda writer: writer.add_tensor("output.weight", packed, raw_dtype=kind),
    )
    with pytest.raises(UnsupportedModel, match=r"output.weight has the type IQ4_NL.*known: .*Q4_K"):
        load_config(path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"llama.block_count": None}, "lacks the number llama.block_count"),
        ({"llama.block_count": 0}, "num_hidden_layers must be a positive"),
        ({"llama.block_count": 1 << 30}, "num_hidden_layers must be an integer from 0"),
        ({"llama.attention.head_count": 7}, "7 attention heads do not divide"),
        ({"llama.attention.value_length": 4}, "different lengths"),
        ({"llama.rope.dimension_count": 4}, "rotated in part"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama.expert_count": 8}, "Mixtral"),
    ],
)
def test_settings_that_are_not_understood_are_named(
    fields: dict[str, Any], words: str, path: Path, tmp_path: Path
) -> None:
    original = read_gguf(path)
    metadata = {**original.metadata, **fields}

    def describe(writer: GGUFWriter) -> None:
        for key, value in metadata.items():
            if key.startswith("general.") or value is None:
                continue
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        writer.add_tensor("token_embd.weight", np.zeros((131, 48), np.float32))

    with pytest.raises(ModelError, match=words):
        load_config(write(tmp_path / "changed.gguf", describe))


JUNK = ("", "x" * 200, -1, 0, 3, 1 << 40, -0.5, math.nan, math.inf, True, [], [1, 2], ["a"], None)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "lfm2"])
def test_metadata_of_any_kind_is_a_model_or_an_error_of_ours(family: str, tmp_path: Path) -> None:
    twin = write_checkpoint(family, tmp_path / "twin", mlp_only_layers=[], conv_bias=False)
    file = read_gguf(write_gguf(twin, tmp_path / "m.gguf"))
    refused = 0
    for key in [*file.metadata, "llama.rope.scaling.factor", "llama.attention.sliding_window"]:
        for value in JUNK:
            try:
                gguf_config(replace(file, metadata={**file.metadata, key: value}))
            except ModelError:
                refused += 1
    assert refused > 100


def test_a_convolution_that_is_too_wide_is_refused(tmp_path: Path) -> None:
    twin = write_checkpoint("lfm2", tmp_path / "twin", conv_bias=False)
    file = read_gguf(write_gguf(twin, tmp_path / "m.gguf"))
    key = "lfm2.shortconv.l_cache"
    assert gguf_config(replace(file, metadata=file.metadata | {key: 16}))
    with pytest.raises(ModelError, match="conv_L_cache must be an integer from 0 to 16, it is 17"):
        gguf_config(replace(file, metadata=file.metadata | {key: 17}))


def test_missing_and_unexpected_tensors_are_named_and_nothing_is_built(
    twin: Path, tmp_path: Path
) -> None:
    path = write_gguf(twin, tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"))
    with pytest.raises(CheckpointError) as refused:
        load_decoder(path, load_config(path), device=None, dtype=None)  # type: ignore[arg-type]
    assert "missing tensors: model.layers.0.mlp.up_proj.weight" in str(refused.value)
    assert "unexpected tensors: blk.0.ffn_xx.weight" in str(refused.value)
