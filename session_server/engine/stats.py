"""`Counters`: totals of one engine since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Count what an engine did since its start.

    `host_s`: seconds outside forwards, measured by the loop that drives the engine. `overshoots`:
    rows computed for turns that had ended or been retracted by then. `shortfalls`: turns that
    waited another step because pages that the plan counted on were not there. `draft_tokens`:
    drafts verified; `accepted_tokens`: drafts accepted.
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
