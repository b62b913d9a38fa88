"""The embedded model: a tiny recall model, its corpus and the script that trained it.

`MODEL_DIR` is a checkpoint in Hugging Face layout (Qwen3 architecture) that is loaded
through the same code as any other checkpoint. See README.md beside this file.
"""

from pathlib import Path
from typing import Final

MODEL_DIR: Final = Path(__file__).parent / "model"
