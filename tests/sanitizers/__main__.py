"""Build the kernels with sanitizers and run their tests.

  address   AddressSanitizer and UndefinedBehaviorSanitizer
  thread    ThreadSanitizer

Needs g++, cmake and ninja or make; the tests are those in tests/runner/native.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import session_server.runner.native

SOURCE: Final = Path(session_server.runner.native.__file__).parent
TESTS: Final = Path(__file__).parents[1] / "runner" / "native"

SANITIZERS: Final = {"address": "address,undefined", "thread": "thread"}
LIBRARIES: Final = {"address": "libasan.so", "thread": "libtsan.so"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kinds", nargs="*", default=list(SANITIZERS), help="default: all")
    parser.add_argument("--keys", default="", help="for pytest -k")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for kind in args.kinds:
            print(f"== {kind}: building", flush=True)
            library = build(Path(directory) / kind, SANITIZERS[kind])
            print(f"== {kind}: testing", flush=True)
            status = run_tests(library, kind, args.keys)
            if status:
                return status
    return 0


def build(directory: Path, sanitizers: str) -> Path:
    """Compile the extension into `directory` and return its path."""
    configure = [
        "cmake",
        *("-S", str(SOURCE), "-B", str(directory)),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DSESSION_SERVER_SANITIZE={sanitizers}",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    ]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(directory), "--parallel", "2"], check=True)
    (library,) = directory.glob("_native*.so")
    return library


def path_of(library: str) -> str:
    """Return where the compiler has a library."""
    command = ["g++", f"-print-file-name={library}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def run_tests(library: Path, kind: str, keys: str) -> int:
    """Run the tests with the sanitizer's library loaded first, as it must be, and that of C++
    behind it: a program in C has no `throw` for the sanitizer to find."""
    environment = {
        **os.environ,
        "KERNELS": str(library),
        "LD_PRELOAD": f"{path_of(LIBRARIES[kind])} {path_of('libstdc++.so.6')}",
        # Python keeps what it interned; leaks of the kernels' own would be their buffers'.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
        "OMP_NUM_THREADS": "1",
    }
    # A sanitizer writes to the process's stderr and ends it: what pytest has captured is lost.
    plugins = ["-p", "tests.sanitizers.plugin", "-p", "no:cacheprovider", "--capture", "sys"]
    command = [sys.executable, "-m", "pytest", *plugins, "--timeout", "0", str(TESTS)]
    if keys:
        command += ["-k", keys]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
