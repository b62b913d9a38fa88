"""Pictures of what a benchmark on a GPU has measured, and of what it had when it was cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import plots

DECODED = [
    {
        "part": "decode",
        "rows": rows,
        "history": 512,
        "lockstep_ms": 9.0,
        "overlapped_ms": 8.0,
        "floor_ms": 5.0,
    }
    for rows in (1, 16)
]
PREFILLED = [
    {"part": "prefill", "tokens": 64, "history": history, "ms": 10.0, "floor_ms": 4.0}
    for history in (0, 4096)
]


def test_there_is_a_picture_of_what_was_measured_and_of_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert [*plots.draw(tmp_path)] == []
    (tmp_path / "decode.json").write_text(json.dumps(DECODED))
    assert [path.name for path in plots.draw(tmp_path)] == ["decode.svg"]
    (tmp_path / "torch.json").write_text(json.dumps(DECODED[:1] + PREFILLED))
    drawn = [path.read_text() for path in plots.draw(tmp_path)]
    assert len(drawn) == 2
    assert all("<svg" in text and len(text) > 5_000 for text in drawn)
