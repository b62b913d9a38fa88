"""Everything about text that comes with a model, loaded once from its directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelText:
    """Tokenizer and chat template of one checkpoint."""


def load_model_text(model_dir: Path) -> ModelText:
    """Read tokenizer.json, tokenizer_config.json, generation_config.json and the chat template."""
    raise NotImplementedError(model_dir)
