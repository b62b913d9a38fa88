"""Read arguments that several subcommands share."""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from session_server.core.nearest import did_you_mean, nearest
from session_server.core.owner import KEY_FILE_VARIABLE, KEY_VARIABLE

_Number = TypeVar("_Number", int, float)


class CommandParser(argparse.ArgumentParser):
    """Print the error first, then the usage and where to find help."""

    @property
    def flags(self) -> list[str]:
        """Return every flag, in all its spellings."""
        return list(self._option_string_actions)

    def _check_value(self, action: argparse.Action, value: str) -> None:
        """Say which word was probably meant, or which there are."""
        words = list(action.choices or ())
        if words and value not in words:
            hint = did_you_mean(nearest(value, words)) or f"; there are {', '.join(words)}"
            raise argparse.ArgumentError(action, f"there is no {value!r}{hint}")

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        advice = f"`{self.prog} --help` explains every flag and shows examples"
        self.exit(2, f"{self.prog}: {message}\n{self.format_usage()}{advice}\n")


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the `type` of an argument that is a whole number in [least, most]."""
    return _bounded(int, "a whole number", least, most)


def number(least: float, most: float) -> Callable[[str], float]:
    """Return the `type` of an argument that is a number in [least, most]."""
    return _bounded(float, "a number", least, most)


def _bounded(
    kind: Callable[[str], _Number], called: str, least: _Number, most: _Number | None
) -> Callable[[str], _Number]:
    bounds = f"at least {least}" if most is None else f"between {least} and {most}"

    def read(text: str) -> _Number:
        with suppress(ValueError):
            value = kind(text)
            if least <= value and (most is None or value <= most):
                return value
        raise argparse.ArgumentTypeError(f"expected {called} {bounds}, got {text!r}")

    return read


def add_key_file(group: argparse._ArgumentGroup) -> None:
    """Add the flag that names a file of API keys."""
    group.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        default=os.environ.get(KEY_FILE_VARIABLE) or None,
        help=f"the file of keys (default: ${KEY_FILE_VARIABLE}); add makes it",
    )


def add_server(parser: argparse.ArgumentParser, *, about: str, default: str | None = None) -> None:
    """Add the flags that choose the server and pass its API key."""
    group = parser.add_argument_group("server", "Choose the server and the API key.")
    shown = f"{about} (default: {default})" if default else about
    group.add_argument("--url", default=default, help=shown)
    group.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(KEY_VARIABLE) or None,
        help=f"API key for the server (default: ${KEY_VARIABLE}, which ps does not show)",
    )
    parser.set_defaults(trust=None)
    group.add_argument(
        "--ca-file",
        action=_TrustFile,
        metavar="FILE",
        help="believe the certificates of this PEM file (default: those of the machine)",
    )


class _TrustFile(argparse.Action):
    """Keep the name of a file, and what believes its certificates as `trust`."""

    def __call__(self, _: object, to: argparse.Namespace, values: Any, *__: object) -> None:
        """Read the file."""
        try:
            to.trust = ssl.create_default_context(cafile=values)
        except OSError as error:
            is_read = isinstance(error, ssl.SSLError)
            why = "no certificate as PEM" if is_read else error.strerror
            raise argparse.ArgumentError(self, f"cannot use {values}: {why}") from None
        to.ca_file = values
