"""Provide the embedded model, a tiny recall model, and the dialogues that it can hold.

`MODEL_DIR` is a checkpoint in Hugging Face layout (Qwen3 architecture) that is loaded
through the same code as any other checkpoint. See README.md beside this file.
"""

from pathlib import Path
from typing import Final

MODEL_DIR: Final = Path(__file__).parent / "model"
