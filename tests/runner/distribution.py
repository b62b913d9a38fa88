"""Do counts follow a distribution?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def assert_distributed(counts: Counter[int], expected: Sequence[float]) -> None:
    """Chi-square at the 99.99 % point (Wilson-Hilferty); impossible tokens must not occur."""
    total = counts.total()
    possible = [i for i, p in enumerate(expected) if p > 0]
    assert set(counts) <= set(possible)
    statistic = sum(
        (counts[i] - total * expected[i]) ** 2 / (total * expected[i]) for i in possible
    )
    freedom = len(possible) - 1
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 3.72 * math.sqrt(spread)) ** 3
