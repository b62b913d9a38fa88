"""Kernels of our own for CPUs: a whole forward in one call, for every family of models.

The C++ in `src/` is compiled when the package is installed. Without a compiler the package installs
all the same and torch computes: `WHY_MISSING` then says what happened.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from session_server.core.environment import CPU_VARIABLE, named_cpu

WeightFormat = Literal["float32", "bfloat16", "float16", "int8", "int4"]
"""How weights are stored. "int8" and "int4" are codes of 32 weights of an output with one scale,
int4 with a minimum besides; activations are quantized to int8 per 32, token by token."""

try:
    from session_server.runner.native import _native

    WHY_MISSING: str | None = None
    """Why there are no kernels; None if there are."""
except ImportError as error:
    WHY_MISSING = (
        f"the native kernels cannot be used: {error}. If they were not built, install the package "
        "again where a C++20 compiler is found (g++ 12, clang 15 or newer)"
    )

_asked = named_cpu()
if WHY_MISSING is None and _asked in _native.cpus():
    _native.use_cpu(_asked)


def is_available() -> bool:
    """Return whether the kernels were built."""
    return WHY_MISSING is None


def cpu_name() -> str:
    """Return the instruction set whose kernels run: avx512_bf16, avx512, avx2 or portable.

    Raises:
        ValueError: this CPU has no kernels of the name in `CPU_VARIABLE`.
    """
    assert is_available(), WHY_MISSING
    if _asked and _asked not in _native.cpus():
        known = ", ".join(_native.cpus())
        raise ValueError(f"{CPU_VARIABLE}={_asked}: the kernels of this CPU are {known}")
    return _native.cpu()


def argmax(
    logits: NDArray[np.float32], tokens: NDArray[np.int64], is_finite: NDArray[np.bool_]
) -> None:
    """Write the index of each row's largest logit, and whether the row is finite, in one pass.

    `logits`: [n, vocab], contiguous; the others [n].
    """
    _native.argmax(logits, tokens, is_finite)


def set_num_threads(num_threads: int) -> None:
    """Compute forwards on so many threads, the caller's included.

    Raises:
        ValueError: not even one, or more than the system starts.
    """
    try:
        _native.set_num_threads(num_threads)
    except RuntimeError as error:
        raise ValueError(
            f"--threads {num_threads}: the system starts no more threads ({error}); ask for fewer"
        ) from error
