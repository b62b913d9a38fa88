"""Check a model before anything is loaded, for `serve`, `inspect` and `doctor`.

All three refuse the same checkpoints with the same messages.
"""

from __future__ import annotations

from pathlib import Path

from session_server.config import Settings, model_directory
from session_server.models.registry import load_config
from session_server.text.model_text import ModelText, load_model_text


def checked_directory(settings: Settings) -> Path:
    """Return the directory of the model's files after checking its configuration.

    Raises:
        ModelError: there is no model, or its configuration is not supported.
        ValueError: the settings ask for more context than the model has.
    """
    directory = model_directory(settings.model)
    check_context_length(settings, load_config(directory).max_position_embeddings)
    return directory


async def open_model(settings: Settings) -> tuple[Path, ModelText]:
    """Return the model's directory and its text side, which the caller closes.

    Raises:
        ModelError: there is no model, its configuration is not supported, or a file of its
            tokenizer or chat template is missing or malformed.
        ValueError: the settings ask for more context than the model has.
    """
    directory = checked_directory(settings)
    return directory, await load_model_text(directory)


def check_context_length(settings: Settings, model_context_len: int) -> None:
    """Raise ValueError if the settings ask for more context tokens than the model has."""
    asked = settings.model.context_length
    if asked is not None and asked > model_context_len:
        raise ValueError(
            f"--context-length {asked} exceeds the {model_context_len} tokens of the model"
        )
