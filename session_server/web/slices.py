"""Long work on the event loop in slices, so that nobody waits for all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator


async def run_in_slices(steps: Iterator[None]) -> None:
    """Iterate to the end, and let others go on between two steps."""
    for _ in steps:
        await asyncio.sleep(0)
