"""The largest difference between our logits and those of `transformers`, as last measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

RECORD: Final = Path(__file__).with_name("worst.json")
PAGE_SIZES: Final = (1, 4, 16, 64, 256)
CHUNKS: Final = (1, 7, 64)


def recorded() -> dict[str, float]:
    """By family."""
    worst: dict[str, float] = json.loads(RECORD.read_text("utf-8"))
    return worst
