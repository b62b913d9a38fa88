"""Read and set variables of the environment that are no settings; libraries read them."""

from __future__ import annotations

import os
import sys
from typing import Final

CPU_VARIABLE: Final = "SESSION_SERVER_CPU"
"""An instruction set whose kernels compute forwards, as if the machine had no better."""


def named_cpu() -> str | None:
    """Return the instruction set that the environment names."""
    return os.environ.get(CPU_VARIABLE)


def bind_gloo_to_loopback() -> None:
    """Have gloo's ranks of this process meet others of this machine alone, unless a variable of its
    own says where."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
