"""Checkpoints from elsewhere: whatever their files are and say, a line of text, never a hang."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from session_server.models import bounds
from session_server.models.checkpoint_files import CheckpointFiles
from session_server.models.config import ModelConfig
from session_server.models.errors import CheckpointError, ModelError
from session_server.models.files import find_file, find_files, read_bytes, read_object
from session_server.models.registry import FAMILIES, load_config, parse_config
from session_server.text.model_files import read_model_files
from tests.models.raw_configs import RAW_CONFIGS

BASE = RAW_CONFIGS["llama"]


def refused(change: Mapping[str, Any], family: str = "llama") -> str:
    """The words in which a configuration is refused."""
    with pytest.raises(ModelError) as refusal:
        parse_config({**RAW_CONFIGS[family], **change})
    return str(refusal.value)


class TestNumbers:
    def test_yarn_needs_a_base_that_grows(self) -> None:
        scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
        words = refused({"rope_theta": 1.0, "rope_scaling": scaling})
        assert words == "rope scaling 'yarn' needs a rope_theta above 1, it is 1"

    def test_each_field_has_a_range_that_holds(self) -> None:
        for name, (low, high) in (bounds.INTEGERS | bounds.NUMBERS).items():
            kind = int if name in bounds.INTEGERS else float
            for value in (kind(low), kind(high)):
                bounds.check_fields({name: value})
            wrong: list[Any] = [math.nan, math.inf, -math.inf, True, "12", [1], -1e-9, high * 1.01]
            wrong += [int(low) - 1, int(high) + 1] if kind is int else []
            for value in wrong:
                with pytest.raises(CheckpointError, match=name):
                    bounds.check_fields({name: value})

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"num_hidden_layers": 1_000_000}, "num_hidden_layers .* 0 to 1024, it is 1000000"),
            ({"head_dim": 10**9}, "head_dim"),
            ({"rope_theta": math.nan}, "rope_theta .*it is nan"),
            ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "factor"),
            ({"num_attention_heads": True}, "num_attention_heads .*it is True"),
            ({"hidden_size": 4, "num_attention_heads": 8}, "head_dim 0 is not even"),
            ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
            ({"rope_scaling": [1]}, "rope_scaling must be an object"),
            ({"attention_bias": "no"}, "attention_bias must be true or false"),
            ({"vocab_size": "9" * 5000}, r"9\.\.\.$"),
        ],
    )
    def test_a_number_that_would_size_something_is_refused(
        self, change: dict[str, Any], named: str
    ) -> None:
        text = refused(change)
        assert re.search(named, text), text
        assert len(text) < 300

    @pytest.mark.parametrize(
        ("family", "name"),
        [
            ("lfm2", "conv_L_cache"),
            ("granitemoehybrid", "mamba_d_conv"),
            ("qwen3_5_text", "linear_conv_kernel_dim"),
        ],
    )
    def test_a_convolution_is_no_wider_than_the_kernels_have_memory_for(
        self, family: str, name: str
    ) -> None:
        assert parse_config(RAW_CONFIGS[family] | {name: 16})
        for width in (17, 1024):
            text = refused({name: width}, family)
            assert f"{name} must be an integer from 0 to 16, it is {width}" in text

    def test_heads_are_rotated_in_pairs(self) -> None:
        rope = RAW_CONFIGS["qwen3_5_text"]["rope_parameters"]
        change = {"rope_parameters": rope | {"partial_rotary_factor": 0.2}}
        assert "3 rotated elements" in refused(change, "qwen3_5_text")

    def test_a_stretched_context_is_bounded_too(self) -> None:
        scaling = {"type": "yarn", "factor": 1e6, "original_max_position_embeddings": 1 << 20}
        assert "context length" in refused({"rope_scaling": scaling})

    def test_experts_are_bounded_over_all_layers(self) -> None:
        most = bounds.MAX_EXPERTS_IN_ALL // 1024
        raw = RAW_CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1024, "num_experts": most}
        raw.pop("layer_types", None)
        assert len(parse_config(raw).layers) == 1024
        with pytest.raises(CheckpointError, match="experts in all layers"):
            parse_config(raw | {"num_experts": most + 1})

    def test_more_experts_cannot_be_chosen_than_there_are(self) -> None:
        assert "cannot be chosen" in refused({"num_experts_per_tok": 4096}, "qwen3_moe")


class Watched(dict[str, Any]):
    """A configuration that notes which of its fields are read."""

    def __init__(self, raw: Mapping[str, Any], read: set[str]) -> None:
        super().__init__(
            {
                key: Watched(value, read) if isinstance(value, dict) else value
                for key, value in raw.items()
            }
        )
        self.read = read

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def test_every_field_that_a_family_reads_is_listed_with_its_kind() -> None:
    read: set[str] = set()
    for family, raw in RAW_CONFIGS.items():
        FAMILIES[raw["model_type"]](Watched(raw, read))
        assert read, family
    kinds = (bounds.INTEGERS, bounds.NUMBERS, bounds.FLAGS, bounds.WORDS, bounds.LISTS)
    listed = set().union(*kinds, bounds.OBJECTS)
    # Compared with one value; anything else is refused.
    only_compared = {"moe_layer_freq"}
    assert read - listed == only_compared


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.integers(-2, 70),
    st.floats(),
    st.sampled_from(["", "auto", "default", "yarn", "x" * 100]),
    st.lists(st.integers(-2, 5), max_size=4),
    st.dictionaries(st.sampled_from(["factor", "type", "rope_type"]), st.integers(), max_size=2),
)
KEYS = sorted(
    bounds.INTEGERS.keys() | bounds.NUMBERS.keys() | bounds.FLAGS | bounds.LISTS | bounds.OBJECTS
)


@given(
    family=st.sampled_from(sorted(RAW_CONFIGS)),
    changes=st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=4),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_mutated_configuration_is_a_sane_model_or_an_error_of_ours(
    family: str, changes: dict[str, Any]
) -> None:
    try:
        config = parse_config(RAW_CONFIGS[family] | changes)
    except ModelError:
        return
    assert_sane(config)


def assert_sane(config: ModelConfig) -> None:
    """Every size is positive and bounded, every factor is a number."""
    assert 0 < len(config.layers) <= bounds.MAX_LAYERS
    assert 0 < config.max_position_embeddings <= bounds.MAX_CONTEXT_LEN
    assert all(layer.mixer.rotary_dim % 2 == 0 for layer in config.layers)
    for number in numbers_in(set(config.layers)):
        assert not math.isnan(number)
        assert 0 <= number <= 1e15 or number == math.inf
    config.cache_spec(16, "float32")


def numbers_in(value: Any) -> Iterator[float]:
    """Every number of nested descriptions."""
    if is_dataclass(value):
        for field in fields(value):
            yield from numbers_in(getattr(value, field.name))
    elif isinstance(value, tuple | list | set):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, int | float):
        yield value


class TestFiles:
    """Each reads one file of a checkpoint; the same things must not be done to any."""

    READERS: Mapping[str, Callable[[Path], object]] = {
        "config.json": load_config,
        "tokenizer.json": read_model_files,
        "tokenizer_config.json": read_model_files,
        "generation_config.json": read_model_files,
        "chat_template.jinja": read_model_files,
        "model.safetensors": CheckpointFiles,
        "other.json": CheckpointFiles,
    }

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(BASE))
        (folder / "tokenizer.json").write_text("{}")
        return folder

    @pytest.mark.parametrize("name", READERS)
    def test_no_reader_opens_what_is_no_regular_file_of_the_directory(
        self, name: str, model: Path, tmp_path: Path
    ) -> None:
        path, read = model / name, self.READERS[name]
        outside = tmp_path / "outside"
        outside.write_text("{}")

        def fails_with(reason: str) -> None:
            with pytest.raises(CheckpointError, match=rf"{name}.* {reason}"):
                read(model)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

        path.unlink(missing_ok=True)
        os.mkfifo(path)
        fails_with("not a regular file")
        path.mkdir()
        fails_with("not a regular file")
        path.symlink_to(outside)
        fails_with("leads out of")
        path.symlink_to("/dev/zero")
        fails_with("leads out of")
        path.symlink_to(model / "nothing")
        fails_with("not there")
        path.symlink_to(path)
        fails_with("cannot be read")

    def test_a_link_within_the_directory_or_into_the_blobs_of_the_hub_is_followed(
        self, tmp_path: Path
    ) -> None:
        repository = tmp_path / "models--a--b"
        snapshot = repository / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir()
        (repository / "blobs" / "abc").write_text(json.dumps(BASE))
        (snapshot / "config.json").symlink_to("../../blobs/abc")
        assert load_config(snapshot).model_type == "llama"
        (tmp_path / "model").symlink_to(snapshot)
        assert load_config(tmp_path / "model").model_type == "llama"
        (snapshot / "again.json").symlink_to("config.json")
        assert [path.name for path in find_files(snapshot, "*.json")] == [
            "again.json",
            "config.json",
        ]
        (snapshot / "secret.json").symlink_to("../../refs")
        with pytest.raises(CheckpointError):
            find_file(snapshot, "secret.json")

    @pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "a/b", "", ".", "..", "\0"])
    def test_a_name_that_is_a_path_is_refused(self, name: str, model: Path) -> None:
        with pytest.raises(CheckpointError, match="not the name of a file"):
            find_file(model, name)

    def test_a_file_is_read_up_to_its_bound(self, model: Path) -> None:
        (model / "a").write_bytes(bytes(100))
        assert read_bytes(model, "a", 100) == bytes(100)
        with pytest.raises(CheckpointError, match="larger than 99 bytes"):
            read_bytes(model, "a", 99)
        assert read_bytes(model, "b", 99) is None

    @pytest.mark.parametrize(
        ("content", "named"),
        [
            (b"[" * 100_000, "nested too deeply"),
            (b'{"a": NaN}', "NaN is not a number"),
            (b'{"a": -Infinity}', "Infinity is not a number"),
            (b'{"a": "\xff"}', "not UTF-8"),
            (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
            (b"[]", "must hold a JSON object"),
        ],
    )
    def test_what_is_no_json_object_is_an_error_that_says_so(
        self, content: bytes, named: str, model: Path
    ) -> None:
        (model / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=named):
            read_object(model, "config.json", 1 << 20)

    def test_a_file_that_may_not_be_read_says_so(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def denied(*_: object, **__: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", denied)
        with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
            load_config(model)
