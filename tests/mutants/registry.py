"""Every seeded bug by its name, and those that no simulation can find."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Final

from tests.mutants import (
    in_books,
    in_drafts,
    in_layers,
    in_leases,
    in_radix,
    in_rewrites,
    in_scheduling,
    in_sessions,
    in_settling,
    in_states,
    in_tenants,
    in_tiers,
)
from tests.mutants.mutant import Mutant


def _named(*modules: ModuleType) -> dict[str, Mutant]:
    return {
        name.lower().replace("_", " "): value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Mutant)
    }


MUTANTS: Final[Mapping[str, Mutant]] = MappingProxyType(
    _named(
        in_books,
        in_radix,
        in_leases,
        in_layers,
        in_states,
        in_scheduling,
        in_settling,
        in_sessions,
        in_rewrites,
        in_drafts,
        in_tenants,
        in_tiers,
    )
)

SURVIVORS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "everybody is retracted": "Every turn still says what it must, only later, and the"
        " simulator has no opinion on how many had to wait; a test of the planner alone has"
        " (`tests/engine/test_engine_plan.py`).",
        "unfinished copy gives way": "Its copy is forgotten when it ends: it was made for nothing"
        " and no more is lost.",
        "found file hangs anywhere": "No deletion takes a path behind which files lie that nobody"
        " has read, and other ways are not met in 60,000 steps; a test of the store alone has"
        " an opinion (`tests/engine/test_tier_store.py`).",
        "stale parent on disk": "A path is used from its beginning, so what it begins with was used"
        " after what follows, and gives way after it; a test of the store alone has an opinion"
        " (`tests/engine/test_tier_paths.py`).",
        "end goes on as before": "A copy must end after the time of the engine's end, beside a disk"
        " that is full of what was used later: not met in a million steps; a test of the store"
        " alone has an opinion (`tests/engine/test_tier_store.py`).",
        "short pool is not asked for": "The oldest turn is given everything before it is given up,"
        " so everybody comes to an end, only later; a test of the planner alone has an opinion"
        " (`tests/engine/test_engine_plan.py`).",
    }
)
"""Bugs that the simulator is not expected to find, and why."""
