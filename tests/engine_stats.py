"""A sample of an engine that does nothing, for tests of who reads samples."""

from __future__ import annotations

from typing import Any

from session_server.core.events import EngineStats

_COUNTS = (
    *("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "draft_tokens"),
    *("accepted_tokens", "retractions", "coolings", "running", "waiting", "sessions"),
    *("check_runs", "check_violations"),
)


def engine_stats(**fields: Any) -> EngineStats:
    """Return a sample whose other fields are 0."""
    return EngineStats(**{**dict.fromkeys(_COUNTS, 0), "forward_ms": 0.0, "host_ms": 0.0, **fields})
