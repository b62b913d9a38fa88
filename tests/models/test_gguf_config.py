"""Keys of GGUF files mean what llama.cpp makes of them, and so do those that files leave out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from session_server.models.config import (
    AttentionConfig,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    RopeKind,
)
from session_server.models.errors import ModelError, UnsupportedModel
from session_server.models.gguf.reader import GgufFile, read_gguf
from session_server.models.registry import gguf_config
from tests.oracle.checkpoints import write_checkpoint
from tests.oracle.gguf_files import ARCHITECTURES, write_gguf


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufFile]:
    root = tmp_path_factory.mktemp("files")
    found = {}
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "lfm2"):
        own: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
        if family == "gemma3_text":
            own = {}
        own |= {"mlp_only_layers": []} if family == "qwen3_moe" else {}
        own |= {"conv_bias": False} if family == "lfm2" else {}
        twin = write_checkpoint(family, root / family, **own)
        found[ARCHITECTURES[family]] = read_gguf(write_gguf(twin, root / f"{family}.gguf"))
    return found


def config(file: GgufFile, **changed: Any) -> ModelConfig:
    """Read the file, without scaling, with keys changed: `__` is a dot, None leaves one out."""
    metadata = {key: value for key, value in file.metadata.items() if ".rope.scaling" not in key}
    for key, value in changed.items():
        name = f"{metadata['general.architecture']}.{key.replace('__', '.')}"
        metadata.pop(name, None)
        if value is not None:
            metadata[name] = value
    return gguf_config(replace(file, metadata=metadata))


def mixers(of: ModelConfig) -> list[AttentionConfig]:
    return [layer.mixer for layer in of.layers if isinstance(layer.mixer, AttentionConfig)]


def rope(of: ModelConfig) -> RopeConfig:
    found = mixers(of)[-1].rope
    assert found is not None
    return found


YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
SAVED = {
    "rope__scaling__attn_factor": 1.0,
    "rope__scaling__yarn_attn_factor": 1.0,
    "rope__scaling__yarn_ext_factor": -1.0,
    "rope__scaling__yarn_log_multiplier": 0.0,
    "rope__scaling__finetuned": False,
}
"""What llama.cpp writes for every model that it saves."""


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("others", [{}, SAVED], ids=["converted", "saved"])
def test_yarn_sharpens_attention_as_its_factor_says(
    architecture: str, others: dict[str, Any], files: dict[str, GgufFile]
) -> None:
    found = rope(config(files[architecture], **YARN, **others))
    assert (found.rope_type, found.factor) == (RopeKind.YARN, 4.0)
    assert math.isclose(found.attention_factor, 1 + 0.1 * math.log(4))
    assert (found.high, found.low) == (32.0, 1.0)


def test_the_factor_of_attention_multiplies_and_that_of_yarn_replaces(
    files: dict[str, GgufFile],
) -> None:
    computed = 1 + 0.1 * math.log(4)
    for own, of_attention, meant in (
        (None, 1.5, 1.5 * computed),
        (1.0, 1.5, 1.5 * computed),
        (1.2, None, 1.2),
        (1.2, 1.5, 1.2 * 1.5),
    ):
        keys = {
            "rope__scaling__yarn_attn_factor": own,
            "rope__scaling__attn_factor": of_attention,
        }
        assert math.isclose(rope(config(files["llama"], **YARN, **keys)).attention_factor, meant)


def test_the_bounds_and_the_trained_length_of_yarn_are_read(files: dict[str, GgufFile]) -> None:
    found = rope(
        config(
            files["llama"],
            **YARN,
            rope__scaling__yarn_beta_fast=16.0,
            rope__scaling__yarn_beta_slow=2.0,
            rope__scaling__original_context_length=77,
        )
    )
    assert (found.high, found.low, found.original_max_position_embeddings) == (16.0, 2.0, 77)
    trained = config(files["llama"], **YARN)
    assert rope(trained).original_max_position_embeddings * 4 == trained.max_position_embeddings


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scale_linear": 4.0}, 4.0),
        ({"rope__scaling__factor": 2.0, "rope__scale_linear": 4.0}, 2.0),
        ({"rope__scaling__type": "linear", "rope__scale_linear": 4.0}, 4.0),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0, **SAVED}, 1.0),
        ({"rope__scaling__type": "linear"}, 1.0),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, 1.0),
        ({}, 1.0),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3"])
def test_a_scaling_without_a_type_is_linear(
    keys: dict[str, Any], factor: float, architecture: str, files: dict[str, GgufFile]
) -> None:
    found = config(files[architecture], **keys, rope__freq_base_swa=None)
    kind = RopeKind.DEFAULT if factor == 1 else RopeKind.LINEAR
    assert (rope(found).rope_type, rope(found).factor) == (kind, factor)
    if architecture == "gemma3":
        first = mixers(found)[0]
        assert first.sliding_window is not None
        assert first.rope == RopeConfig(10_000.0)


@pytest.mark.parametrize(
    ("architecture", "keys", "name"),
    [
        ("llama", {"rope__scaling__attn_factor": 1.5}, "attn_factor 1.5"),
        ("qwen2", {"rope__scaling__type": "none", "rope__scaling__attn_factor": 2.0}, "attn_fac"),
        ("llama", {"rope__scaling__alpha": 1000.0}, "rope.scaling.alpha"),
        ("llama", YARN | {"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor 0.5"),
        ("llama", YARN | {"rope__scaling__yarn_ext_factor": 0.0}, "yarn_ext_factor 0.0"),
        ("llama", YARN | {"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ("gemma3", YARN | {"rope__scaling__attn_factor": 1.5}, "attn_factor"),
        ("gemma2", {"rope__freq_base_swa": 1234.0}, "rope.freq_base_swa"),
        ("gemma3", {"attention__key_length_swa": 4}, "key_length_swa"),
        ("gemma3", {"rope__dimension_count_swa": 4}, "dimension_count_swa"),
        ("lfm2", {"attention__sliding_window": 8}, "sliding_window 8"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(
    architecture: str, keys: dict[str, Any], name: str, files: dict[str, GgufFile]
) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        config(files[architecture], **keys)


def test_gemma_2_has_soft_caps_and_a_window_of_its_own(files: dict[str, GgufFile]) -> None:
    found = config(
        files["gemma2"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention__sliding_window=None,
        context_length=8192,
    )
    assert found.final_logit_softcapping == 30.0
    assert {mixer.attn_logit_softcapping for mixer in mixers(found)} == {50.0}
    windows = [mixer.sliding_window for mixer in mixers(found)]
    assert windows == [None if index % 2 else 4096 for index in range(len(windows))]


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
@pytest.mark.parametrize("period", [0, 1, 3])
def test_a_period_of_layers_says_which_have_a_window(
    architecture: str, period: int, files: dict[str, GgufFile]
) -> None:
    found = config(files[architecture], attention__sliding_window_pattern=period)
    windowed = [mixer.sliding_window is not None for mixer in mixers(found)]
    assert windowed == [period == 0 or (i + 1) % period != 0 for i in range(len(windowed))]


def test_a_period_that_is_none_is_refused(files: dict[str, GgufFile]) -> None:
    for pattern in (-1, 2.0, "x"):
        with pytest.raises(ModelError, match="sliding_window_pattern"):
            config(files["gemma2"], attention__sliding_window_pattern=pattern)


@pytest.mark.parametrize("window", [None, 0])
def test_gemma_3_without_a_window_has_full_attention_in_all_layers(
    window: int | None, files: dict[str, GgufFile]
) -> None:
    found = config(files["gemma3"], attention__sliding_window=window, rope__freq_base=5e5)
    assert {mixer.sliding_window for mixer in mixers(found)} == {None}
    assert {mixer.rope for mixer in mixers(found)} == {RopeConfig(5e5)}


def test_gemma_3_has_defaults_for_windows_and_no_soft_cap(files: dict[str, GgufFile]) -> None:
    for cap in (None, 0.0):
        found = config(
            files["gemma3"],
            final_logit_softcapping=cap,
            rope__freq_base_swa=None,
            attention__sliding_window_pattern=None,
        )
        assert found.final_logit_softcapping is None
        assert [mixer.sliding_window is None for mixer in mixers(found)] == [
            (index + 1) % 6 == 0 for index in range(len(found.layers))
        ]
        assert mixers(found)[0].rope == RopeConfig(10_000.0)


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES.values())))
def test_keys_that_are_left_out_are_what_llama_cpp_assumes(
    architecture: str, files: dict[str, GgufFile]
) -> None:
    file = files[architecture]
    found = config(file, rope__freq_base=None)
    assert rope(found).rope_theta == 10_000.0
    heads = int(file.metadata[f"{architecture}.attention.head_count"])
    lengths = {"attention__key_length": None, "attention__value_length": None}
    found = config(file, **lengths, embedding_length=heads * 6)
    assert {mixer.head_dim for mixer in mixers(found)} == {6}
    if architecture != "lfm2":
        found = config(file, attention__head_count_kv=None)
        assert {mixer.num_kv_heads for mixer in mixers(found)} == {heads}
    required = ("attention__layer_norm_rms_epsilon", "context_length", "block_count")
    for key in (*required, "embedding_length"):
        with pytest.raises(ModelError, match=r"lacks the number"):
            config(file, **{key: None})


def test_lengths_of_values_default_on_their_own(files: dict[str, GgufFile]) -> None:
    key_len = files["llama"].metadata["llama.attention.key_length"]
    with pytest.raises(UnsupportedModel, match="different lengths"):
        config(
            files["llama"],
            attention__key_length=key_len + 2,
            attention__value_length=None,
        )


def test_experts_of_qwen_3_share_the_size_of_the_feed_forward(files: dict[str, GgufFile]) -> None:
    file = files["qwen3moe"]
    size = file.metadata["qwen3moe.expert_feed_forward_length"]
    used = file.metadata["qwen3moe.expert_used_count"]
    for keys in (
        {"feed_forward_length": None},
        {"expert_feed_forward_length": None, "feed_forward_length": size * used},
        {"expert_feed_forward_length": 0, "feed_forward_length": size * used},
    ):
        found = config(file, **keys)
        for layer in found.layers:
            assert isinstance(layer.ffn, MoeConfig)
            assert layer.ffn.expert.intermediate_size == size
            assert layer.ffn.norm_topk_prob
    with pytest.raises(ModelError, match="feed_forward_length"):
        config(file, expert_feed_forward_length=None, feed_forward_length=None)
    with pytest.raises(ModelError, match="feed_forward_length"):
        config(files["llama"], feed_forward_length=None)


def test_convolutions_of_lfm2_need_their_width(files: dict[str, GgufFile]) -> None:
    with pytest.raises(ModelError, match=r"shortconv\.l_cache"):
        config(files["lfm2"], shortconv__l_cache=None)
    assert config(files["lfm2"], attention__sliding_window=0) == config(files["lfm2"])
    length = files["lfm2"].metadata["lfm2.context_length"]
    assert config(files["lfm2"], attention__sliding_window=length) == config(files["lfm2"])
