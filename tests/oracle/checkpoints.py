"""Random tiny checkpoints as `transformers` writes them, and its answer to a token sequence.

The reference is a full-sequence forward without a cache: Hugging Face's own cached path is not
above suspicion. Every parameter is random, norms and biases too: at their usual start values
(ones, zeros) a forgotten one would go unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cache.types import Tokens
from tests.models.raw_configs import RAW_CONFIGS

FAMILIES: Final = ("llama", "qwen2", "qwen3", "mistral")
"""Layers of full attention and one dense feed-forward."""

LAYERED_FAMILIES: Final = (
    "mistral_window",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "lfm2",
    "granitemoehybrid",
    "qwen3_5_text",
)
"""Families with layers of several kinds: windows, experts, latents, states, norms elsewhere."""

RECURRENT_FAMILIES: Final = ("lfm2", "granitemoehybrid", "qwen3_5_text")
"""Those of them that keep states."""

FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of four-bit numbers with two bits of exponent and one of mantissa."""
WEIGHT_STD: Final = 0.12


def write_checkpoint(
    family: str,
    directory: Path,
    *,
    std: float = WEIGHT_STD,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of one family.

    Args:
        family: one of `FAMILIES` or `LAYERED_FAMILIES`.
        directory: made if need be.
        std: of the weights; 0.02, the usual one, hides mistakes.
        max_shard_size: of one file.
        overrides: fields of the Hugging Face configuration.
    """
    settings = {**RAW_CONFIGS[family], **overrides}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                # Gemma stores how far its gains are from one.
                adds_one = family.startswith("gemma") or (
                    family == "qwen3_5_text" and "linear_attn" not in name
                )
                parameter.copy_(0.3 * noise + (0 if adds_one else 1))
            elif name.endswith("sinks"):
                parameter.copy_(noise)
            else:
                parameter.copy_(std * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def to_v4_style(directory: Path) -> None:
    """Rewrite `config.json` the way hub checkpoints of `transformers` 4 spell it."""
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["torch_dtype"] = raw.pop("dtype")
    kind = rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps(raw))


def to_mxfp4(directory: Path) -> None:
    """Quantise the experts of a gpt-oss checkpoint the way OpenAI's own ones are stored."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        # From [experts, inputs, outputs] to rows of 32 inputs that share a scale.
        rows = tensors.pop(name).transpose(1, 2).unflatten(2, (-1, 32))
        scales = rows.abs().amax(-1, keepdim=True).log2().floor() - 2
        distances = ((rows / scales.exp2()).abs().unsqueeze(-1) - torch.tensor(FP4)).abs()
        codes = distances.argmin(-1) + 8 * (rows < 0)
        tensors[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = (scales.squeeze(-1) + 127).to(torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "dequantize": True}
    (directory / "config.json").write_text(json.dumps(raw))


def reference_logits(directory: Path, tokens: Tokens | Sequence[int]) -> Tensor:
    """What `transformers` computes for a whole sequence: float32 [length, vocab], to be read only.

    Exact runs of one family reach the same few sequences on every page size and chunk size, so
    what was computed once is kept.
    """
    return _reference_logits(directory, tuple(int(token) for token in tokens))


def first_routing_tie(directory: Path, tokens: Sequence[int], *, margin: float) -> int:
    """The first position whose experts are chosen by less than `margin`, the length without one.

    Which of them it is depends on the shape of a batch there, and all behind it on which it is.
    """
    with torch.no_grad(), _RoutingMargins() as margins:
        _reference_model(directory)(input_ids=torch.tensor([tokens]), use_cache=False)
    ties = [index for least in margins.seen for index in (least < margin).nonzero().flatten()]
    return int(min(ties, default=len(tokens)))


class _RoutingMargins(TorchFunctionMode):
    """Sees by how much each position's last chosen expert leads the first that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in {torch.topk, Tensor.topk}:
            scores, k = args[0], args[1] if len(args) > 1 else (kwargs or {})["k"]
            best = scores.flatten(0, -2).sort(dim=-1, descending=True).values
            if k < best.shape[1]:
                self.seen.append(best[:, k - 1] - best[:, k])
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=4096)
def _reference_logits(directory: Path, tokens: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = _reference_model(directory)(
            input_ids=torch.tensor([tokens]), use_cache=False
        ).logits[0]
    return logits


@lru_cache(maxsize=32)
def _reference_model(directory: Path) -> transformers.PreTrainedModel:
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
