"""Name the variables of the environment that are read far from the settings."""

from typing import Final

CPU_VARIABLE: Final = "SESSION_SERVER_CPU"
"""An instruction set whose kernels compute forwards, as if the machine had no better."""
