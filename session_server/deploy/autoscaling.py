"""Decide how many replicas there should be, from what they report: turns, and how full KV is.

Ray Serve counts ongoing requests, of which every open socket is one, busy or not. So replicas
report what they do, and Ray calls `num_replicas` with it, by its import path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

TURNS: Final = "turns"
"""Metric of a replica: its turns that run or wait, as a share of what one forward takes."""

KV_USE: Final = "kv_use"
"""Metric of a replica: the share of its fullest KV pool that turns and sessions hold."""

TARGET_TURNS: Final = 0.7
"""Of what one forward takes: at more, turns begin to wait when some end late."""

TARGET_KV_USE: Final = 0.8
"""At more, idle sessions soon lose their KV and compute it again."""


def num_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Return how many replicas the load needs, and no state. Ray bounds it, and delays changes.

    `context`: Ray Serve's `AutoscalingContext`.
    """
    reported: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    needed = max(
        _replicas_for(reported.get(TURNS, {}), TARGET_TURNS),
        _replicas_for(reported.get(KV_USE, {}), TARGET_KV_USE),
    )
    return needed or context.current_num_replicas, {}  # at first nobody has reported yet


def _replicas_for(by_replica: Mapping[Any, float], target: float) -> int:
    """Return how many replicas would each be at the target; 0 if none reported."""
    needed = round(sum(by_replica.values()) / target, 6)  # or 2.4 / 0.8 would be more than 3
    return max(1, math.ceil(needed)) if by_replica else 0
