"""Run the program that uses a store on a disk that is watched: crash it, kill it, let it fail."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.disk.campaign import IN_MEMORY, Campaign, Report
from tests.disk.recording import KILLED, Kind, Operation, Watched
from tests.disk.simulated_disk import Image, SimulatedDisk
from tests.disk.store_history import StoreHistory
from tests.rig.decisions import Decisions

STORE: Final = "new/directories/store"
WANTED: Final = {
    *("creation", "migration", "opening", "writing", "vacuum", "closing", "recovery"),
    *("put", "append", "touch", "delete"),
    *("a commit", "pages in place", "a rollback journal", "names"),
}
"""What goes on at some point of each life that is crashed."""

_PROJECT: Final = Path(__file__).parents[2]
_EVERYTHING: Final = frozenset(Kind)
_NEEDS_SPACE: Final = frozenset({Kind.CREATE, Kind.WRITE, Kind.TRUNCATE, Kind.SYNC, Kind.MKDIR})


@dataclass(frozen=True)
class Fault:
    """A call that fails, or it and all others `until_healed`; a write before may write half."""

    error: int
    kinds: frozenset[Kind]
    until_healed: bool
    is_short: bool = False


FAULTS: Final = {
    "EIO once": Fault(errno.EIO, _EVERYTHING, until_healed=False),
    "EIO from there on": Fault(errno.EIO, _EVERYTHING, until_healed=True),
    "ENOSPC once": Fault(errno.ENOSPC, _NEEDS_SPACE, until_healed=False),
    "a full disk": Fault(errno.ENOSPC, _NEEDS_SPACE, until_healed=True),
    "a full quota": Fault(errno.EDQUOT, _NEEDS_SPACE, until_healed=True),
    "half a write": Fault(errno.ENOSPC, frozenset({Kind.WRITE}), until_healed=False, is_short=True),
    "half a write, then full": Fault(errno.ENOSPC, _NEEDS_SPACE, until_healed=True, is_short=True),
    "EMFILE once": Fault(errno.EMFILE, frozenset({Kind.OPEN, Kind.CREATE}), until_healed=False),
}


@dataclass(frozen=True)
class Recorded:
    """What programs did, one after another, below the directory of this inode."""

    root: int
    done: list[Operation]


class Program:
    """A program that uses stores; it may be asked for one after another."""

    def __init__(self, watched: Watched, bug: str = "") -> None:
        self._watched = watched
        self._errors = watched.log.with_name("errors").open("w+")
        command = [sys.executable, "-m", "tests.disk.store_program", str(watched.log), bug]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=watched.root,
            env={**os.environ, **watched.environment, "PYTHONPATH": str(_PROJECT)},
        )

    def use(self, *, seed: int, first: int = 0) -> str:
        """Have the store used, with nothing that fails any more when it says so. Return "over", or
        how it ended."""
        self._tell(json.dumps({"name": STORE, "seed": seed, "first": first}))
        assert self._process.stdout is not None, "no pipe"
        while (line := self._process.stdout.readline()) == "now\n":
            self._watched.heal()
            self._tell("")
        if line != "over\n":
            self._process.wait()
            self._errors.seek(0)
            return self._errors.read()
        return "over"

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None, "no pipe"
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """End it, as with `kill -9`."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


@contextmanager
def watched_disk() -> Iterator[Watched]:
    """A directory in memory, if there is one: its disk is simulated."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY, ignore_cleanup_errors=True) as scratch:
        yield Watched(Path(scratch) / "root", Path(scratch))


def recorded(*, seed: int, bug: str = "", killed_at: int | None = None) -> Recorded:
    """Record a store from its first day: one program is killed at this call, another goes on."""
    with watched_disk() as watched:
        if killed_at is not None:
            watched.fail(KILLED, _EVERYTHING, first=killed_at)
            program = Program(watched, bug)
            program.use(seed=seed)
            program.end()
            watched.heal()
        program = Program(watched, bug)
        how = program.use(seed=seed, first=1000)
        program.end()
        assert how == "over", how
        return Recorded(watched.inode, watched.operations())


def crashed(
    record: Recorded,
    chance: Decisions,
    *,
    share: float = 1.0,
    least: int = 0,
    may_fail: bool = False,
) -> Report:
    """Crash a recorded store at its points, and judge what is left."""
    campaign = Campaign(chance, share, least, watch=labels_of, mess=with_any_memory)
    return campaign.run(record.root, record.done, StoreHistory(STORE, may_fail=may_fail))


def failed(
    name: str, sites: Iterable[int], chance: Decisions, *, share: float, bug: str = ""
) -> Report:
    """Let a store fail at each of these calls, and go on once nothing fails; judge what it holds
    then, and what a crash at a share of the points would have left."""
    report, fault = Report(), FAULTS[name]
    with watched_disk() as watched:
        program = Program(watched, bug)
        for site in sites:
            watched.forget()
            most = 1 << 62 if fault.until_healed else 1
            watched.fail(fault.error, fault.kinds, first=site, most=most, is_short=fault.is_short)
            how = program.use(seed=site)
            report.saw["a call failed"] += watched.num_failed > 0
            if how == "over":
                done = watched.operations()
                record = Recorded(watched.inode, done)
                report.add(crashed(record, chance, share=share, may_fail=True))
                report.problems += _judged(watched, done, report)
            else:
                report.problems.append(how)
                program.end()
                program = Program(watched, bug)
            report.problems = [f"{name}, {site}: {text}" for text in report.problems]
            if report.problems:
                break
            shutil.rmtree(watched.root / STORE.split("/", maxsplit=1)[0])
        program.end()
    return report


def _judged(watched: Watched, done: list[Operation], report: Report) -> list[str]:
    """Return what is wrong with what is there in the end; count what the program was told."""
    history = StoreHistory(STORE, may_fail=True)
    for operation in done:
        if operation.kind is not Kind.NOTE:
            continue
        note = operation.note
        history.take(note)
        report.saw["refused to open"] += "refused" in note
        report.saw["told that it failed"] += note.get("error") is not None
    problem = history.check(watched.root)
    return [] if problem is None else [problem]


def labels_of(disk: SimulatedDisk) -> Iterator[str]:
    """Yield what is being done to the disk."""
    for suffix, label in (
        ("-wal", "a commit"),
        (".sqlite3", "pages in place"),
        ("-journal", "a rollback journal"),
    ):
        if disk.is_unwritten(suffix):
            yield label
    if any(pending.names for pending in disk.pending):
        yield "names"


def with_any_memory(image: Image) -> Image:
    """What processes share of a database is a mapped file, of which a crash may leave anything."""
    return {
        name: b"\xa5" * 32768 if data is not None and name.endswith("-shm") else data
        for name, data in image.items()
    }
