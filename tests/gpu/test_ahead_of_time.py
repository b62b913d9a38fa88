"""What can be compiled for GPUs without one is; `make gpu-kernels` compiles all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this machine")


@pytest.mark.parametrize(
    ("architecture", "dtypes", "names"),
    [
        ("90", ("bf16",), ("gpt-oss,", "mxfp4, tiles of 16")),
        # What has the fewest registers to spare.
        ("90", ("fp32",), ("phi 3, 1 tokens, 8 splits",)),
        ("80", ("bf16",), ("qwen 3 30b in int4, tiles of 64, down",)),
    ],
)
def test_kernels_compile_for_an_architecture_and_stay_within_its_bounds(
    architecture: str, dtypes: tuple[str, ...], names: tuple[str, ...]
) -> None:
    flags = ("--names", *names, "--architectures", architecture, "--dtypes", *dtypes)
    done = subprocess.run(
        (sys.executable, "-m", "tests.gpu.ahead_of_time", *flags),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 beyond a bound" in done.stdout
