"""The commands of the Makefile do what the pages say; checked without running them."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def make(*argv: str) -> str:
    # A `make test` around this test must not hand its own flags and jobs down.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--no-print-directory", *argv],
        cwd=ROOT,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_make_alone_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^\.PHONY: (\w+)$", text, re.MULTILINE))
    assert {"demo", "test", "lint", "bench", "help"} <= targets
    listed = make()
    assert all(re.search(rf"^  {target}\s", listed, re.MULTILINE) for target in targets)


def test_make_test_runs_every_check() -> None:
    recipe = make("-n", "test", "VENV=.no-such-environment")
    stages = ("pip", "ruff check", "ruff format --check", "mypy", "lint-imports", "pytest")
    positions = [recipe.index(stage) for stage in stages]
    assert positions == sorted(positions)


@pytest.mark.parametrize("target", ["demo", "test"])
def test_a_fresh_machine_gets_torch_before_anything_could_choose_another_build(target: str) -> None:
    recipe = make("-n", target, "VENV=.no-such-environment", "TORCH=torch==9.9.9")
    assert recipe.index("venv .no-such-environment") < recipe.index("'torch==9.9.9+cpu'")
    assert recipe.index("torch==9.9.9+cpu") < recipe.index("--editable")


def test_the_demo_installs_no_development_tools() -> None:
    assert "[dev]" not in make("-n", "demo", "VENV=.no-such-environment")


def test_a_seed_a_range_or_a_trace_is_simulated_without_development_tools() -> None:
    given = ("SEED=7", "SEEDS=5..9", "STEPS=300", "REPLAY=sim-7.jsonl", "ARGS=--no-shrink")
    wanted = ("--seed 7", "--seeds 5..9", "--steps 300", "--replay sim-7.jsonl", "--no-shrink")
    recipe = make("-n", "sim", "VENV=.no-such-environment", *given)
    assert "[dev]" not in recipe
    simulated = recipe[recipe.index("-m tests.sim") :].replace("\\\n", " ").split()
    assert simulated == ["-m", "tests.sim", *" ".join(wanted).split()]
    soaked = make("-n", "soak", "VENV=.no-such-environment")
    assert "[dev]" not in soaked
    assert "-m tests.sim --seeds 0.. --steps 20000000" in soaked


def test_gpu_check_runs_in_the_environment_of_make_install_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHON", raising=False)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    assert make("-n", "gpu-check", f"VENV={tmp_path}").startswith(f"{python} -m tests.gpu.check")
    assert make("-n", "gpu-check", f"VENV={tmp_path}/none").startswith("python3 -m")
    assert make("-n", "gpu-check", f"VENV={tmp_path}", "PYTHON=other").startswith("other -m")
    assert "PYTHON=" in make().partition("  gpu-check")[2].splitlines()[0]


def test_gpu_bundle_removes_no_folder_that_it_did_not_make(tmp_path: Path) -> None:
    kept = tmp_path / "notes"
    kept.touch()
    with pytest.raises(subprocess.CalledProcessError) as refused:
        make("gpu-bundle", f"BUNDLE={tmp_path}", "PYTHON=false")
    assert f"{tmp_path} exists and is no bundle of ours" in refused.value.stderr
    assert kept.exists()
    (tmp_path / ".gpu-bundle").touch()
    with pytest.raises(subprocess.CalledProcessError):  # false downloads nothing
        make("gpu-bundle", f"BUNDLE={tmp_path}", "PYTHON=false")
    assert not kept.exists()
    assert (tmp_path / ".gpu-bundle").exists()


def test_what_is_merged_has_passed_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text("utf-8").splitlines() if "make" in line]
    assert any(re.search(r"make .*\btest\b", line) for line in commands)


def test_what_runs_needs_no_development_tools() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in requirements}

    runtime = names(project["dependencies"])
    assert not runtime & names(project["optional-dependencies"]["dev"])
    assert "transformers" not in runtime
