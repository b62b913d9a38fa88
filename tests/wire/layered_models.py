"""Random models of any layout, with the embedded model's tokenizer: what a server can be given."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from session_server.demo import MODEL_DIR
from tests.oracle.checkpoints import write_checkpoint
from tests.wire.conftest import CONTEXT_LEN

VOCAB_SIZE: Final = 1536
EOS: Final = 4


def write_model(
    family: str, directory: Path, *, max_position_embeddings: int = CONTEXT_LEN
) -> Path:
    """A checkpoint of one family that reads and writes text, of little sense."""
    write_checkpoint(
        family,
        directory,
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS,
        max_position_embeddings=max_position_embeddings,
    )
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIR / file, directory)
    return directory
