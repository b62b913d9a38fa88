"""`python -m tests.gpu.ahead_of_time`: compile every specialization of the kernels in Triton, for
GPUs that are not here, and say what each takes of a multiprocessor.

A specialization is what a model, the dtypes and the shape of a batch make of a kernel. Spills are
registers that went to memory: a kernel with many is too greedy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from session_server.attention.triton.launching import IS_INTERPRETED
from tests.gpu.compiled import ARCHITECTURES, Specialization, too_much
from tests.gpu.specializations import attention, experts, fused, linears, recurrent

KINDS: Final[Mapping[str, Callable[[], Iterator[Specialization]]]] = {
    "attention": attention.specializations,
    "experts": experts.specializations,
    "fused": fused.specializations,
    "linears": linears.specializations,
    "recurrent": recurrent.specializations,
}


def main() -> int:
    """Compile all, or some. Return 1 if one is beyond a bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--names", nargs="*", help="only what has one of these in its name")
    parser.add_argument("--dtypes", nargs="*", help="only what has no other dtype")
    parser.add_argument(
        "--architectures", nargs="*", type=int, default=[*ARCHITECTURES], choices=ARCHITECTURES
    )
    args = parser.parse_args()
    if IS_INTERPRETED:
        sys.exit("TRITON_INTERPRET is set: nothing would be compiled")
    num_compiled, found = 0, []
    for architecture in args.architectures:
        for each in (each for kind in args.kinds for each in KINDS[kind]()):
            is_named = any(name in each.name for name in args.names or [""])
            is_asked = is_named and set(each.dtypes) <= set(args.dtypes or each.dtypes)
            if not (is_asked and each.runs_on(architecture)):
                continue
            taken = each.compile(architecture)
            name = f"sm_{architecture} {each.name}, {' on '.join(each.dtypes)}"
            print(f"{name}: {taken.registers} registers, {taken.shared_bytes} B shared", flush=True)
            num_compiled += 1
            if (wrong := too_much(taken, architecture)) is not None:
                found.append(f"{name} {wrong}")
    print(f"{num_compiled} kernels compiled, {len(found)} beyond a bound")
    print(*found, sep="\n")
    return 1 if found or not num_compiled else 0


if __name__ == "__main__":
    sys.exit(main())
