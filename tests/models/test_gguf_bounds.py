"""What a small GGUF header makes of itself is bounded, at each bound and one behind it."""

from __future__ import annotations

import contextlib
import struct
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from session_server.models.bounds import (
    MAX_EXPERTS,
    MAX_EXPERTS_IN_ALL,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
)
from session_server.models.errors import CheckpointError, ModelError
from session_server.models.gguf import config as gguf_fields
from session_server.models.gguf import names, reader
from session_server.models.gguf.names import ROPE_FACTORS, stored_parts
from session_server.models.gguf.reader import GgufFile, GgufTensor, read_gguf
from session_server.models.gguf.types import TENSOR_TYPES
from session_server.models.registry import gguf_config, load_config
from session_server.text import gguf_tokenizer
from session_server.text.gguf_tokenizer import GgufTokens, TokenType
from tests.oracle.checkpoints import write_checkpoint
from tests.oracle.gguf_files import write_gguf

F32 = next(kind for kind in TENSOR_TYPES.values() if kind.name == "F32")
EMPTY = GgufFile(Path("m.gguf"), {}, {}, 0, 0)
INT32, BOOL, STRING, ARRAY = 5, 7, 8, 9


@contextlib.contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Fail if more memory is taken than this at any moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= num_bytes, f"{peak:,} bytes"


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def pair(key: str, kind: int, content: bytes) -> bytes:
    return text(key.encode()) + struct.pack("<I", kind) + content


def numbers(key: str, kind: int, content: bytes, length: int) -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", kind, length) + content)


def texts(key: str, contents: Iterable[bytes]) -> bytes:
    strings = [text(content) for content in contents]
    return numbers(key, STRING, b"".join(strings), len(strings))


def header(path: Path, *pairs: bytes) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
    return path


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str, int], None]:
    """Lower a bound whose own size would take the test too long."""

    def lower(module: ModuleType, name: str, bound: int) -> None:
        assert 0 < bound < getattr(module, name)
        monkeypatch.setattr(module, name, bound)

    return lower


Lower = Callable[[ModuleType, str, int], None]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    folder = tmp_path_factory.mktemp("model")
    twin = write_checkpoint("llama", folder / "hf", num_hidden_layers=1)
    return read_gguf(write_gguf(twin, folder / "m.gguf"))


class TestHeader:
    def test_an_array_of_numbers_takes_the_memory_of_its_bytes(self, tmp_path: Path) -> None:
        content = np.arange(1 << 20, dtype=np.int32).tobytes()
        path = header(tmp_path / "m.gguf", numbers("n", INT32, content, 1 << 20))
        with at_most(2 * len(content) + (1 << 19)):
            values = read_gguf(path).metadata["n"]
        assert (values[0], values[-1]) == (0, (1 << 20) - 1)

    @pytest.mark.parametrize(
        ("described", "held"),
        [
            (texts("k", [b"ab", b"cd", "\U0001f680".encode()]), (b"ab", b"cd", 3 * 8)),
            (numbers("k", INT32, bytes(400), 100), (400,)),
            (numbers("k", BOOL, bytes(100), 100), (800,)),
        ],
    )
    def test_what_is_held_is_counted(
        self, described: bytes, held: tuple[Any, ...], tmp_path: Path, lowered: Lower
    ) -> None:
        path = header(tmp_path / "m.gguf", described)
        bound = sum(item if type(item) is int else sys.getsizeof(item.decode()) for item in held)
        bound += sys.getsizeof("k") + (sys.getsizeof("\U0001f680") if len(held) == 3 else 0)
        lowered(reader, "MAX_HEADER_BYTES", bound)
        assert len(read_gguf(path).metadata["k"]) > 0
        lowered(reader, "MAX_HEADER_BYTES", bound - 1)
        with pytest.raises(CheckpointError, match="bytes of memory"):
            read_gguf(path)

    @pytest.mark.parametrize(
        "described",
        [
            texts("k", (b"%02d" % (index % 100) for index in range(100_000))),
            texts("k", [b"a" * 50_000 + "\U0001f680".encode()] * 18),
            numbers("k", BOOL, bytes(1_000_000), 1_000_000),
        ],
        ids=["short texts", "wide characters", "booleans"],
    )
    def test_a_header_takes_no_more_memory_than_it_may(
        self, described: bytes, tmp_path: Path, lowered: Lower
    ) -> None:
        path = header(tmp_path / "m.gguf", described)
        lowered(reader, "MAX_HEADER_BYTES", 1 << 20)
        assert path.stat().st_size < 1 << 20
        with at_most((1 << 20) + (1 << 19)), pytest.raises(CheckpointError, match="of memory"):
            read_gguf(path)

    def test_the_alignment_is_bounded_before_so_much_is_read(self, tmp_path: Path) -> None:
        for alignment, is_refused in ((reader.MAX_ALIGNMENT, False), (1 << 31, True)):
            described = pair("general.alignment", 4, struct.pack("<I", alignment))
            path = header(tmp_path / "m.gguf", described)
            with path.open("r+b") as file:
                file.truncate(1 << 31)
            with at_most(4 << 20):
                if not is_refused:
                    read_gguf(path)
                    continue
                with pytest.raises(CheckpointError, match="alignment is 2,147,483,648, more than"):
                    read_gguf(path)
        described = pair("general.alignment", 4, struct.pack("<I", reader.MAX_ALIGNMENT + 1))
        with pytest.raises(CheckpointError, match="no power of two"):
            read_gguf(header(tmp_path / "m.gguf", described))
        described = pair("general.alignment", 4, struct.pack("<I", 2 * reader.MAX_ALIGNMENT))
        with pytest.raises(CheckpointError, match="more than"):
            read_gguf(header(tmp_path / "m.gguf", described))

    @pytest.mark.parametrize("key", ["general.alignment", "split.count", "general.architecture"])
    def test_an_error_does_not_quote_a_list(self, key: str, tmp_path: Path) -> None:
        path = header(tmp_path / "m.gguf", numbers(key, INT32, bytes(4 << 18), 1 << 18))
        with at_most(5 << 19), pytest.raises(ModelError) as refused:
            load_config(path)
        assert len(str(refused.value)) < 300


