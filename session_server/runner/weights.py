"""safetensors -> a `Decoder`: checked before use, fused, packed, in anonymous memory.

Weights are copied out of the file mapping: pages of a mapping can be dropped under memory
pressure, and a step that must read them back from disk takes 20 times as long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from session_server.models.config import LayerConfig, ModelConfig
from session_server.models.decoder import Decoder, DecoderLayer
from session_server.models.errors import CheckpointError
from session_server.models.layers.attention import GqaMixer
from session_server.models.layers.linear import make_linear
from session_server.models.layers.mlp import SwiGlu
from session_server.models.layers.norm import RmsNorm
from session_server.models.layers.rope import interleave_pairs

Progress = Callable[[int, int], None]
"""Called with (tensors read, tensors in all)."""

MAX_NAMED_TENSORS: Final = 8
"""An error names so many tensors and counts the rest."""

_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "model.embed_tokens.weight"


def load_decoder(
    directory: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Decoder:
    """Read a checkpoint, sharded or not.

    Args:
        directory: with `*.safetensors`.
        config: from the same directory.
        device: where the weights go.
        dtype: of weights and activations.
        progress: told after every tensor.

    Raises:
        CheckpointError: files or tensors are missing, superfluous, unreadable or of the wrong
            shape; nothing was built.
    """
    with ExitStack() as stack:
        reader = _Reader(directory, stack, device, dtype)
        reader.check(expected_tensors(config), _ignorable(config))
        reader.report_to(progress)
        return _build(config, reader)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this model must have."""
    hidden = config.hidden_size
    expected: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        expected[_HEAD] = (config.vocab_size, hidden)
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        expected.update({prefix + name: shape for name, shape in _layer_tensors(layer, hidden)})
    return expected


