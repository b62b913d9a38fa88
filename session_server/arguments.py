"""What arguments of more than one command are read with."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Final, NoReturn

from session_server.core.owner import KEY_VARIABLE

KEY_ADVICE: Final = f"this server asks for a key: give it with --api-key or in {KEY_VARIABLE}"
"""What a command says to whom a server has refused."""


class CommandParser(argparse.ArgumentParser):
    """Say what is wrong first, then how to go on: argparse would begin with every flag there is."""

    @property
    def flags(self) -> list[str]:
        """Every flag, in all its spellings."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        advice = f"`{self.prog} --help` explains every flag and shows examples"
        self.exit(2, f"{self.prog}: {message}\n{self.format_usage()}{advice}\n")


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


def add_server(parser: argparse.ArgumentParser, *, about: str, default: str | None = None) -> None:
    """Add the flags that say which server is meant, and the one that `KEY_ADVICE` speaks of."""
    group = parser.add_argument_group("server", "Which server, and who asks.")
    shown = f"{about} (default: {default})" if default else about
    group.add_argument("--url", default=default, help=shown)
    group.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(KEY_VARIABLE) or None,
        help=f"shown to the server (default: what {KEY_VARIABLE} holds, which ps does not show)",
    )
