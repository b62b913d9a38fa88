"""Checkpoints that are not what their configuration says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from session_server.models.decoder import Decoder
from session_server.models.errors import CheckpointError
from session_server.models.registry import load_config
from session_server.runner.checkpoint import Checkpoint, Progress
from session_server.runner.weights import expected_tensors, load_decoder
from tests.oracle.checkpoints import to_mxfp4, write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint("llama", tmp_path / "llama", num_hidden_layers=2)


def load(directory: Path, progress: Progress | None = None) -> Decoder:
    config = load_config(directory)
    return load_decoder(
        directory, config, device=torch.device("cpu"), dtype=torch.float32, progress=progress
    )


def rewrite(directory: Path, **changes: Tensor | None) -> None:
    """Replace tensors (`__` stands for a dot); None removes."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path)


def test_the_tensors_of_a_saved_model_are_those_expected(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    expected = expected_tensors(load_config(checkpoint))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected


def test_progress_is_told_of_every_tensor(checkpoint: Path) -> None:
    told: list[tuple[int, int]] = []
    load(checkpoint, lambda num_read, num_all: told.append((num_read, num_all)))
    num_tensors = len(expected_tensors(load_config(checkpoint)))
    assert told == [(i, num_tensors) for i in range(1, num_tensors + 1)]


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(CheckpointError, match=r"missing.*layers\.1\.mlp\.up_proj\.weight"):
        load(checkpoint)


def test_an_unexpected_tensor_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, model__layers__0__self_attn__q_norm__weight=torch.ones(8))
    with pytest.raises(CheckpointError, match=r"unexpected.*q_norm\.weight"):
        load(checkpoint)


def test_a_wrong_shape_is_named_with_both_shapes(checkpoint: Path) -> None:
    rewrite(checkpoint, model__norm__weight=torch.ones(7))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[7\].*be \[48\]"):
        load(checkpoint)


def test_all_faults_are_named_at_once_and_long_lists_are_counted(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config.update(num_hidden_layers=5, vocab_size=99)
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"missing.* and \d+ more; wrong shapes.*lm_head"):
        load(checkpoint)


def test_inverse_frequencies_of_old_checkpoints_are_ignored(checkpoint: Path) -> None:
    rewrite(checkpoint, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load(checkpoint)


def test_a_head_beside_tied_embeddings_is_ignored(tmp_path: Path) -> None:
    directory = write_checkpoint("qwen2", tmp_path, num_hidden_layers=1)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(directory, lm_head__weight=torch.zeros(131, 48))
    logits = load(directory).logits(torch.eye(48))
    torch.testing.assert_close(logits, embedding.T.float())
    assert logits.any()


def test_weights_in_halves_are_computed_in_fp32(checkpoint: Path) -> None:
    halves = {n: t.half() for n, t in load_file(checkpoint / "model.safetensors").items()}
    save_file(halves, checkpoint / "model.safetensors")
    assert load(checkpoint).dtype == torch.float32


def test_no_weights_at_all_is_an_error(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load(checkpoint)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:5000],
        lambda whole: whole[:-1],
        lambda whole: b"",
        lambda whole: whole[:40] + bytes(64) + whole[104:],
        lambda whole: bytes(8) + whole[8:],
    ],
    ids=["cut in the header", "cut by a byte", "empty", "torn header", "torn length"],
)
def test_a_damaged_shard_is_named_before_anything_is_read(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    directory = write_checkpoint("llama", tmp_path, max_shard_size="40KB")
    shard = sorted(directory.glob("*.safetensors"))[-1]
    shard.write_bytes(damage(shard.read_bytes()))
    told: list[int] = []
    with pytest.raises(CheckpointError, match=f"{shard.name} cannot be read"):
        load(directory, lambda num_read, _: told.append(num_read))
    assert told == []


def test_one_shard_is_in_memory_at_a_time(tmp_path: Path) -> None:
    directory = write_checkpoint("qwen3_moe", tmp_path, max_shard_size="40KB")
    mapped: list[set[str]] = []

    def look(*_: int) -> None:
        maps = Path("/proc/self/maps").read_text().split()
        mapped.append({word for word in maps if word.startswith(str(directory))})

    load(directory, look)
    assert max(len(shards) for shards in mapped) == 1
    assert set().union(*mapped) == {str(path) for path in directory.glob("*.safetensors")}


def test_experts_are_asked_for_as_a_checkpoint_spells_them(tmp_path: Path) -> None:
    directory = write_checkpoint("gpt_oss", tmp_path, hidden_size=64, intermediate_size=96)
    to_mxfp4(directory)
    rewrite(directory, model__layers__0__mlp__experts__down_proj_scales=torch.ones(6, 64, 2))
    rewrite(directory, model__layers__1__mlp__experts__gate_up_proj_scales=None)
    named = r"missing.*layers\.1.*gate_up_proj_scales; wrong.*is \[6, 64, 2\].*be \[6, 64, 3\]"
    with pytest.raises(CheckpointError, match=named):
        load(directory)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path, max_shard_size="40KB")
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(directory)


def test_an_index_that_is_no_index_is_an_error(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not an index"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd.safetensors", 7, "a.bin"])
def test_an_index_names_safetensors_files_of_its_directory(tmp_path: Path, name: object) -> None:
    index = {"weight_map": {"model.norm.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"not an index|not the name of a file"):
        Checkpoint(tmp_path)
