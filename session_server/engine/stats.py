"""Counters of one engine since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals. `host_s`: time outside forwards, measured by whoever drives the engine.

    `overshoots`: rows computed for turns that had ended or been retracted by then. `shortfalls`:
    turns that waited another step because pages the plan counted on were not to be had.
    `draft_tokens`: drafts verified; `accepted_tokens`: drafts accepted.
    """

    steps: int = 0
    forward_s: float = 0.0
    host_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    retractions: int = 0
    coolings: int = 0
    overshoots: int = 0
    shortfalls: int = 0
