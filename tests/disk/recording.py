"""Run a program above a disk that is watched: what it does to its files, in order, or what fails.

The shim (`shim.c`) stands between the program and the files below one directory. It is compiled
when it is first wanted, with the compiler that the kernels of models are compiled with.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import struct
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

_SOURCE: Final = Path(__file__).with_name("shim.c")
_HEAD: Final = struct.Struct("<qqqiiiiq")
_CONTROL: Final = struct.Struct("<7q")
KILLED: Final = -1
"""In place of an error: the process ends, as with `kill -9`, before the call."""


class Kind(IntEnum):
    """What was done; as in `shim.c`."""

    NOTE = 0
    OPEN = 1
    CREATE = 2
    WRITE = 3
    TRUNCATE = 4
    SYNC = 5
    RENAME = 6
    UNLINK = 7
    MKDIR = 8
    LINK = 9


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that was done, or why it could not be. `path`, `other`: below the directory.
    `offset`: of a write, or the size that a file is cut to. `data`: what was written, or noted."""

    kind: Kind
    inode: int
    offset: int
    site: int
    error: int
    path: str
    other: str
    data: bytes

    @property
    def note(self) -> dict[str, Any]:
        """What was noted."""
        return dict(json.loads(self.data))


class Notes:
    """Write into a recording what a program, or who talks to it, has seen happen."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def add(self, **note: object) -> None:
        """Note something. What was done before is before it in the recording."""
        data = json.dumps(note).encode()
        os.write(self._fd, _HEAD.pack(0, 0, 0, Kind.NOTE, 0, 0, 0, len(data)) + data)

    def close(self) -> None:
        """End the notes."""
        os.close(self._fd)


class Watched:
    """A directory whose files are watched in every program that has `environment`.

    `fail` and `heal` take effect at once, in those that run already.
    """

    def __init__(self, root: Path, scratch: Path) -> None:
        root.mkdir(exist_ok=True)
        self.root, self.inode = root.resolve(), root.stat().st_ino
        self.log, control = scratch / "log", scratch / "control"
        self.log.write_bytes(b"")
        control.write_bytes(bytes(mmap.PAGESIZE))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), 0)
        self.environment = {
            "LD_PRELOAD": str(shim()),
            "DISK_ROOT": str(self.root),
            "DISK_LOG": str(self.log),
            "DISK_CONTROL": str(control),
        }

    def fail(
        self,
        error: int,
        kinds: Collection[Kind],
        *,
        first: int = 0,
        most: int = 1 << 62,
        is_short: bool = False,
    ) -> None:
        """Have up to `most` calls of these kinds fail, from number `first` on; with `is_short` the
        first write among them writes half."""
        bits = sum(1 << kind for kind in kinds)
        self._control[: _CONTROL.size] = _CONTROL.pack(
            self.num_calls, first, most, error, bits, is_short, 0
        )

    def heal(self) -> None:
        """Have nothing fail from now on."""
        self._control[8:48] = bytes(40)

    @property
    def num_failed(self) -> int:
        """Calls that have failed, or were short."""
        return int(_CONTROL.unpack_from(self._control)[6])

    @property
    def num_calls(self) -> int:
        """Calls that were made so far."""
        return int(_CONTROL.unpack_from(self._control)[0])

    def forget(self) -> None:
        """Begin again: no calls, an empty log. Nobody may be writing to it."""
        self._control[: _CONTROL.size] = bytes(_CONTROL.size)
        os.truncate(self.log, 0)

    def operations(self) -> list[Operation]:
        """Return what was done so far."""
        return list(_parse(self.log.read_bytes()))


@contextlib.contextmanager
def environment(words: Mapping[str, str]) -> Iterator[None]:
    """Give programs that are started inside the block these words in their environment."""
    before = {name: os.environ.get(name) for name in words}
    os.environ.update(words)
    try:
        yield
    finally:
        for name, was in before.items():
            os.environ.pop(name) if was is None else os.environ.update({name: was})


def _parse(data: bytes) -> Iterator[Operation]:
    place = 0
    while place < len(data):
        inode, offset, site, kind, error, *lengths = _HEAD.unpack_from(data, place)
        place += _HEAD.size
        parts = []
        for length in lengths:
            parts.append(data[place : place + length])
            place += length
        path, other = (part.decode().strip("/") for part in parts[:2])
        yield Operation(Kind(kind), inode, offset, site, error, path, other, parts[2])


@cache
def shim() -> Path:
    """Return the compiled shim."""
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    compiled = Path(directory.name) / "shim.so"
    command = [os.environ.get("CC", "cc"), "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-pthread", str(_SOURCE), "-o", str(compiled)], check=True)
    return compiled
