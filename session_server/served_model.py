"""What a server makes of its model before anything is loaded: for `serve`, `inspect`, `doctor`.

All three refuse the same checkpoints in the same words.
"""

from __future__ import annotations

from pathlib import Path

from session_server.config import Settings, model_directory
from session_server.models.registry import load_config
from session_server.text.model_text import ModelText, load_model_text


def checked_directory(settings: Settings) -> Path:
    """Return where the model's files are, its configuration checked.

    Raises:
        ModelError: there is no model, or its configuration cannot be served.
        ValueError: more context is asked for than the model was made for.
    """
    directory = model_directory(settings.model)
    check_context_length(settings, load_config(directory).max_position_embeddings)
    return directory


async def open_model(settings: Settings) -> tuple[Path, ModelText]:
    """Return where the model's files are, and its text side; to be closed.

    Raises:
        ModelError: there is no model, its configuration cannot be served, or a file that its
            text needs is missing or malformed.
        ValueError: more context is asked for than the model was made for.
    """
    directory = checked_directory(settings)
    return directory, await load_model_text(directory)


def check_context_length(settings: Settings, model_context_len: int) -> None:
    """Raise ValueError when more context is asked for than the model was made for, tokens."""
    asked = settings.model.context_length
    if asked is not None and asked > model_context_len:
        raise ValueError(
            f"--context-length {asked} exceeds the {model_context_len} tokens of the model"
        )
