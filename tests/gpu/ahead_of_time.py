"""`python -m tests.gpu.ahead_of_time`: compile every specialization of the kernels in Triton, for
GPUs that are not here, and say what each takes of a multiprocessor.

A specialization is what a family's layers, the dtypes of Q and of pages, and the shape of a tile
make of a kernel. Spills are registers that went to memory: a kernel with many is too greedy.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from session_server.attention.triton.backend import IS_INTERPRETED
from session_server.attention.triton.kernels import attend_tiles, merge_splits
from session_server.attention.triton.tiles import MAX_SPLITS, TileShape, tile_shape

ARCHITECTURES: Final = (80, 90, 100)
MAX_SHARED_BYTES: Final = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""What one block of threads may have of a multiprocessor's shared memory (CUDA's programming
guide, compute capabilities)."""

MAX_SPILLED_BYTES: Final = 96
"""Of a thread. What the loop does not use goes first, which costs nothing; tiles that are twice as
large spill hundreds of bytes, of what it does use."""

_TYPES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
_TL: Final = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


@dataclass(frozen=True)
class Layers:
    """What a family's layers are to a kernel."""

    num_heads: int
    num_kv_heads: int
    value_dim: int
    rope_dim: int = 0
    window: int = 0
    has_softcap: bool = False
    has_sinks: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


FAMILIES: Final = {
    "llama 8b": Layers(32, 8, 128),
    "qwen 0.5b": Layers(14, 2, 64),
    "qwen 32b": Layers(64, 8, 128),
    "mistral": Layers(32, 8, 128, window=4096),
    "phi 3": Layers(32, 32, 96),
    "gemma 2": Layers(16, 8, 256, window=4096, has_softcap=True),
    "gemma 3": Layers(8, 4, 256, window=1024),
    "gpt-oss": Layers(64, 8, 64, window=128, has_sinks=True),
    "gpt-oss, global": Layers(64, 8, 64, has_sinks=True),
    "deepseek v2 lite": Layers(16, 1, 512, rope_dim=64),
    "deepseek v3": Layers(128, 1, 512, rope_dim=64),
}


@dataclass(frozen=True)
class Specialization:
    """One kernel, as it is compiled for one architecture."""

    architecture: int
    family: str
    queries: str
    pages: str
    num_tokens: int
    num_splits: int
    page_size: int = 16

    def __str__(self) -> str:
        return (
            f"sm_{self.architecture} {self.family}, {self.queries} on {self.pages}, "
            f"{self.num_tokens} tokens, {self.num_splits} splits"
        )


@dataclass(frozen=True)
class Taken:
    """What a compiled kernel takes: registers of a thread, bytes of shared memory of a block, and
    bytes that a thread spills."""

    registers: int
    shared_bytes: int
    spilled_bytes: int


def specializations(architectures: tuple[int, ...] = ARCHITECTURES) -> Iterator[Specialization]:
    """Every family in every dtype, for each shape of tile it has."""
    dtypes = (
        ("bf16", "bf16"),
        ("fp16", "fp16"),
        ("fp32", "fp32"),
        ("bf16", "fp8e4nv"),
        ("bf16", "fp8e5"),
    )
    for architecture in architectures:
        for family, layers in FAMILIES.items():
            for queries, pages in dtypes:
                if pages == "fp8e4nv" and architecture < 89:
                    continue  # the architecture has no such dtype
                shapes = {shape_of(layers, n, queries): n for n in (512, 32, 5, 1)}
                for num_tokens in shapes.values():
                    for num_splits in (1, 8) if num_tokens <= 5 else (1,):
                        yield Specialization(
                            architecture, family, queries, pages, num_tokens, num_splits
                        )


def shape_of(layers: Layers, num_tokens: int, queries: str) -> TileShape:
    """Return the tiles of spans of so many tokens."""
    itemsize = 4 if queries == "fp32" else 2
    return tile_shape(num_tokens * layers.group, layers.value_dim, itemsize)


