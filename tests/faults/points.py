"""Where faults strike, declared beside the test and counted by its run.

A test says which fault it injects, where, and at how many points at least; the page
`docs/testing.md` shows what is declared here, and a run that strikes less often fails.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

DEADLINE_S: Final = 240.0
"""A test on an event loop that takes longer hangs; no claim about speed."""


@dataclass(slots=True)
class Points:
    """Counts the injections of one run."""

    num: int = 0

    def strike(self, times: int = 1) -> None:
        """A fault was injected, and what followed was checked."""
        self.num += times


@dataclass(frozen=True, slots=True)
class Injection:
    """One test's part of a fault: at least `points` places, `where` they are."""

    fault: str
    module: str
    test: str
    where: str
    points: int


INJECTIONS: Final[dict[str, Injection]] = {}

Test = Callable[[Points], None] | Callable[[Points], Awaitable[None]]


def injects(fault: str, where: str, *, points: int) -> Callable[[Test], Callable[[], None]]:
    """Make a function that counts into `Points` a test which must strike so often."""

    def declare(test: Test) -> Callable[[], None]:
        name = test.__name__
        assert name not in INJECTIONS, f"two tests are called {name}"
        INJECTIONS[name] = Injection(fault, test.__module__, name, where, points)

        def run() -> None:
            counted = Points()
            outcome = test(counted)
            if inspect.isawaitable(outcome):
                asyncio.run(_bounded(outcome))
            assert counted.num >= points, f"only {counted.num} points were struck"

        run.__name__, run.__doc__ = name, test.__doc__
        return run

    return declare


async def _bounded(outcome: Awaitable[None]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await outcome
