"""What `make gpu-check` says before it starts, and of what has run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import check


def test_what_is_missing_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(check, "WHEELS", tmp_path / "none")
    told = check.whats_missing()
    assert told is not None
    assert f"{sys.executable} has no torch, triton, numpy, transformers, " in told
    assert "msgspec" in told
    assert "PYTHON=" in told
    assert "\n" not in told
    monkeypatch.setattr(check, "WHEELS", tmp_path)
    assert "msgspec" not in str(check.whats_missing()), "wheels beside the sources have it"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert check.whats_missing() is None


def test_a_python_without_packages_is_no_traceback() -> None:
    command = [sys.executable, "-S", "-m", "tests.gpu.check"]
    done = subprocess.run(command, cwd=check.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check: ")
    assert done.stderr.count("\n") == 1


def test_how_long_it_takes_at_most_and_what_comes_first_is_said() -> None:
    said = check.what_comes(check.PARTS)
    assert said.startswith("at most 38 min, in this order: graphs (120 s), decode (180 s), prefill")
    assert check.what_comes(check.PARTS[1:2]) == "at most 3 min, in this order: decode (180 s)"


def test_what_only_measures_proves_nothing(tmp_path: Path) -> None:
    def row(status: int | None, *, is_bench: bool) -> str:
        outcome = check.Outcome("part", "what", "command", status, 1.0, is_bench)
        return check.page("a GPU", [outcome], tmp_path).split("\n|")[-1].splitlines()[0]

    (tmp_path / "part.txt").write_text("figures")
    assert row(0, is_bench=True).endswith("| measured |")
    assert row(0, is_bench=False).endswith("| holds |")
    assert row(1, is_bench=True).endswith("| **status 1** |")
    assert row(None, is_bench=True).endswith("| its time was over |")
