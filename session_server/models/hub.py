"""Find the files of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from session_server.models.errors import ModelNotFound
from session_server.models.gguf.reader import is_gguf

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
    if local.suffix.lower() == ".gguf":  # no name of a repository: nobody is asked for it
        raise ModelNotFound(f"{path_or_id}: no such file")
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


def _reject_unpacked(directory: Path) -> None:
    """Say what to give instead of a directory that holds GGUF files alone."""
    files = sorted(path.name for path in directory.glob("*.gguf"))
    if files and not (directory / "config.json").exists():
        raise ModelNotFound(
            f"{directory} holds GGUF files and no config.json; give one of the files: "
            f"{', '.join(files[:_MAX_LISTED])}"
        )


_MAX_LISTED: Final = 8
