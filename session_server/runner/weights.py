"""Build a `Decoder` from a checkpoint: checked before use, fused, packed, in anonymous memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from session_server.models.config import (
    AttentionConfig,
    GatedDeltaConfig,
    Mamba2Config,
    MlaConfig,
    ModelConfig,
    NormConfig,
    NormPlacement,
    QkNorm,
    ShortConvConfig,
)
from session_server.models.decoder import Decoder, DecoderLayer, Mixer, Norms
from session_server.models.layers.attention import GqaMixer, GqaWeights
from session_server.models.layers.block_weight import Weight, concatenate
from session_server.models.layers.gated_delta import GatedDeltaMixer
from session_server.models.layers.mamba2 import Mamba2Mixer
from session_server.models.layers.mla import MlaMixer
from session_server.models.layers.norm import ProjectionNorm, RmsNorm, Scale
from session_server.models.layers.rope import interleave_pairs
from session_server.models.layers.short_conv import ShortConvMixer
from session_server.runner.checkpoint import (
    Checkpoint,
    ExpectedTensors,
    Progress,
    Shape,
    WeightSource,
)
from session_server.runner.device import as_current
from session_server.runner.ffn_weights import take_ffn
from session_server.runner.gguf_checkpoint import GgufCheckpoint
from session_server.runner.host_memory import return_freed_memory
from session_server.runner.layer_factories import BY_TORCH, LayerFactories
from session_server.runner.measured_weights import (
    HeldBytes,
    MeasuredTensors,
    StoredCodes,
    held_by_torch,
)
from session_server.runner.mla_weights import take_mla
from session_server.runner.recurrent_weights import take_gated_delta, take_mamba2, take_short_conv
from session_server.runner.weight_rows import join_rows, reorder_rows

HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "model.embed_tokens.weight"

_NORM_NAMES: Final[dict[NormPlacement, tuple[str | None, ...]]] = {
    NormPlacement.PRE: ("input_layernorm", None, "post_attention_layernorm", None),
    NormPlacement.POST: (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    NormPlacement.SANDWICH: (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Names of the norms before and after the mixer, before and after the ffn."""


def load_decoder(
    directory: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    factories: LayerFactories = BY_TORCH,
) -> Decoder:
    """Load a checkpoint, sharded or not, to weights of `dtype`; report every tensor to `progress`.

    `factories`: decide how the weights of linears and experts are kept.

    Raises:
        CheckpointError: files or tensors are missing, unexpected, unreadable or of the wrong shape;
            nothing was built.
    """
    checkpoint = open_checkpoint(directory, config)
    reader = checkpoint.reader(device=device, dtype=dtype)
    reader.factories = factories
    with as_current(device), return_freed_memory(), reader:
        if progress is not None:
            expected = expected_tensors(config, checkpoint.tensors)
            reader.report_to(progress, len(expected))
        return build_decoder(config, reader)


def open_checkpoint(directory: Path, config: ModelConfig) -> Checkpoint | GgufCheckpoint:
    """Read the headers and compare them with the tensors that the model must have.

    Raises:
        CheckpointError: see `load_decoder`.
    """
    checkpoint: Checkpoint | GgufCheckpoint
    if directory.is_file():
        checkpoint = GgufCheckpoint(directory)
    else:
        checkpoint = Checkpoint(directory, config.quantization)
    expected = expected_tensors(config, checkpoint.tensors)
    checkpoint.check(expected, _ignorable(config, checkpoint.tensors))
    return checkpoint


def expected_tensors(config: ModelConfig, names: Iterable[str] = ()) -> dict[str, Shape]:
    """Return name and shape of every tensor that a checkpoint of this model must have.

    `names`: the tensors that exist; they decide between the spellings of a family.
    """
    expected = ExpectedTensors(names)
    build_decoder(config, expected)
    return expected.shapes


def weight_bytes(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    held_bytes: HeldBytes = held_by_torch,
    stored: StoredCodes | None = None,
) -> int:
    """Return the bytes of the parameters once they are loaded.

    `held_bytes`: what linears hold; the padding of torch's layouts is left out. `stored`: what
    comes as codes; None for nothing.
    """
    tensors = MeasuredTensors(
        device=device,
        dtype=dtype,
        held_bytes=held_bytes,
        stored=stored or StoredCodes(),
    )
    build_decoder(config, tensors)
    return tensors.num_held_bytes


def _ignorable(config: ModelConfig, names: Iterable[str]) -> set[str]:
    """Return those of `names` that some checkpoints carry and the model does not use."""
    num_layers = len(config.layers)
    further = range(num_layers, num_layers + config.num_nextn_predict_layers)
    behind = tuple(f"model.layers.{index}." for index in further)
    ignorable = {name for name in names if name.startswith(behind)}
    ignorable |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(num_layers)}
    return ignorable | {HEAD} if config.tie_word_embeddings else ignorable


def build_decoder(config: ModelConfig, tensors: WeightSource) -> Decoder:
    """Build a decoder from the tensors of a checkpoint, or of any other source."""
    shape = (config.vocab_size, config.hidden_size)
    embedding = tensors.take(EMBEDDING, *shape)
    layers = [_layer(config, index, tensors) for index in range(len(config.layers))]
    gain = _gain(config.norm, tensors, f"model.{config.spelling.final_norm}", config.hidden_size)
    norm = RmsNorm(gain.mul_(config.norm.final_scale), config.norm.rms_norm_eps)
    name = EMBEDDING if config.tie_word_embeddings else HEAD
    # Codes are multiplied as they are, however the embedding itself is read.
    is_shared = config.tie_word_embeddings and not tensors.has_codes(name)
    head = embedding if is_shared else tensors.take_linear(name, *shape)
    return Decoder(config, embedding=embedding, layers=layers, norm=norm, head=tensors.linear(head))


