"""Run long work on the event loop in slices, so that other requests are served in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from session_server.core.session_events import (
    SessionEntry,
    TurnCancelled,
    TurnCompleted,
    TurnFailedEntry,
)
from session_server.protocol.growing_json import SLICE_LENGTH, GrowingArray
from session_server.protocol.scores import EncodedScores

ENCODED_AT_ONCE: Final = 4
"""Long values encoded at a time: what is encoded counts as unread only once it is written."""


async def run_in_slices(steps: Iterator[None]) -> None:
    """Iterate to the end, and yield to the event loop between two steps."""
    for _ in steps:
        await asyncio.sleep(0)


async def encode_scores(entry: SessionEntry | None) -> EncodedScores | None:
    """Encode the logprobs of a turn's end if there are many; None if they need no slicing."""
    if not isinstance(entry, TurnCompleted | TurnCancelled | TurnFailedEntry):
        return None
    if not EncodedScores.is_needed(entry.outcome):
        return None
    async with _encoders(asyncio.get_running_loop()):
        scores = EncodedScores(entry.outcome)
        await run_in_slices(scores.encode())
    return scores


async def encode_list(
    values: Sequence[Any], body_of: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Encode a list that may be long, each value converted by `body_of`; the result stands for the
    list."""
    async with _encoders(asyncio.get_running_loop()):
        array = GrowingArray()
        await run_in_slices(array.extend_in_slices(values, body_of))
    return array.value()


@lru_cache(maxsize=1)
def _encoders(_: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    """Return what admits encoders on a loop, the same one each time."""
    return asyncio.Semaphore(ENCODED_AT_ONCE)


async def encode_page(values: Iterable[Any], *, max_bytes: int) -> tuple[Any, int]:
    """Encode the values that fit `max_bytes` of JSON, or the first alone.

    Returns what stands for the list, and the number of values in it.
    """
    pieces: list[bytes] = []
    num_bytes = 0
    for value in values:
        piece = msgspec.json.encode(value)
        num_bytes += len(piece) + 1
        if pieces and num_bytes > max_bytes:
            break
        pieces.append(piece)
        if len(pieces) % SLICE_LENGTH == 0:
            await asyncio.sleep(0)
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]"), len(pieces)