def compile_attention(of: Specialization) -> Taken:
    """Compile `attend_tiles`, as `PoolKernel.launch` has it compiled."""
    layers = FAMILIES[of.family]
    shape = shape_of(layers, of.num_tokens, of.queries)
    out = "fp32" if of.num_splits > 1 else of.queries
    pointers = {
        "q": of.queries,
        "kv_keys": of.pages,
        "kv_values": of.pages,
        "out": out,
        "lse": "fp32" if of.num_splits > 1 else out,
        "sinks": of.queries,
        "table": "i32",
        "tiles": "i32",
    }
    constants = {
        "NUM_HEADS": layers.num_heads,
        "GROUP": layers.group,
        "HEAD_DIM": layers.value_dim,
        "ROPE_DIM": layers.rope_dim,
        "PAGE_SIZE": of.page_size,
        "WINDOW": layers.window,
        "HAS_SOFTCAP": layers.has_softcap,
        "HAS_SINKS": layers.has_sinks,
        "VALUES_ARE_KEYS": layers.rope_dim > 0,
        "IS_SPLIT": of.num_splits > 1,
        "DOT_DTYPE": _TL[of.queries],
        "BLOCK_M": shape.num_rows,
        "BLOCK_N": shape.num_keys,
        "BLOCK_D": max(16, triton.next_power_of_2(layers.value_dim)),
        "BLOCK_R": max(16, triton.next_power_of_2(layers.rope_dim)),
    }
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    return _compile(attend_tiles, of.architecture, pointers, constants, **options)


def compile_merge(architecture: int, value_dim: int, *, has_sinks: bool) -> Taken:
    """Compile `merge_splits` for the most splits."""
    pointers = {"parts": "fp32", "lse": "fp32", "out": "bf16", "sinks": "bf16"}
    constants = {
        "NUM_HEADS": 32,
        "HEAD_DIM": value_dim,
        "HAS_SINKS": has_sinks,
        "NUM_SPLITS": MAX_SPLITS,
        "BLOCK_D": triton.next_power_of_2(value_dim),
    }
    return _compile(merge_splits, architecture, pointers, constants)


def _compile(
    kernel: Any,
    architecture: int,
    pointers: dict[str, str],
    constants: dict[str, Any],
    **options: int,
) -> Taken:
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = f"*{pointers[name]}"
            if name != "tiles":
                attributes[index,] = [["tt.divisibility", 16]]
        elif name in ("scale", "softcap"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name.startswith("stride_"):  # as those of heads whose size is a multiple of 16 are
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, GPUTarget("cuda", architecture, 32), options)
    usage = _usage(compiled.asm["cubin"])
    return Taken(usage["REG"], compiled.metadata.shared, usage["LOCAL"] + usage["STACK"])


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


def too_much(of: Specialization, taken: Taken) -> str | None:
    """Return what is beyond a bound; None if nothing is."""
    if taken.spilled_bytes > MAX_SPILLED_BYTES:
        return f"{of} spills {taken.spilled_bytes} bytes"
    if taken.shared_bytes > MAX_SHARED_BYTES[of.architecture]:
        return f"{of} takes {taken.shared_bytes} bytes of shared memory"
    return None


def main() -> int:
    """Compile all, or some. Return 1 if one is beyond a bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="*", default=[*FAMILIES], choices=[*FAMILIES])
    parser.add_argument(
        "--architectures", nargs="*", type=int, default=[*ARCHITECTURES], choices=ARCHITECTURES
    )
    parser.add_argument("--pages", nargs="*", default=[*_TYPES.values()])
    args = parser.parse_args()
    if IS_INTERPRETED:
        sys.exit("TRITON_INTERPRET is set: nothing would be compiled")
    wrong = []
    for each in specializations(tuple(args.architectures)):
        if each.family not in args.families or each.pages not in args.pages:
            continue
        taken = compile_attention(each)
        print(f"{each}: {taken.registers} registers, {taken.shared_bytes} B shared", flush=True)
        wrong.append(too_much(each, taken))
    for architecture in args.architectures:
        for value_dim, has_sinks in ((64, True), (128, False), (512, False)):
            of = Specialization(
                architecture, f"merge of {value_dim}", "bf16", "bf16", 1, MAX_SPLITS
            )
            taken = compile_merge(architecture, value_dim, has_sinks=has_sinks)
            print(f"{of}: {taken.registers} registers, {taken.shared_bytes} B shared", flush=True)
            wrong.append(too_much(of, taken))
    found = [each for each in wrong if each is not None]
    print(f"{len(wrong)} kernels compiled, {len(found)} beyond a bound")
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
