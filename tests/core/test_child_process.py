"""What a server starts is the server's own code, wherever it was started."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import session_server
from session_server.core.child_process import PROGRAM

PACKAGE = Path(session_server.__file__).parent


def test_a_child_runs_no_code_of_the_working_directory(tmp_path: Path) -> None:
    for name in ("cache", "json", "session_server"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not ours')\n", "utf-8")
    done = subprocess.run(
        [*PROGRAM, "inspect", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_child_is_started_so() -> None:
    started = re.compile(r"sys\.executable")
    files = [path for path in PACKAGE.rglob("*.py") if started.search(path.read_text("utf-8"))]
    assert [path.name for path in files] == ["child_process.py"]
