"""Every seeded bug by its name, and those that no simulation can find."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Final

from tests.mutants import (
    in_books,
    in_leases,
    in_radix,
    in_scheduling,
    in_sessions,
    in_settling,
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
    _named(in_books, in_radix, in_leases, in_scheduling, in_settling, in_sessions)
)

SURVIVORS: Final[Mapping[str, str]] = MappingProxyType({})
"""Bugs that the simulator is not expected to find, and why."""
