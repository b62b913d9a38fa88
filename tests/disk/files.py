"""A program that writes files beside their old ones and renames them, as whatever is not SQLite's.

As a program: `files LOG BUG`, in the directory that is watched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from tests.disk.recording import Notes

BUGS: Final = {
    "no sync of the file": "a rename may be on disk before what is in the file",
    "no sync of the directory": "a name may not be on disk when its file is told to be",
    "written in place": "an old file is gone before there is a new one",
    "told early": "it is told before the directory is synced",
}
_VERSIONS: Final = 6


def content_of(version: int) -> bytes:
    """Return what a version is: more than a few sectors, and no two alike."""
    return blake2b(version.to_bytes(4, "little")).digest() * (40 + version)


class FileHistory:
    """Know the versions of one file that were asked for and told to be on disk."""

    def __init__(self) -> None:
        self.num_notes = 0
        self._told = self._asked = 0

    @property
    def labels(self) -> Iterator[str]:
        """Yield whether a version is being written."""
        yield "writing" if self._asked > self._told else "resting"

    def take(self, note: dict[str, Any]) -> None:
        """Know what the program has seen."""
        self.num_notes += 1
        self._asked = note.get("asked", self._asked)
        self._told = note.get("told", self._told)

    def check(self, image: Path) -> str | None:
        """Return what is wrong with the file in an image, if anything."""
        path = image / "file"
        found = path.read_bytes() if path.exists() else b""
        allowed = [content_of(at) if at else b"" for at in range(self._told, self._asked + 1)]
        if found not in allowed:
            return f"told {self._told}, asked for {self._asked}, found {len(found)} bytes"
        return None


def main() -> None:
    log, bug = sys.argv[1:]
    notes, path = Notes(Path(log)), Path("file")
    for version in range(1, _VERSIONS):
        notes.add(asked=version)
        beside = path if bug == "written in place" else path.with_suffix(".new")
        with beside.open("wb") as file:
            file.write(content_of(version))
            file.flush()
            if bug != "no sync of the file":
                os.fsync(file.fileno())
        beside.rename(path)
        if bug == "told early":
            notes.add(told=version)
        if bug != "no sync of the directory":
            directory = os.open(".", os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        notes.add(told=version)


if __name__ == "__main__":
    main()
