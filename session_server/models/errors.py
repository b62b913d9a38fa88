"""Why a model cannot be served. Raised at start-up, never towards a client.

ModelError
├── ModelNotFound      no such directory, and no hub that has it
├── UnsupportedModel   an architecture, or a setting of one, that is not implemented
├── CheckpointError    files, fields or tensors are missing, superfluous or not what they may be
├── DraftMismatch      a draft model that cannot guess for the model it was given to
└── ModelFilesError    the text side is missing or malformed (`text.model_files`)
"""

from __future__ import annotations


class ModelError(Exception):
    """Root of everything loading a model raises on purpose."""


class ModelNotFound(ModelError):
    """No such directory, and no hub that has it."""


class UnsupportedModel(ModelError):
    """An architecture, or a setting of one, that is not implemented."""


class CheckpointError(ModelError):
    """Files or tensors are missing, superfluous or of the wrong shape."""


class DraftMismatch(ModelError):
    """A draft model that cannot guess for the model it was given to."""
