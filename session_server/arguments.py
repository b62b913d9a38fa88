"""What arguments of more than one command are read with."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """The `type` of an argument that is a whole number in [least, most]."""
    bounds = f"at least {least}" if most is None else f"between {least} and {most}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"a whole number, {bounds}; got {text!r}")
        return number

    return read
