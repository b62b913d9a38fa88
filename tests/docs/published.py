"""The documents that a server publishes, as files under docs/: `python -m tests.docs.tables` writes
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from session_server.web.app import describe
from session_server.web.documents import published

DOCS = Path(__file__).resolve().parents[2] / "docs"

EXPANDED_LEVELS = 3
"""What is deeper stands on one line, so that a line is an operation, a message or a type."""


def files() -> dict[Path, str]:
    """Every document by the file that holds it."""
    return {DOCS / path: written(document) for path, document in published(describe()).items()}


def written(value: Any, level: int = 0) -> str:
    """JSON whose upper levels have a line for each member."""
    if level == EXPANDED_LEVELS or not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False)
    indent = " " * (level + 1)
    members = (f"{indent}{json.dumps(key)}: {written(value[key], level + 1)}" for key in value)
    end = "\n" if level == 0 else ""
    return "{\n" + ",\n".join(members) + "\n" + " " * level + "}" + end
