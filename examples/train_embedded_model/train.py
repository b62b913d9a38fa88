"""Train the network within a budget of wall time.

Lengths and learning rates follow the elapsed share of the budget, so a run ends on time with a
finished decay on any machine. An interrupted run continues from its saved state.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from examples.train_embedded_model import tokenizer
from examples.train_embedded_model.batches import Batch, BatchMaker
from examples.train_embedded_model.muon import Muon
from examples.train_embedded_model.network import Network, Shape

# Recall emerges on short rows, where the fact is near, and is then stretched. Before the last
# stage recall beyond 3,000 tokens was .95; that stage makes every allowed position a trained one.
STAGES: Final = ((0.0, 96), (0.10, 256), (0.26, 512), (0.42, 1024), (0.66, 2048), (0.90, 4096))
WARM_UP_STEPS: Final = 40
FLAT_SHARE: Final = 0.6
FINAL_RATE: Final = 0.03
MUON_RATE: Final = 0.02
ADAM_RATES: Final = {"embedding": 4e-3, "gain": 1e-2}
MAX_POSITIONS: Final = 4096
REPORT_S: Final = 20.0
SAVE_S: Final = 120.0
# Weight of the newest weights in the running mean that is shipped, about 100 steps long.
MEAN_RATE: Final = 0.01


@dataclass
class Progress:
    """Track where a run stands; saved with its state."""

    step: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0


class Run:
    """Hold a network, the running mean of its weights, two optimizers and a place in the corpus."""

    def __init__(self, encoder: tokenizer.ContentEncoder, batch_tokens: int) -> None:
        self.network = Network(Shape())
        self.mean = Network(Shape()).requires_grad_(False)
        self.mean.load_state_dict(self.network.state_dict())
        self.progress = Progress()
        self._encoder = encoder
        self._batch_tokens = batch_tokens
        embedding = self.network.model.embed_tokens.weight
        rest = [p for p in self.network.parameters() if p is not embedding]
        self._muon = Muon(p for p in rest if p.ndim == 2)
        self._adam = torch.optim.AdamW(
            [
                {"params": [embedding], "peak": ADAM_RATES["embedding"]},
                {"params": [p for p in rest if p.ndim == 1], "peak": ADAM_RATES["gain"]},
            ],
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )

    def go(self, budget_s: float, state_path: Path | None) -> Iterator[str]:
        """Train until the budget is spent; yields progress lines."""
        maker = BatchMaker(self._encoder, self.progress.num_rows)
        meter = Meter()
        last_report_s = last_save_s = self.progress.elapsed_s
        start_s = time.monotonic() - self.progress.elapsed_s
        while self.progress.elapsed_s < budget_s:
            share = self.progress.elapsed_s / budget_s
            length = length_at(share)
            batch = maker.make(max(1, self._batch_tokens // length), length)
            meter.add(*self.learn(batch, rate_at(self.progress.step, share)))
            self.progress.elapsed_s = time.monotonic() - start_s
            now_s = self.progress.elapsed_s
            if now_s - last_report_s >= REPORT_S or now_s >= budget_s:
                last_report_s = now_s
                yield f"{self._where(length)} {meter.take()}"
            if state_path is not None and (now_s - last_save_s >= SAVE_S or now_s >= budget_s):
                last_save_s = now_s
                self.save(state_path)

    def learn(self, batch: Batch, rate: float) -> tuple[float, float, float]:
        """Take one step at a rate relative to the peak.

        Returns:
            Loss, share of questions answered right and of all answers right, before it.
        """
        logits = self.network(batch.token_ids, batch.chosen)
        loss = functional.cross_entropy(logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self._adam.param_groups:
            group["lr"] = group["peak"] * rate
        self._adam.step()
        self._adam.zero_grad()
        self._muon.step(MUON_RATE * rate)
        self._follow()
        self.progress.step += 1
        self.progress.num_rows += batch.token_ids.shape[0]
        self.progress.num_tokens += batch.token_ids.numel()
        recall, right = batch.shares_right(logits.detach())
        return loss.item(), recall, right

    def save(self, path: Path) -> None:
        """Write all that `restore` needs, as safetensors; an interruption leaves the older file."""
        parts = {
            "network": self.network.state_dict(),
            "mean": self.mean.state_dict(),
            "muon": {str(index): value for index, value in enumerate(self._muon.state())},
            "adam": {
                f"{index}.{name}": value
                for index, values in self._adam.state_dict()["state"].items()
                for name, value in values.items()
            },
        }
        tensors = {
            f"{part}.{name}": value.contiguous()
            for part, values in parts.items()
            for name, value in values.items()
        }
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(save(tensors, {"progress": json.dumps(vars(self.progress))}))
        unfinished.replace(path)

    def restore(self, path: Path) -> None:
        """Resume from a saved state."""
        parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - the file is no mapping
                part, _, name = key.partition(".")
                parts[part][name] = file.get_tensor(key)
            self.progress = Progress(**json.loads(file.metadata()["progress"]))
        self.network.load_state_dict(parts["network"])
        self.mean.load_state_dict(parts["mean"])
        self._muon.restore([parts["muon"][str(index)] for index in range(len(parts["muon"]))])
        adam: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        for key, value in parts["adam"].items():
            index, _, name = key.partition(".")
            adam[int(index)][name] = value
        # The groups hold settings only, which are this program's and not the file's.
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": dict(adam), "param_groups": groups})

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the running mean; at first it is the plain mean of all steps."""
        rate = max(MEAN_RATE, 1 / (self.progress.step + 1))
        for kept, newest in zip(self.mean.parameters(), self.network.parameters(), strict=True):
            kept.lerp_(newest, rate)

    def _where(self, length: int) -> str:
        at = self.progress
        return (
            f"{at.elapsed_s:6.0f} s  step {at.step:6d}  {at.num_tokens / 1e6:6.2f} M tokens  "
            f"length {length:4d} "
        )


