"""Exit statuses of the engine's process."""

from __future__ import annotations

from typing import Final

EXIT_OK: Final = 0
EXIT_UNUSABLE: Final = 2
EXIT_BUG: Final = 70
EXIT_ORPHANED: Final = 71
