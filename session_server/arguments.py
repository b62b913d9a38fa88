"""What arguments of more than one command are read with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

KEY_ADVICE: Final = "this server asks for a key: give it with --api-key"
"""What a command says to whom a server has refused."""


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """The `type` of an argument that is a whole number in [least, most]."""
    bounds = f"at least {least}" if most is None else f"between {least} and {most}"

    def read(text: str) -> int:
        try:
            number: int | None = int(text)
        except ValueError:
            number = None
        if number is None or number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"a whole number, {bounds}; got {text!r}")
        return number

    return read


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """Add the flag that `KEY_ADVICE` speaks of."""
    parser.add_argument("--api-key", help="shown to the server")