def _layer_tensors(layer: LayerConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    mixer, ffn = layer.mixer, layer.ffn
    q_size, kv_size = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    linears = (
        ("self_attn.q_proj", q_size, hidden, mixer.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, mixer.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, mixer.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, mixer.output_bias),
        ("mlp.gate_proj", ffn.intermediate_size, hidden, ffn.bias),
        ("mlp.up_proj", ffn.intermediate_size, hidden, ffn.bias),
        ("mlp.down_proj", hidden, ffn.intermediate_size, ffn.bias),
    )
    for name, outputs, inputs, has_bias in linears:
        yield f"{name}.weight", (outputs, inputs)
        if has_bias:
            yield f"{name}.bias", (outputs,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if mixer.qk_norm:
        yield "self_attn.q_norm.weight", (mixer.head_dim,)
        yield "self_attn.k_norm.weight", (mixer.head_dim,)


def _ignorable(config: ModelConfig) -> set[str]:
    """Tensors that some checkpoints carry and nobody needs."""
    ignorable = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(len(config.layers))
    }
    return ignorable | {_HEAD} if config.tied_embeddings else ignorable


def _build(config: ModelConfig, reader: _Reader) -> Decoder:
    embedding = reader.read(_EMBEDDING)
    layers = [_build_layer(config, index, reader) for index in range(len(config.layers))]
    head = embedding if config.tied_embeddings else reader.read(_HEAD)
    return Decoder(
        config,
        embedding=embedding,
        layers=layers,
        norm=RmsNorm(reader.read("model.norm.weight"), config.norm_eps),
        head=make_linear(head),
    )


def _build_layer(config: ModelConfig, index: int, reader: _Reader) -> DecoderLayer:
    layer, prefix = config.layers[index], f"model.layers.{index}."

    def read(name: str) -> Tensor:
        return reader.read(prefix + name)

    ffn_bias = None
    if layer.ffn.bias:
        ffn_bias = torch.cat((read("mlp.gate_proj.bias"), read("mlp.up_proj.bias")))
    gate_up = torch.cat((read("mlp.gate_proj.weight"), read("mlp.up_proj.weight")))
    down_bias = read("mlp.down_proj.bias") if layer.ffn.bias else None
    return DecoderLayer(
        mixer_norm=RmsNorm(read("input_layernorm.weight"), config.norm_eps),
        mixer=_build_mixer(config, index, read),
        ffn_norm=RmsNorm(read("post_attention_layernorm.weight"), config.norm_eps),
        ffn=SwiGlu(
            make_linear(gate_up, ffn_bias), make_linear(read("mlp.down_proj.weight"), down_bias)
        ),
    )


def _build_mixer(config: ModelConfig, index: int, read: Callable[[str], Tensor]) -> GqaMixer:
    mixer = config.layers[index].mixer

    def fuse(kind: str) -> Tensor:
        q, k, v = (read(f"self_attn.{side}_proj.{kind}") for side in "qkv")
        return torch.cat(
            (interleave_pairs(q, mixer.head_dim), interleave_pairs(k, mixer.head_dim), v)
        )

    qk_norm = None
    if mixer.qk_norm:
        q_gain, k_gain = (
            interleave_pairs(read(f"self_attn.{side}_norm.weight"), mixer.head_dim) for side in "qk"
        )
        gains = torch.cat(
            (q_gain.expand(mixer.num_heads, -1), k_gain.expand(mixer.num_kv_heads, -1))
        )
        qk_norm = RmsNorm(gains, config.norm_eps)
    output_bias = read("self_attn.o_proj.bias") if mixer.output_bias else None
    return GqaMixer(
        mixer,
        index,
        qkv=make_linear(fuse("weight"), fuse("bias") if mixer.qkv_bias else None),
        output=make_linear(read("self_attn.o_proj.weight"), output_bias),
        qk_norm=qk_norm,
    )


class _Reader:
    """Tensors by name, wherever they lie; counts what it has read."""

    def __init__(
        self, directory: Path, stack: ExitStack, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._directory = directory
        self._device = device
        self._dtype = dtype
        self._progress: Progress | None = None
        self._num_read = 0
        self._num_expected = 0
        self._files: dict[str, Any] = {}
        for path in _weight_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None
            self._files.update(dict.fromkeys(file.keys(), file))

    def report_to(self, progress: Progress | None) -> None:
        """Whom to tell about every tensor read."""
        self._progress = progress

    def check(self, expected: dict[str, tuple[int, ...]], ignorable: set[str]) -> None:
        """Compare names and shapes before anything is used.

        Raises:
            CheckpointError: they differ; all differences are named.
        """
        self._num_expected = len(expected)
        faults = []
        missing = sorted(expected.keys() - self._files.keys())
        if missing:
            faults.append(f"missing tensors: {_listed(missing)}")
        unexpected = sorted(self._files.keys() - expected.keys() - ignorable)
        if unexpected:
            faults.append(f"unexpected tensors: {_listed(unexpected)}")
        wrong = []
        for name in sorted(expected.keys() & self._files.keys()):
            shape = tuple(self._files[name].get_slice(name).get_shape())
            if shape != expected[name]:
                wrong.append(f"{name} is {list(shape)} and should be {list(expected[name])}")
        if wrong:
            faults.append(f"wrong shapes: {_listed(wrong)}")
        if faults:
            raise CheckpointError(f"{self._directory}: {'; '.join(faults)}")

    def read(self, name: str) -> Tensor:
        """A copy on the device, in the dtype of the model."""
        tensor: Tensor = self._files[name].get_tensor(name)
        copied = tensor.to(device=self._device, dtype=self._dtype, copy=True)
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, self._num_expected)
        return copied


def _weight_files(directory: Path) -> list[Path]:
    """The shards that the index names, or every safetensors file when there is no index."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{directory} has no *.safetensors file")
        return files
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} is not an index of safetensors files") from None
    absent = sorted(name for name in names if not (directory / name).is_file())
    if absent:
        raise CheckpointError(f"{directory} lacks files its index names: {_listed(absent)}")
    return [directory / name for name in sorted(names)]


def _listed(names: list[str]) -> str:
    rest = len(names) - MAX_NAMED_TENSORS
    return ", ".join(names[:MAX_NAMED_TENSORS]) + (f" and {rest} more" if rest > 0 else "")
