"""Run tests on a mutant until one fails."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from difflib import unified_diff
from pathlib import Path
from typing import Final

from cosmic_ray.mutating import use_mutation
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

from tests.mutation.draw import OPERATORS
from tests.mutation.stages import stages
from tests.mutation.tree import Run, Tree

_UNKNOWN_S: Final = 20.0
"""The time that a test file is given before it has passed once."""

_MAX_UNMUTATED_S: Final = 3600.0


class Stopped(Exception):
    """The harness was told to stop."""


class Judge:
    """Trees, each for one mutant at a time, and what is known of tests without a mutant."""

    def __init__(self, root: Path, directory: Path, *, num_workers: int, patience_s: float) -> None:
        self._root = root
        self._patience_s = patience_s
        self._trees = [Tree(root, directory / f"tree{number}") for number in range(num_workers)]
        self._idle: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for tree in self._trees:
            self._idle.put(tree)
        self._stopped = threading.Event()
        self._seconds_path = directory.parent / "seconds.json"
        self._seconds: dict[str, float] = {}
        if self._seconds_path.exists():
            self._seconds = json.loads(self._seconds_path.read_text())
        self._start_s = 5.0
        self._reliable: set[str] = set()
        """Test files that have passed as a whole, and tests that have passed without a mutant."""
        self.unusable: set[str] = set()
        """Test files that failed without a mutant: they kill nothing."""

    def judge(self, item: WorkItem) -> WorkResult:
        """Run one group of tests after the other on a mutant, as far as patience goes.

        Patience is in seconds that the tests take without a mutant, so that a busy machine does not
        shorten it. Raises Stopped once told to stop.
        """
        (spec,) = item.mutations
        tree, started_s, killer = self._idle.get(), time.monotonic(), None
        note = "all tests passed"
        try:
            with _mutated(tree, spec) as (before, after):
                changes = unified_diff(before.split("\n"), after.split("\n"), n=0, lineterm="")
            groups, spent_s = stages(self._root, spec.module_path), 0.0
            for number, group in enumerate(groups):
                spent_s += sum(map(self._expected_s, group), self._start_s)
                if number > 0 and spent_s > self._patience_s:
                    note = f"{number} of {len(groups)} groups of tests passed"
                    break
                killer = self._killer(tree, spec, group)
                if killer is not None:
                    break
        finally:
            self._idle.put(tree)
        outcome = TestOutcome.SURVIVED if killer is None else TestOutcome.KILLED
        output = f"{time.monotonic() - started_s:.1f} s {killer or note}"
        return WorkResult(WorkerOutcome.NORMAL, output, outcome, "\n".join(changes))

    def stop(self) -> None:
        """End all tests that run; their mutants stay without a result."""
        self._stopped.set()
        for tree in self._trees:
            tree.kill_processes()

    def _killer(self, tree: Tree, spec: MutationSpec, group: Sequence[str]) -> str | None:
        """Return the first test of a group that notices the mutant, None if all pass.

        A failure counts if its file has passed before or the test passes without the mutant, a
        timeout if the same files then end within a third of it.
        """
        while files := sorted(set(group) - self.unusable, key=self._expected_s):
            limit_s = 3 * sum(map(self._expected_s, files), self._start_s) + 5
            with _mutated(tree, spec):
                run = self._run(tree, files, limit_s, "-x")
            if run.passed:
                return None
            if run.timed_out:
                right = self._run(tree, files, _MAX_UNMUTATED_S)
                if 3 * right.took_s + 5 <= limit_s:
                    return f"timeout after {limit_s:.0f} s in {files[0]} ..."
                self.unusable |= {name.split("::")[0] for name in right.failed}
                continue
            test = run.failed[0] if run.failed else files[0]
            if not {test, test.split("::")[0]} & self._reliable:
                again = [test] if "::" in test else ["--collect-only", test]
                if not self._run(tree, again, _MAX_UNMUTATED_S).passed:
                    self.unusable.add(test.split("::")[0])
                    continue
            self._reliable.add(test)
            return test
        return None

    def _expected_s(self, file: str) -> float:
        return self._seconds.get(file, _UNKNOWN_S)

    def _run(self, tree: Tree, files: Sequence[str], limit_s: float, *options: str) -> Run:
        """Run tests, and learn how long the files take that passed as a whole."""
        if self._stopped.is_set():
            raise Stopped
        run = tree.run_tests(files, limit_s, *options)
        if self._stopped.is_set():
            raise Stopped
        failed = {name.split("::")[0] for name in run.failed}
        passed = {
            name: s for name, s in run.seconds.items() if name in files and name not in failed
        }
        self._seconds |= passed
        self._reliable |= passed.keys()
        if passed:
            self._start_s = max(1.0, run.took_s - sum(run.seconds.values()))
            self._seconds_path.write_text(json.dumps(self._seconds, indent=1))
        return run


def _mutated(tree: Tree, spec: MutationSpec) -> AbstractContextManager[tuple[str, str]]:
    """Mutate a file of a tree for the length of a `with` block."""
    operator = OPERATORS[spec.operator_name]
    return use_mutation(tree.path / spec.module_path, operator, spec.occurrence)
