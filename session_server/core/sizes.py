"""Read and write sizes in bytes as people do: 512MiB, 1.5 GiB, 2GB, 4096."""

from __future__ import annotations

import re
from typing import Final

SIZE_EXAMPLES: Final = "bytes, or a size as 512MiB or 1GiB"
"""What is read, for help and errors."""

_SIZE: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?([KMGT](?:i?B)?|B?)", re.ASCII)
_UNITS: Final = {"": 1, "B": 1} | {
    f"{prefix}{unit}": size**power
    for unit, size in (("iB", 1024), ("B", 1000), ("", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


def parse_size(text: str) -> int | None:
    """Return the bytes that a text says; None if it is no size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    whole, unit = match[1], _UNITS[match[2]]
    return int(whole) * unit if whole.isdecimal() else int(float(whole) * unit)


def exact_size(num_bytes: int) -> str:
    """Return a size that `parse_size` reads, in the largest unit that it is a multiple of."""
    for prefix in "TGMK":
        if num_bytes and num_bytes % _UNITS[f"{prefix}iB"] == 0:
            return f"{num_bytes // _UNITS[f'{prefix}iB']}{prefix}iB"
    return str(num_bytes)
