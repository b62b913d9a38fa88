"""Compile a kernel in Triton for a GPU that is not here, and say what it takes of one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES: Final = (80, 90, 100)
MAX_SHARED_BYTES: Final = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""What one block of threads may have of a multiprocessor's shared memory (CUDA's programming
guide, compute capabilities)."""

MAX_SPILLED_BYTES: Final = 96
"""Of a thread. What the loop does not use goes first, which costs nothing; tiles that are twice as
large spill hundreds of bytes, of what it does use."""

FP8: Final = ("fp8e4nv", "fp8e5")
TL: Final = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


@dataclass(frozen=True)
class Taken:
    """What a compiled kernel takes: registers of a thread, bytes of shared memory of a block, and
    bytes that a thread spills."""

    registers: int
    shared_bytes: int
    spilled_bytes: int


@dataclass(frozen=True)
class Specialization:
    """One kernel as it is compiled: what `launching.run` is called with, but for the grid.

    `pointers`: the dtypes of what tensors hold, in Triton's names, by argument. `constants`: all
    `tl.constexpr`. `floats`: arguments that are numbers with a fraction; what is left are ints.
    `unaligned`: pointers that are not known to be multiples of 16 bytes. `multiples`: ints that
    are multiples of 16.
    """

    kernel: Any
    name: str
    dtypes: tuple[str, ...]
    pointers: Mapping[str, str]
    constants: Mapping[str, Any]
    floats: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    multiples: Callable[[str], bool] = lambda name: name.startswith("stride_")
    options: Mapping[str, int] = field(default_factory=dict)

    def runs_on(self, architecture: int) -> bool:
        """Return whether the architecture has the dtypes."""
        return architecture >= 89 or "fp8e4nv" not in self.dtypes

    def compile(self, architecture: int) -> Taken:
        """Compile it for one architecture."""
        signature: dict[str, str] = {}
        attributes: dict[tuple[int, ...], list[list[object]]] = {}
        for index, name in enumerate(self.kernel.arg_names):
            if name in self.constants:
                signature[name] = "constexpr"
            elif name in self.pointers:
                signature[name] = f"*{self.pointers[name]}"
                if name not in self.unaligned:
                    attributes[index,] = [["tt.divisibility", 16]]
            elif name in self.floats:
                signature[name] = "fp32"
            else:
                signature[name] = "i32"
                if self.multiples(name):
                    attributes[index,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, dict(self.constants), attributes)
        target = GPUTarget("cuda", architecture, 32)
        compiled = triton.compile(source, target, dict(self.options))
        usage = _usage(compiled.asm["cubin"])
        return Taken(usage["REG"], compiled.metadata.shared, usage["LOCAL"] + usage["STACK"])


def too_much(taken: Taken, architecture: int) -> str | None:
    """Return what is beyond a bound; None if nothing is."""
    if taken.spilled_bytes > MAX_SPILLED_BYTES:
        return f"spills {taken.spilled_bytes} bytes"
    if taken.shared_bytes > MAX_SHARED_BYTES[architecture]:
        return f"takes {taken.shared_bytes} bytes of shared memory"
    return None


def _usage(cubin: bytes) -> dict[str, int]:
    """Return what `cuobjdump`, which triton brings, says that a kernel uses."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|LOCAL|STACK|SHARED):(\d+)", told)}
