"""What can be compiled for GPUs without one is; `make gpu-kernels` compiles all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this machine")


def test_kernels_compile_for_an_architecture_and_stay_within_its_bounds() -> None:
    names = ("gpt-oss,", "mxfp4, tiles of 16")
    flags = ("--names", *names, "--architectures", "90", "--dtypes", "bf16")
    done = subprocess.run(
        (sys.executable, "-m", "tests.gpu.ahead_of_time", *flags),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 beyond a bound" in done.stdout
