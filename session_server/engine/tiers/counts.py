"""`TierCounts`: what the tiers did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounts:
    """Count what the tiers did, see `TierReport`."""

    spilled_tokens: int = 0
    spilled_bytes: int = 0
    spill_ms: float = 0.0
    restored_tokens: int = 0
    restored_bytes: int = 0
    restore_ms: float = 0.0
    lookups: int = 0
    hits: int = 0
    written_bytes: int = 0
    refused_files: int = 0
    failed_copies: int = 0
    dropped_segments: int = 0
