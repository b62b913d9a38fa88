"""Reading the files of a checkpoint: regular files of bounded size, inside its directory.

A directory from elsewhere may hold devices, pipes, links that lead out of it and files that never
end. A link may lead to another file of the directory, or to where the hub's cache keeps what its
snapshots link to.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from session_server.models.errors import CheckpointError

MAX_CONFIG_BYTES: Final = 1 << 20
"""Limit of `config.json`, `generation_config.json` and chat templates; the hub's reach 50 kB."""

MAX_JSON_BYTES: Final = 64 << 20
"""Limit of `tokenizer_config.json` and of an index of tensors (9 MB for 92,000 of them)."""

MAX_TOKENIZER_BYTES: Final = 256 << 20
"""Limit of `tokenizer.json`; 33 MB for 262,000 tokens."""


def find_file(directory: Path, name: str) -> Path | None:
    """Return the path of a regular file of a checkpoint, None if there is nothing of that name.

    Raises:
        CheckpointError: it is no regular file, or leads out of the directory.
    """
    path = directory / name
    if Path(name).name != name or name in ("", "..") or "\0" in name:
        raise CheckpointError(f"{name!r} is not the name of a file in {directory}")
    if not os.path.lexists(path):
        return None
    try:
        root, real = directory.resolve(strict=True), path.resolve(strict=True)
        mode = real.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path} is a link to a file that is not there") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from None
    if not any(real.is_relative_to(home) for home in (root, *_hub_blobs(root))):
        raise CheckpointError(f"{path} is a link that leads out of the checkpoint's directory")
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a regular file")
    return path


def find_files(directory: Path, pattern: str) -> list[Path]:
    """Return the files of a checkpoint whose names match, in order. Raises like `find_file`."""
    found = (find_file(directory, path.name) for path in sorted(directory.glob(pattern)))
    return [path for path in found if path is not None]


def read_bytes(directory: Path, name: str, max_bytes: int) -> bytes | None:
    """Return the contents of a file of a checkpoint, None if there is no such file.

    Raises:
        CheckpointError: it is no regular file, leads out of the directory, is larger than
            `max_bytes` or cannot be read.
    """
    path = find_file(directory, name)
    if path is None:
        return None
    with opened(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise CheckpointError(f"{path} is larger than {max_bytes:,} bytes")
    return content


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file, without waiting for the other end of a pipe put in its place.

    Raises:
        CheckpointError: it is none, or cannot be read, be it in the block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CheckpointError(f"{path} is not a regular file")
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from None


def read_text(directory: Path, name: str, max_bytes: int) -> str | None:
    """Return the text of a file of a checkpoint.

    Raises:
        CheckpointError: see `read_bytes`; or it is not UTF-8.
    """
    content = read_bytes(directory, name, max_bytes)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{directory / name} is not UTF-8") from None


def read_object(directory: Path, name: str, max_bytes: int) -> dict[str, Any] | None:
    """Return the JSON object in a file of a checkpoint.

    Raises:
        CheckpointError: see `read_text`; or it is no JSON object, or holds NaN or infinity.
    """
    text = read_text(directory, name, max_bytes)
    if text is None:
        return None
    path = directory / name
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is not JSON: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _hub_blobs(root: Path) -> tuple[Path, ...]:
    """Return where the hub's cache keeps the files of a snapshot: `blobs` beside `snapshots`."""
    return (root.parent.parent / "blobs",) if root.parent.name == "snapshots" else ()


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
