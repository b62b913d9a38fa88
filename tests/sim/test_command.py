"""`python -m tests.sim`: what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cache.lease import KVLease
from tests.sim.command import main

ROOT = Path(__file__).resolve().parents[2]


def test_some_seeds_end_well_and_say_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1..5", "--jobs", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["seeds"] == 4
    assert figures["next_seed"] == 5
    assert figures["steps"] > figures["wire_steps"] > 0
    assert figures["coverage"]["publish"] > 0


def test_a_number_of_steps_is_enough_to_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "300", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "steps checked" in said
    assert "finished length" in said


def test_a_report_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert main(["--seeds", "2..6", "--jobs", "1", "--report", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert (figures["seeds"], figures["next_seed"], figures["violations"]) == (4, 6, 0)


def test_without_a_terminal_lines_say_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.sim.command.LINE_S", 0.0)
    assert main(["--seeds", "2..6", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert [f"next seed {seed}" in said for seed in range(2, 8)] == [0, 1, 1, 1, 1, 0]


def test_processes_give_what_one_process_gives(capsys: pytest.CaptureFixture[str]) -> None:
    figures = []
    for jobs in ("1", "2"):
        assert main(["--seeds", "0..10", "--jobs", jobs, "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out))
        del figures[-1]["seconds"], figures[-1]["steps_per_s"]
    assert figures[0] == figures[1]


def test_processes_end_with_the_one_that_was_killed() -> None:
    command = [sys.executable, "-m", "tests.sim", "--seeds", "0..", "--steps", "9999999"]
    with subprocess.Popen([*command, "--jobs", "2"], stdout=subprocess.PIPE, cwd=ROOT) as sim:
        assert sim.stdout is not None
        # The processes of the pool, and the one that looks after their semaphores.
        while len(Path(f"/proc/{sim.pid}/task/{sim.pid}/children").read_text().split()) < 3:
            assert sim.poll() is None
            time.sleep(0.01)
        sim.kill()
        sim.stdout.read()  # as long as anybody has it open


def test_a_failure_tells_its_story_and_leaves_a_trace_that_fails_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(KVLease, "_drop_private", lambda self, num_kept: None)
    report = tmp_path / "report.json"
    argv = ["--seeds", "0..30", "--jobs", "1", "--out", str(tmp_path), "--report", str(report)]
    assert main(argv) == 1
    said = capsys.readouterr().out
    assert json.loads(report.read_text())["violations"] == 1
    trace = next(tmp_path.glob("sim-*.jsonl"))
    assert "settled | told | launched | pages | said" in said
    assert f"python -m tests.sim --replay {trace}" in said
    assert len(trace.read_text().splitlines()) < 20
    assert main(["--replay", str(trace), "--no-shrink", "--out", str(tmp_path)]) == 1
    monkeypatch.undo()
    assert main(["--replay", str(trace)]) == 0


def test_a_trace_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    assert main(["--replay", str(path)]) == 2
    assert "not a trace" in capsys.readouterr().out
    assert main(["--replay", str(tmp_path / "missing")]) == 2


@pytest.mark.parametrize("seeds", ["5", "9..3", "-1..3", "a..b"])
def test_a_range_that_makes_no_sense_is_refused(
    seeds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--seeds", seeds])
    assert left.value.code == 2
    assert "--seeds" in capsys.readouterr().err
