"""Read the one variable of the environment that is no setting: kernels are chosen as they load."""

from __future__ import annotations

import os
from typing import Final

CPU_VARIABLE: Final = "SESSION_SERVER_CPU"
"""An instruction set whose kernels compute forwards, as if the machine had no better."""


def named_cpu() -> str | None:
    """Return the instruction set that the environment names."""
    return os.environ.get(CPU_VARIABLE)