def _layer(config: ModelConfig, index: int, tensors: WeightSource) -> DecoderLayer:
    layer, prefix, hidden = config.layers[index], f"model.layers.{index}.", config.hidden_size

    def norm(name: str | None) -> RmsNorm | None:
        if name is None:
            return None
        return RmsNorm(_gain(config.norm, tensors, prefix + name, hidden), config.norm.rms_norm_eps)

    scale = None if layer.residual_multiplier == 1.0 else Scale(layer.residual_multiplier)
    names = config.spelling.norms or _NORM_NAMES[config.norm.placement]
    return DecoderLayer(
        mixer_norms=Norms(norm(names[0]), norm(names[1]) or scale),
        mixer=_mixer(config, index, tensors, prefix),
        ffn_norms=Norms(norm(names[2]), norm(names[3]) or scale),
        ffn=take_ffn(layer.ffn, hidden, tensors, prefix + config.spelling.ffn),
    )


def _mixer(config: ModelConfig, index: int, tensors: WeightSource, prefix: str) -> Mixer:
    mixer = config.layers[index].mixer
    in_pool = config.pools[mixer.pool].index(index)
    if isinstance(mixer, ShortConvConfig):
        return ShortConvMixer(in_pool, take_short_conv(mixer, config, tensors, f"{prefix}conv."))
    if isinstance(mixer, Mamba2Config):
        prefix += "mamba."
        return Mamba2Mixer(mixer, in_pool, take_mamba2(mixer, config, tensors, prefix))
    if isinstance(mixer, GatedDeltaConfig):
        prefix += "linear_attn."
        return GatedDeltaMixer(mixer, in_pool, take_gated_delta(mixer, config, tensors, prefix))
    prefix += "self_attn."
    if isinstance(mixer, MlaConfig):
        return MlaMixer(mixer, in_pool, take_mla(mixer, config.hidden_size, tensors, prefix))
    return GqaMixer(mixer, in_pool, _gqa(config, mixer, tensors, prefix))


def _gqa(
    config: ModelConfig, mixer: AttentionConfig, tensors: WeightSource, prefix: str
) -> GqaWeights:
    head_dim, hidden = mixer.head_dim, config.hidden_size
    num_queries, num_keys = mixer.num_heads * head_dim, mixer.num_kv_heads * head_dim
    sizes = {"q": num_queries * (1 + mixer.is_gated), "k": num_keys, "v": num_keys}
    parts = _qkv_parts(mixer)

    def take(side: str) -> Weight:
        return tensors.take_linear(f"{prefix}{side}_proj.weight", sizes[side], hidden)

    weights = {side: take(side) for side in sizes}
    weight = join_rows([reorder_rows(weights[side], reorder) for side, reorder in parts])
    del weights  # they lie in `weight` now
    bias = None
    if mixer.qkv_bias:
        biases = {s: tensors.take(f"{prefix}{s}_proj.bias", size) for s, size in sizes.items()}
        bias = concatenate([reorder(biases[side]) for side, reorder in parts])
    qkv = tensors.linear(weight, bias)
    output = f"{prefix}{config.spelling.attention_output}"
    weight = tensors.take_linear(f"{output}.weight", hidden, num_queries)
    bias = tensors.take(f"{output}.bias", hidden) if mixer.output_bias else None
    return GqaWeights(
        qkv=qkv,
        output=tensors.linear(weight, bias),
        qk_norm=_qk_norm(config.norm, mixer, tensors, prefix + config.spelling.qk_norm),
        sinks=tensors.take(f"{prefix}sinks", mixer.num_heads) if mixer.has_sinks else None,
    )


def _qkv_parts(mixer: AttentionConfig) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Return the rows of the fused projection: of which stored one, and in which order."""

    def interleave(rows: Tensor) -> Tensor:
        return interleave_pairs(rows, mixer.head_dim, mixer.rotary_dim)

    def half(rows: Tensor, index: int) -> Tensor:
        of_heads = rows.view(mixer.num_heads, 2, mixer.head_dim, *rows.shape[1:])
        return of_heads[:, index].flatten(0, 1)

    parts: list[tuple[str, Callable[[Tensor], Tensor]]]
    parts = [("q", interleave), ("k", interleave), ("v", lambda rows: rows)]
    if mixer.is_gated:
        # Stored head by head: the query, then its gate.
        parts[0] = ("q", lambda rows: interleave(half(rows, 0)))
        parts.append(("q", lambda rows: half(rows, 1)))
    return parts


def _qk_norm(
    norm: NormConfig, mixer: AttentionConfig, tensors: WeightSource, names: str
) -> RmsNorm | ProjectionNorm | None:
    if mixer.qk_norm is QkNorm.NONE:
        return None
    heads = (mixer.num_heads, mixer.num_kv_heads)
    by_head = mixer.qk_norm is QkNorm.HEAD
    q, k = (
        interleave_pairs(
            _gain(norm, tensors, names.format(side), mixer.head_dim * (1 if by_head else num)),
            mixer.head_dim,
            mixer.rotary_dim,
        )
        for side, num in zip("qk", heads, strict=True)
    )
    if by_head:
        gains = concatenate((q.expand(heads[0], -1), k.expand(heads[1], -1)))
        return RmsNorm(gains, norm.rms_norm_eps)
    return ProjectionNorm(
        RmsNorm(q, norm.rms_norm_eps), RmsNorm(k, norm.rms_norm_eps), num_heads=heads[0]
    )


def _gain(norm: NormConfig, tensors: WeightSource, name: str, size: int) -> Tensor:
    weight = tensors.take(f"{name}.weight", size)
    return weight.add_(1) if norm.adds_one else weight
