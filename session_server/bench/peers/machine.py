"""Describe the machine of a run by what decides its speed, and say how much of it others took."""

from __future__ import annotations

import os
import platform
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

_TRIES: Final = 9
_READ_BYTES: Final = 256 << 20
_SHOWN: Final = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "avx_vnni"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve"),
)
"""Instruction sets that matter to matrix products, as the kernel of Linux names them."""
_CPU_INFO: Final = Path("/proc/cpuinfo")
_CPU_TIMES: Final = Path("/proc/stat")
_L3_SIZE: Final = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def describe_machine(num_threads: int) -> dict[str, Any]:
    """Return properties of this machine: never its name."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "instruction_sets": instruction_sets(_read(_CPU_INFO)),
        "l3": _read(_L3_SIZE).strip() or "unknown",
        "dram_gb_per_s": read_bandwidth(num_threads) / 1e9,
        "threads": num_threads,
        "python": platform.python_version(),
    }


def instruction_sets(cpu_info: str) -> list[str]:
    """Return those of the first core in a `/proc/cpuinfo` that matter here."""
    for line in cpu_info.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return [flag for flag in _SHOWN if flag in flags.split()]
    return []


def read_bandwidth(num_threads: int) -> float:
    """Measure how many bytes of memory `num_threads` read in a second: the best of nine."""
    parts = np.array_split(np.ones(_READ_BYTES // 4, np.float32), num_threads)
    best_s = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_TRIES):
            begun_s = time.perf_counter()
            list(pool.map(np.max, parts))
            best_s = min(best_s, time.perf_counter() - begun_s)
    return _READ_BYTES / best_s


class OtherWork:
    """Measure which share of the cores processes that are not ours took since it was made."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def share(self) -> float:
        """Return the share, from 0 to 1, counting children that have ended; 0 where there is no
        /proc."""
        elapsed_s = (time.monotonic() - self._begun_s) * (os.cpu_count() or 1)
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return min(1.0, max(0.0, others_s / elapsed_s))


def _busy_s() -> float:
    """Return the seconds that all cores have worked, also for other virtual machines."""
    words = _read(_CPU_TIMES).partition("\n")[0].split()
    if not words:
        return 0.0
    user, nice, system, _, _, irq, soft_irq, steal = map(int, words[1:9])
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    of_all = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in of_all)


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
