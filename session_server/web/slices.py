"""Long work on the event loop in slices, so that nobody waits for all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from session_server.core.session_events import (
    SessionEntry,
    TurnCancelled,
    TurnCompleted,
    TurnFailedEntry,
)
from session_server.protocol.growing_json import GrowingArray
from session_server.protocol.scores import EncodedScores

T = TypeVar("T")


async def run_in_slices(steps: Iterator[None]) -> None:
    """Iterate to the end, and let others go on between two steps."""
    for _ in steps:
        await asyncio.sleep(0)


async def encode_scores(entry: SessionEntry | None) -> EncodedScores | None:
    """Encode the logprobs of a turn's end where they are many; None where they need no care."""
    if not isinstance(entry, TurnCompleted | TurnCancelled | TurnFailedEntry):
        return None
    if not EncodedScores.is_needed(entry.outcome):
        return None
    scores = EncodedScores(entry.outcome)
    await run_in_slices(scores.encode())
    return scores


async def encode_list(values: Sequence[T], body_of: Callable[[T], Any]) -> Any:
    """Encode a list that may be long; what is returned stands for the list of bodies."""
    array = GrowingArray()
    await run_in_slices(array.extend_in_slices(values, body_of))
    return array.value()
