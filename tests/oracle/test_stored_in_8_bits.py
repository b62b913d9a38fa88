"""KV stored in 8-bit floats, which the kernels in Triton read, against `transformers` in fp32.

Logits of these checkpoints have a standard deviation of about 0.9. What is stored is rounded to
2**-4 (e4m3) or 2**-3 (e5m2) of its size; the largest difference of a logit was 0.19 and 0.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

from session_server.core.commands import Shutdown
from session_server.core.sampling import TokenLogprob
from session_server.models.config import KvDTypeName
from session_server.runner import paged_decoder
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import RunnerOptions, load_runner
from tests.depth import at_depth, cases
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import reference_logits
from tests.oracle.device import DEVICE
from tests.oracle.talks import Setup
from tests.oracle.test_restored import TieredHouse
from tests.runner.rows import Rows

pytest.importorskip("triton", reason="triton has no wheel for this machine")

BOUNDS: Final[dict[KvDTypeName, float]] = {"fp8_e4m3": 0.3, "fp8_e5m2": 1.0}
DTYPES: Final = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FAMILIES: Final = (
    "qwen3",
    "deepseek_v2",
    *at_depth((), proof=("gemma2", "gpt_oss", "mistral_window")),
)
CHUNK: Final = 7


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    at_depth(list(zip(FAMILIES, BOUNDS, strict=False)), proof=cases(FAMILIES, BOUNDS)),
)
def test_logits_stay_close_to_those_of_full_precision(
    family: str,
    kv_dtype: KvDTypeName,
    checkpoints: Mapping[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = np.random.default_rng(3).integers(3, VOCAB_SIZE, 3 * CHUNK, dtype=np.int32)
    options = RunnerOptions(
        page_size=4,
        num_rows=1,
        device=str(DEVICE),
        dtype="float32",
        kv_dtype=kv_dtype,
        max_context_len=64,
        memory=MemoryLimits(max_total_tokens=128),
        backend="triton",
    )
    if DEVICE.type == "cpu":
        # Triton's interpreter stores 8-bit floats cut off, not rounded; torch rounds.
        monkeypatch.setattr(paged_decoder, "_with_kernels", lambda decoder, _: decoder)
    runner = load_runner(checkpoints[family], options).runner
    assert {pool.dtype for pool in runner.pools.values()} == {DTYPES[kv_dtype]}
    rows, seen = Rows(runner, 4), []
    for start in range(0, len(tokens), CHUNK):
        row = rows.row(1, tokens[start : start + CHUNK], start=start)
        seen.append(runner.logits(rows.batch(row)).cpu())
    expected = reference_logits(checkpoints[family], tokens)[CHUNK - 1 :: CHUNK]
    worst = (torch.cat(seen) - expected).abs().max().item()
    assert 0.02 < worst <= BOUNDS[kv_dtype]


@pytest.mark.parametrize("family", at_depth(("deepseek_v2",), proof=FAMILIES))
def test_what_comes_back_from_host_memory_and_from_files_is_what_was_there(
    family: str, tmp_path: Path, checkpoints: Mapping[str, Path]
) -> None:
    setup = Setup(family, 4, 16, overlap=False, backend="triton", kv_dtype="fp8_e4m3")
    kept = TieredHouse(setup, checkpoints[family], tmp_path / "kept")
    stays = kept.open()
    house = TieredHouse(setup, checkpoints[family], tmp_path / "copied")
    moves = house.open()
    for _ in range(2):
        kept.say(stays, 13, 2)
        house.say(moves, 13, 2)
        assert_alike(moves.said, stays.said)
        house.spill(moves)
    assert house.counts.restored_tokens >= 8
    house.rest(Shutdown())
    again = TieredHouse(setup, checkpoints[family], tmp_path / "copied")
    again.rng = house.rng
    back = again.open(tuple(moves.tokens))
    again.say(back, 13, 2)
    kept.say(stays, 13, 2)
    assert again.counts.restored_tokens >= 24
    assert_alike(back.said, stays.said)


def assert_alike(said: Mapping[int, TokenLogprob], expected: Mapping[int, TokenLogprob]) -> None:
    """The same tokens, as likely: what is restored are the same bytes."""
    assert said.keys() == expected.keys()
    for position, of in said.items():
        assert of.token_id == expected[position].token_id
        assert abs(of.logprob - expected[position].logprob) <= 0.01
