"""Find a model's files, and compute a hash that identifies the model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from session_server.models.errors import ModelNotFound
from session_server.models.files import MAX_TOKENIZER_BYTES, find_files, read_bytes

DOWNLOADED_FILES: Final = ("*.safetensors", "*.json", "*.jinja")
"""The files that the loader reads; never pickles or code."""


def resolve_model(path_or_id: str) -> Path:
    """Return the directory of a checkpoint: a local one, or a hub repository downloaded once.

    Raises:
        ModelNotFound: it is neither; the message says what to do.
    """
    local = Path(path_or_id).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise ModelNotFound(f"{path_or_id} is a file; give the directory of the checkpoint")
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
    files. Servers share KV and token ids only if their fingerprints are equal.

    Raises:
        CheckpointError: a file is not a regular file of the directory, or is too large.
    """
    digest = hashlib.sha256()
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


_HEADER_SAMPLE_BYTES: Final = 1 << 20
"""Read from both ends of each weight file: retrained weights of the same shape must differ."""
