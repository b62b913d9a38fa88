"""Define why a model cannot be served. Raised at start-up, never to a client.

ModelError
├── ModelNotFound      no such directory or GGUF file, and not a repository on the hub
├── UnsupportedModel   an architecture, or one of its settings, is not implemented
├── CheckpointError    files, fields or tensors are missing, unexpected or invalid
├── DraftMismatch      the draft model cannot draft for the served model
└── ModelFilesError    tokenizer files are missing or malformed (`text.model_files`)
"""

from __future__ import annotations

from typing import Final

MAX_SHOWN_CHARS: Final = 100
"""Characters of a checkpoint's text that an error quotes."""


class ModelError(Exception):
    """Serve as the base class of every error that loading a model raises on purpose."""


class ModelNotFound(ModelError):
    """Report that the path is no directory or GGUF file, and the hub has no such repository."""


class UnsupportedModel(ModelError):
    """Report that an architecture, or one of its settings, is not implemented."""


class CheckpointError(ModelError):
    """Report files or tensors that are missing, unexpected or of the wrong shape."""


class DraftMismatch(ModelError):
    """Report a draft model that cannot draft for the model it was given with."""


def shortened(text: str) -> str:
    """Cut a text from the checkpoint to the length that an error message quotes."""
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