class Meter:
    """Average results since the last report."""

    def __init__(self) -> None:
        self._sums = [0.0, 0.0, 0.0]
        self._count = 0

    def add(self, loss: float, recall: float, right: float) -> None:
        """Count one step."""
        self._count += 1
        for index, value in enumerate((loss, recall, right)):
            self._sums[index] += value

    def take(self) -> str:
        """Return the means as text, and reset them."""
        loss, recall, right = (total / max(1, self._count) for total in self._sums)
        self._sums, self._count = [0.0, 0.0, 0.0], 0
        return f"loss {loss:.4f}  recall {recall:.4f}  all right {right:.4f}"


def length_at(share: float) -> int:
    """Return the row length at an elapsed share of the budget."""
    return max(length for start, length in STAGES if share >= start)


def rate_at(step: int, share: float) -> float:
    """Return the learning rate relative to its peak: warm-up, flat, linear decay."""
    decay = max(0.0, min(1.0, (share - FLAT_SHARE) / (1 - FLAT_SHARE)))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - (1 - FINAL_RATE) * decay)


def export(network: Network, model_dir: Path) -> None:
    """Write weights in half precision, and the configuration, in Hugging Face layout."""
    weights = {name: value.half().contiguous() for name, value in network.state_dict().items()}
    # Written as bytes, because `save_file` makes a file that only its owner may read.
    (model_dir / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    _write_json(model_dir / "config.json", model_config(network.shape))
    generation = {
        "eos_token_id": [tokenizer.END_ID],
        "pad_token_id": tokenizer.PADDING_ID,
        "do_sample": False,
        "max_new_tokens": 128,
    }
    _write_json(model_dir / "generation_config.json", generation)


def model_config(shape: Shape) -> dict[str, Any]:
    """Return the shape as the content of config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.END_ID,
        "pad_token_id": tokenizer.PADDING_ID,
        "torch_dtype": "float16",
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
