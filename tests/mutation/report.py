"""Figures of a sample, and its survivors with the verdicts that `verdicts.toml` keeps."""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.mutation.stages import package_of

if TYPE_CHECKING:
    from cosmic_ray.work_item import WorkItem, WorkResult

VERDICTS: Final = Path(__file__).with_name("verdicts.toml")
MIN_KILLED: Final = 0.97
"""Of the mutants that are not equivalent."""

Change = tuple[str, str, str]
"""A file, what its line was, and what it becomes, both stripped: it outlives a shift of lines."""


def equivalents() -> dict[Change, str]:
    """Return the mutants that behave as the original, each with the reason."""
    entries = tomllib.loads(VERDICTS.read_text("utf-8")).get("equivalent", [])
    return {(entry["file"], entry["was"], entry["becomes"]): entry["because"] for entry in entries}


def change(diff: str, file: Path) -> Change:
    """Return what a unified diff without context changes."""
    lines = diff.splitlines()[2:]
    was, becomes = (
        " ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return file.as_posix(), was, becomes


def verdict(item: WorkItem, result: WorkResult) -> str:
    """Return `killed`, `equivalent`, or `open` for a survivor that has no verdict."""
    if result.is_killed:
        return "killed"
    changed = change(result.diff or "", item.mutations[0].module_path)
    return "equivalent" if changed in equivalents() else "open"


def report(completed: Sequence[tuple[WorkItem, WorkResult]]) -> tuple[list[str], bool]:
    """Return lines of figures and survivors, and whether enough mutants were killed."""
    reasons = equivalents()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    survivors = []
    for item, result in completed:
        (spec,) = item.mutations
        changed = change(result.diff or "", spec.module_path)
        judged = verdict(item, result)
        timeouts = int("timeout after" in (result.output or ""))
        for name in (package_of(spec.module_path), "all"):
            counts[name].update({"drawn": 1, judged: 1, "timeouts": timeouts})
        if judged != "killed":
            because = f"equivalent: {reasons[changed]}" if changed in reasons else "no verdict"
            where = f"{spec.module_path}:{spec.start_pos[0]} {spec.operator_name}"
            survivors.append(f"{where}\n  - {changed[1]}\n  + {changed[2]}\n  {because}")
    lines = [f"{'package':<28}{'drawn':>8}{'killed':>8}{'timeout':>9}{'equal':>8}{'open':>6}"]
    for name, count in sorted(counts.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        columns = (count["killed"], count["timeouts"], count["equivalent"], count["open"])
        killed, timeouts, equivalent, unexplained = columns
        row = f"{name:<28}{count['drawn']:>8}{killed:>8}{timeouts:>9}{equivalent:>8}"
        lines.append(f"{row}{unexplained:>6}  {_share(count):.1%}")
    return [*survivors, *lines], _share(counts["all"]) >= MIN_KILLED


def _share(count: Counter[str]) -> float:
    """Return the part killed of the mutants that are not equivalent."""
    relevant = count["drawn"] - count["equivalent"]
    return count["killed"] / relevant if relevant else 1.0
