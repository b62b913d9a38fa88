"""Hold what a shutdown waits for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class Drain:
    """Say whether the server shuts down. `became_idle` is set whenever a session becomes idle."""

    is_on: bool = False
    became_idle: asyncio.Event = field(default_factory=asyncio.Event)
