"""Crash a recorded program at its every point, and judge what is left of its files.

Any program and any judge: a recording (`recording.py`) says what was done and what the program saw,
`simulated_disk.py` what a crash may leave of it, a history what that may be.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from tests.disk.recording import Kind, Operation
from tests.disk.simulated_disk import Image, SimulatedDisk, crashes, write_image
from tests.rig.decisions import Decisions

IN_MEMORY: Final = next((path for path in [Path("/dev/shm")] if path.is_dir()), None)
"""Where files are that need no disk; None for where temporary files usually are."""


class History(Protocol):
    """Know what a program has seen, and judge what a crash left."""

    num_notes: int

    def take(self, note: dict[str, Any]) -> None: ...

    @property
    def labels(self) -> Iterable[str]: ...

    def check(self, image: Path) -> str | None: ...


@dataclass
class Report:
    """What was tried, and what must not have been found. `saw`: points by what was going on."""

    saw: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_points: int = 0
    num_images: int = 0

    def add(self, other: Report) -> None:
        """Count what another has found."""
        self.saw += other.saw
        self.problems += other.problems
        self.num_points += other.num_points
        self.num_images += other.num_images


@dataclass(frozen=True)
class Campaign:
    """Crash at a share of the points, and at those where something goes on that was seen less than
    `least` times; take `num_drawn` mixtures besides the ones that are always tried. `watch` names
    what goes on on the disk."""

    chance: Decisions
    share: float = 1.0
    least: int = 0
    num_drawn: int = 4
    watch: Callable[[SimulatedDisk], Iterator[str]] = lambda _disk: iter(())
    mess: Callable[[Image], Image] = lambda image: image
    """What else may be in files that are read again by nobody."""

    def run(self, root: int, done: Sequence[Operation], history: History) -> Report:
        """Return what was found, up to the first problem."""
        report = Report()
        disk = SimulatedDisk(root)
        seen: set[int] = set()
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
            for number, operation in enumerate(done):
                if operation.kind is Kind.NOTE:
                    history.take(operation.note)
                    seen.clear()
                else:
                    disk.apply(operation)
                if not self._is_chosen(disk, history, report):
                    continue
                report.num_points += 1
                for image in crashes(disk, self.chance, self.num_drawn):
                    key = hash(tuple(image.items()))
                    if key in seen:
                        continue
                    seen.add(key)
                    report.num_images += 1
                    problem = self._judge(self.mess(image), Path(name) / "image", history)
                    if problem is not None:
                        report.problems.append(f"at {number} of {len(done)}: {problem}")
                        return report
        return report

    def _is_chosen(self, disk: SimulatedDisk, history: History, report: Report) -> bool:
        labels = [*history.labels, *self.watch(disk)]
        is_rare = any(report.saw[label] < self.least for label in labels)
        if not is_rare and not self.chance.happens(self.share):
            return False
        report.saw.update(labels)
        return True

    def _judge(self, image: Image, place: Path, history: History) -> str | None:
        write_image(image, place)
        try:
            return history.check(place)
        finally:
            shutil.rmtree(place)
