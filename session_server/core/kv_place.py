"""Where a store has its files of KV, for who writes them and who looks after the store."""

from __future__ import annotations

from typing import Final

KV_DIRECTORY: Final = "kv"
"""Of a store, where the files of KV are."""

KV_REFUSED: Final = "refused"
"""Of that, where files are that did not verify."""
