"""A copy of the working tree in which tests run on mutants."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any, Final

import psutil

from tests.mutation.child import REPORT

_MARK: Final = "MUTATION_TREE"
"""The environment variable by which processes of a tree are found, whoever started them."""


@dataclass(frozen=True)
class Run:
    """What one run of tests came to. `seconds` is per test file and without the process's start."""

    passed: bool
    timed_out: bool
    took_s: float
    seconds: dict[str, float]
    failed: list[str]


class Tree:
    """A copy of the files that git tracks or would add, without anything that was left before."""

    def __init__(self, source: Path, path: Path) -> None:
        self.path = path
        self.kill_processes()
        shutil.rmtree(path, ignore_errors=True)
        listing = ["git", "-C", str(source), "ls-files", "-zco", "--exclude-standard"]
        for name in subprocess.run(listing, capture_output=True, check=True).stdout.split(b"\0"):
            file = Path(os.fsdecode(name))
            if name and (source / file).is_file():
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / file, path / file)
        # Bytecode that is checked by hash is never mistaken for that of another mutant, which may
        # have the same size and the same second.
        for package in ("cache", "session_server"):
            mode = PycInvalidationMode.CHECKED_HASH
            assert compileall.compile_dir(path / package, quiet=1, invalidation_mode=mode)
        where = "import cache, session_server as s; print(cache.__path__[0], s.__path__[0])"
        imported = self._start([sys.executable, "-c", where], stdout=subprocess.PIPE)
        expected = f"{path / 'cache'} {path / 'session_server'}\n".encode()
        assert imported.communicate()[0] == expected, "tests would import another tree"

    def run_tests(self, files: Sequence[str], limit_s: float, *options: str) -> Run:
        """Run test files in this order, and leave no process behind."""
        report = self.path.with_suffix(".json")
        report.unlink(missing_ok=True)
        temporary = f"--basetemp={self.path.with_suffix('.tmp')}"
        plugins = ["-p", "no:cacheprovider", "-p", "tests.mutation.child"]
        started_s = time.monotonic()
        with self.path.with_suffix(".log").open("wb") as log:
            argv = [sys.executable, "-m", "pytest", *plugins, temporary, *options, *files]
            process = self._start(argv, stdout=log, stderr=subprocess.STDOUT)
            try:
                returncode = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                returncode = None
            finally:
                self.kill_processes()
                process.wait()
        found = json.loads(report.read_text()) if report.exists() else {"seconds": {}, "failed": []}
        took_s = time.monotonic() - started_s
        return Run(returncode == 0, returncode is None, took_s, found["seconds"], found["failed"])

    def kill_processes(self) -> None:
        """Kill everything that runs on this tree, even what left its process group."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == str(self.path):
                    process.kill()

    def _start(self, argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process whose imports come from this tree."""
        environment = {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
            "PYTHONPATH": str(self.path),
            REPORT: str(self.path.with_suffix(".json")),
            _MARK: str(self.path),
        }
        return subprocess.Popen(
            argv, cwd=self.path, env=environment, stdin=subprocess.DEVNULL, **options
        )
