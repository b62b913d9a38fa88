"""A run as data: its configuration and the operations it did, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sim.config import SimConfig, from_json, to_json

Op = Mapping[str, Any]
"""One operation: `op` names it, the rest says with what. It names sessions and turns itself, so
that it means the same when others are left out; what it refers to may be gone then."""


@dataclass(slots=True)
class Trace:
    """What a run did: enough to do it again."""

    config: SimConfig
    ops: list[Op] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """One JSON object per line: the configuration, then the operations."""
        yield json.dumps({"config": to_json(self.config)})
        for op in self.ops:
            yield json.dumps(op)

    def write(self, path: Path) -> None:
        """Write it to a file, in a directory that is made if there is none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in self.lines()), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read what `write` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not a trace of this version.
        """
        return cls.parse(path.read_text(encoding="utf-8").splitlines())

    @classmethod
    def parse(cls, lines: Sequence[str]) -> Trace:
        """The trace of some `lines`.

        Raises:
            ValueError: they are not a trace of this version.
        """
        try:
            first, *rest = (json.loads(line) for line in lines)
            return cls(from_json(first["config"]), rest)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a trace of this version: {error!r}") from error
