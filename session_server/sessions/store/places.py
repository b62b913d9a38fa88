"""Find the store of a server that was told of none: one for each port, in the user's state
directory, so that servers on one machine do not share any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from session_server.sessions.store.database import Database

STATE_VARIABLE: Final = "XDG_STATE_HOME"
"""Environment variable with the directory for what programs keep; ~/.local/state by default."""

_PROGRAM: Final = "session-server"


def default_directory(environment: Mapping[str, str], port: int) -> Path | None:
    """Return the store of the server on a port; None for a user without a home."""
    stores = state_directory(environment)
    return None if stores is None else stores / f"port-{port}"


def found_directories(environment: Mapping[str, str]) -> list[Path]:
    """Return the stores of servers that were told of none, in order."""
    stores = state_directory(environment)
    found = [] if stores is None else stores.glob(f"*/{Database.FILE}")
    return sorted(path.parent for path in found)


def state_directory(environment: Mapping[str, str]) -> Path | None:
    """Return the directory with the stores, and with what is known of clusters; None for a user
    without a home."""
    state, home = environment.get(STATE_VARIABLE, ""), environment.get("HOME", "")
    # A relative one is to be ignored, says the specification.
    if Path(state).is_absolute():
        return Path(state, _PROGRAM)
    return Path(home, ".local", "state", _PROGRAM) if Path(home).is_absolute() else None
