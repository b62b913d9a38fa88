"""Logits against `transformers` where the kernels in Triton attend: in its interpreter, one family
in `make test` and all in `make prove`; and on a GPU with TEST_DEVICE=cuda.
"""

from __future__ import annotations

import pytest

from tests.depth import IS_PROOF, at_depth, each_value
from tests.oracle.conftest import ALL_FAMILIES
from tests.oracle.conversations import Layout
from tests.oracle.device import DEVICE
from tests.oracle.oracle import Oracle

pytest.importorskip("triton", reason="triton has no wheel for this machine")

FAMILIES = ALL_FAMILIES if IS_PROOF or DEVICE.type == "cuda" else ("deepseek_v3",)
CHUNK = at_depth(64, proof=7)


@pytest.mark.parametrize(
    ("family", "page_size", "layout"),
    each_value(
        FAMILIES,
        at_depth((16,), proof=(1, 16, 64)),
        at_depth((Layout.RUNS,), proof=(Layout.SCATTERED, Layout.RUNS)),
    ),
)
def test_the_kernels_give_the_logits_of_one_full_forward(
    family: str, page_size: int, layout: Layout, oracle: Oracle
) -> None:
    is_whole = DEVICE.type == "cuda" or (IS_PROOF and page_size == 16 and layout is Layout.RUNS)
    oracle.talk(
        oracle.directory(family),
        page_size=page_size,
        chunk=CHUNK,
        layout=layout,
        backend="triton",
        # Experts take the interpreter minutes, and do not see how pages lie.
        loaded_for="triton" if is_whole else "torch",
    )
