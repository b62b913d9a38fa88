"""Logits against `transformers` where the kernels in Triton attend: in its interpreter, and on a
GPU with TEST_DEVICE=cuda.
"""

from __future__ import annotations

import pytest

from tests.depth import at_depth, each_value
from tests.oracle.conftest import ALL_FAMILIES
from tests.oracle.conversations import Layout
from tests.oracle.oracle import Oracle

pytest.importorskip("triton", reason="triton has no wheel for this machine")

FAMILIES = at_depth(("gemma3_text", "gpt_oss", "deepseek_v3"), proof=tuple(ALL_FAMILIES))
CHUNK = at_depth(64, proof=7)


@pytest.mark.parametrize(
    ("family", "page_size", "layout"),
    each_value(FAMILIES, (1, 16, 64), (Layout.SCATTERED, Layout.RUNS)),
)
def test_the_kernels_give_the_logits_of_one_full_forward(
    family: str, page_size: int, layout: Layout, oracle: Oracle
) -> None:
    oracle.talk(
        oracle.directory(family), page_size=page_size, chunk=CHUNK, layout=layout, backend="triton"
    )
