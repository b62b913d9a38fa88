"""Looking for a seeded bug with the simulator, and what was found before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.mutants.mutant import Mutant
from tests.sim.failure import SimFailure
from tests.sim.simulation import run

BUDGET_STEPS: Final = 1_000_000
"""Engine steps within which the gate has to find a bug."""

_RECORD: Final = Path(__file__).parent / "found.json"


@dataclass(frozen=True, slots=True)
class Found:
    """Where a bug showed: the first seed that finds it, the layer of checks that did, and engine
    steps from the beginning of the mutant's `first_seed`."""

    seed: int
    layer: str
    steps: int


def search(mutant: Mutant, seeds: Iterable[int], *, max_steps: int = BUDGET_STEPS) -> Found | None:
    """Simulate with the bug until a check finds it, or `max_steps` engine steps were made."""
    num_steps = 0
    with mutant.apply():
        for seed in seeds:
            try:
                num_steps += run(seed).steps
            except SimFailure as failure:
                return Found(seed, failure.layer, num_steps + failure.step)
            if num_steps >= max_steps:
                break
    return None


def recorded() -> Mapping[str, Found]:
    """What the last full search found, by the names of the mutants."""
    record = json.loads(_RECORD.read_text("utf-8"))
    return {name: Found(**found) for name, found in record.items()}


def record(found: Mapping[str, Found]) -> None:
    """Remember what was found, one line per mutant."""
    lines = (f" {json.dumps(name)}: {json.dumps(asdict(where))}" for name, where in found.items())
    _RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