class TestSettings:
    def test_a_list_has_no_more_numbers_than_there_may_be_layers(self, file: GgufFile) -> None:
        key = "llama.attention.head_count_kv"
        given = file.metadata[key]
        for kind in (list[Any], lambda values: array("i", values)):
            values = kind([given] * MAX_LAYERS)
            same = gguf_config(replace(file, metadata={**file.metadata, key: values}))
            assert same == gguf_config(file)
            values = kind(list(range(1, MAX_LAYERS + 2)))
            with pytest.raises(CheckpointError, match="1,025 numbers, more than 1024 layers"):
                gguf_config(replace(file, metadata={**file.metadata, key: values}))

    def test_rotary_factors_are_counted_before_they_are_read(
        self, file: GgufFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mixer: Any = gguf_config(file).layers[0].mixer
        num_pairs = mixer.rotary_dim // 2
        asked = []

        def read(_: Path, __: int, num_bytes: int) -> bytearray:
            asked.append(num_bytes)
            return bytearray(struct.pack("<f", 1.0) * (num_bytes // 4))

        monkeypatch.setattr(gguf_fields, "read_range", read)

        def config_with(length: int) -> Any:
            tensor = GgufTensor(F32, (length,), 0, 4 * length)
            return gguf_config(replace(file, tensors={**file.tensors, ROPE_FACTORS: tensor}))

        assert config_with(num_pairs).layers[0].mixer.rope.factors == (1.0,) * num_pairs
        assert asked == [4 * num_pairs]
        for length in (num_pairs + 1, 1 << 40):
            with pytest.raises(CheckpointError, match=f"{length} factors for {num_pairs} rotary"):
                config_with(length)
        assert asked == [4 * num_pairs]


class TestExperts:
    def parts(self, *num_experts: int, short: str = "ffn_up_exps") -> int:
        tensors = {
            f"blk.{layer}.{short}.weight": GgufTensor(F32, (num, 1, 1), 0, 4 * num)
            for layer, num in enumerate(num_experts)
        }
        file = replace(EMPTY, tensors=tensors, metadata={"general.architecture": "qwen3moe"})
        return len(stored_parts(file, {}))

    def test_experts_of_a_layer_are_counted_before_they_are_named(self) -> None:
        assert self.parts(MAX_EXPERTS) == MAX_EXPERTS
        for num_experts in (MAX_EXPERTS + 1, 1 << 40):
            with at_most(1 << 16), pytest.raises(CheckpointError, match="experts: more than 8,192"):
                self.parts(num_experts)

    def test_experts_of_all_layers_are_counted_before_they_are_named(self, lowered: Lower) -> None:
        most = [MAX_EXPERTS] * (MAX_EXPERTS_IN_ALL // MAX_EXPERTS)
        with at_most(1 << 17), pytest.raises(CheckpointError, match="or 131,072 in all"):
            self.parts(*most, 1)
        lowered(names, "MAX_EXPERTS_IN_ALL", 60)
        assert self.parts(20, 20, 20) == 60
        with pytest.raises(CheckpointError, match="or 60 in all"):
            self.parts(20, 20, 20, 1)

    def test_a_matrix_is_no_stack(self) -> None:
        assert self.parts(MAX_EXPERTS + 1, short="ffn_up") == 1


def tokens_of(contents: list[str], **fields: Any) -> GgufTokens:
    given = {
        "model": "llama",
        "tokens": contents,
        "scores": array("f", [-float(index) for index in range(len(contents))]),
        **fields,
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in given.items()}
    return GgufTokens(replace(EMPTY, metadata=metadata))


class TestTokens:
    def test_a_token_has_a_longest_text(self) -> None:
        most = gguf_tokenizer.MAX_TOKEN_CHARS
        assert tokens_of(["a" * most]).texts
        with pytest.raises(CheckpointError, match="a token of 1,025 characters, more than 1,024"):
            tokens_of(["a" * (most + 1)])

    def test_the_parts_of_a_text_are_looked_at_one_by_one(self) -> None:
        longest = "ab" * (gguf_tokenizer.MAX_TOKEN_CHARS // 2)
        tokens = tokens_of(["a", longest, longest[1:]])
        with at_most(1 << 16):
            content = tokens.tokenizer_json()
        assert '"merges": [["a", "ba' in content

    def test_merges_that_follow_from_scores_have_bounds(self, lowered: Lower) -> None:
        tokens = tokens_of(["a" * length for length in range(1, 201)])
        num_chars = sum(length * (length - 1) for length in range(1, 201))
        lowered(gguf_tokenizer, "MAX_MERGE_CHARS", num_chars)
        vocabulary = {content: index for index, content in enumerate(tokens.texts)}
        with at_most(19_900 * 100):
            merges = tokens._merges(vocabulary)
        assert len(merges) == 19_900
        lowered(gguf_tokenizer, "MAX_MERGE_CHARS", num_chars - 1)
        with pytest.raises(CheckpointError, match="merges of its tokens have more than"):
            tokens.tokenizer_json()

    def test_a_file_has_so_many_tokens(self) -> None:
        assert tokens_of([""] * MAX_VOCAB_SIZE, scores=None).texts
        with pytest.raises(CheckpointError, match="4,194,305 tokens, more than 4,194,304"):
            tokens_of([""] * (MAX_VOCAB_SIZE + 1), scores=None)

    @pytest.mark.parametrize(
        "kind", [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL]
    )
    def test_a_file_has_so_many_tokens_beside_the_vocabulary(
        self, kind: TokenType, lowered: Lower
    ) -> None:
        lowered(gguf_tokenizer, "MAX_ADDED_TOKENS", 50)
        assert tokens_of(["a"] * 60, token_type=array("i", [kind] * 50 + [TokenType.UNUSED] * 10))
        types = array("i", [kind] * 51 + [TokenType.UNUSED] * 9)
        if kind == TokenType.NORMAL:
            assert tokens_of(["a"] * 60, token_type=types).types == types
            return
        with pytest.raises(CheckpointError, match="51 control and user-defined tokens"):
            tokens_of(["a"] * 60, token_type=types)

    @pytest.mark.parametrize("key", ["model", "pre"])
    def test_an_error_does_not_quote_a_list(self, key: str) -> None:
        fields = {"model": "gpt2", key: array("i", range(1 << 18))}
        with at_most(1 << 16), pytest.raises(ModelError, match="'None' is not implemented"):
            tokens_of(["a"], **fields).tokenizer_json()

    @pytest.mark.parametrize("key", ["model", "pre", "eos_token_id", "bos_token_id", "scores"])
    def test_a_list_in_place_of_a_setting_is_no_error_of_python(self, key: str) -> None:
        for model in ("llama", "gpt2"):
            for value in ([], ["a"], array("i", [1, 2]), [True]):
                tokens = tokens_of(["a", "b"], **{"model": model, key: value})
                assert tokens.end_ids() == frozenset()
                with contextlib.suppress(ModelError):
                    tokens.tokenizer_json()
