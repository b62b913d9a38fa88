"""Find a model's files, and compute a hash that identifies the model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from session_server.models.errors import ModelNotFound
from session_server.models.files import MAX_TOKENIZER_BYTES, find_files, read_bytes
from session_server.models.gguf.reader import GgufFile, is_gguf, read_gguf, read_range

DOWNLOADED_FILES: Final = ("*.safetensors", "*.json", "*.jinja")
"""The files that the loader reads; never pickles or code."""


def resolve_model(path_or_id: str) -> Path:
    """Return a checkpoint: a local directory or GGUF file, or a hub repository downloaded once.

    Raises:
        ModelNotFound: it is neither; the message says what to do.
    """
    local = Path(path_or_id).expanduser()
    if local.is_dir():
        _reject_unpacked(local)
        return local
    if local.is_file() and is_gguf(local):
        return local
    if local.exists():
        raise ModelNotFound(
            f"{path_or_id} is a file, but not GGUF; give the directory of the checkpoint, or a "
            "GGUF file"
        )
    # Imported here: most starts use a local directory, and the hub client costs 0.3 s.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path_or_id, allow_patterns=list(DOWNLOADED_FILES)))
    except HFValidationError:
        raise ModelNotFound(f"{path_or_id}: no such directory, and not a hub id") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"{path_or_id}: no such directory, and the hub did not give it ({reason}). Without a "
            "network, download the checkpoint elsewhere and pass its directory"
        ) from error


def model_fingerprint(directory: Path) -> str:
    """Return 16 hex digits that identify this model and tokenizer.

    They hash the configuration and tokenizer files and the names, sizes and headers of the weight
    files, or the header of a GGUF file. Servers share KV and token ids only if their fingerprints
    are equal.

    Raises:
        CheckpointError: a file is not a regular file of the directory, or is too large.
    """
    digest = hashlib.sha256()
    if directory.is_file():
        header = read_gguf(directory)
        for start, length in _sampled_ranges(header):
            digest.update(read_range(directory, start, length))
        digest.update(str(header.num_bytes).encode())
        return digest.hexdigest()[:16]
    for path in find_files(directory, "*.json") + find_files(directory, "*.jinja"):
        digest.update(path.name.encode())
        digest.update(read_bytes(directory, path.name, MAX_TOKENIZER_BYTES) or b"")
    for path in find_files(directory, "*.safetensors"):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEADER_SAMPLE_BYTES))
            file.seek(max(0, path.stat().st_size - _HEADER_SAMPLE_BYTES))
            digest.update(file.read(_HEADER_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _reject_unpacked(directory: Path) -> None:
    """Say what to give instead of a directory that holds GGUF files alone."""
    files = sorted(path.name for path in directory.glob("*.gguf"))
    if files and not (directory / "config.json").exists():
        raise ModelNotFound(
            f"{directory} holds GGUF files and no config.json; give one of the files: "
            f"{', '.join(files[:_MAX_LISTED])}"
        )


def _sampled_ranges(file: GgufFile) -> Iterator[tuple[int, int]]:
    """Yield start and length of a file's header, and of a sample of its weights."""
    yield 0, min(file.num_header_bytes, file.num_bytes)
    length = min(_HEADER_SAMPLE_BYTES, file.num_bytes)
    yield file.num_bytes - length, length


_MAX_LISTED: Final = 8

_HEADER_SAMPLE_BYTES: Final = 1 << 20
"""Read from both ends of each weight file: retrained weights of the same shape must differ."""
