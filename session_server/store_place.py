"""Find what `serve` is configured with, and its store: from flags, variables and a file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from session_server import flags, sources
from session_server.config import Settings
from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.open_files import STORE_NAMES
from session_server.sessions.store.places import default_directory, found_directories


def add_config(group: argparse._ArgumentGroup) -> None:
    """Add the flag that names a configuration file."""
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"what `serve` is configured with (default: ${sources.CONFIG_VARIABLE}, or none)",
    )


def settings_of_serve(given: Mapping[flags.Place, flags.Given], config: Path | None) -> Settings:
    """Return the settings of a server that is given the same. Raises ValueError."""
    return sources.read_sources(given, environment=os.environ, file=config).settings


def find_store(asked: str | None, config: Path | None, *, port: int | None = None) -> Path:
    """Return the directory of the store of a server that is given the same.

    Args:
        asked: what `--store` says; None: what the variable or the file says.
        port: what `--port` says, likewise.

    Raises:
        StoreUnusable: there is none; the message says what to do.
        ValueError: the file or a variable cannot be used.
    """
    given = {
        place: flags.Given(value, name, name)
        for place, name, value in (
            (("sessions", "store"), "--store", asked),
            (("http", "port"), "--port", port),
        )
        if value is not None
    }
    settings = settings_of_serve(given, config)
    store = settings.sessions.store
    if store == "none":
        raise StoreUnusable("the store is none, which keeps no sessions: pass --store DIR")
    if isinstance(store, Path):
        return store.expanduser()
    if store != "auto":
        raise StoreUnusable(
            "--store names a database, and this command reads directories: ask a server for a "
            "session (GET /v1/sessions/ID), and PostgreSQL's tools for a backup (pg_dump)"
        )
    directory = default_directory(os.environ, settings.http.port)
    if directory is None:
        raise StoreUnusable("there is no home directory with a store: pass --store DIR")
    if not directory.is_dir():
        others = " or ".join(map(str, found_directories(os.environ)))
        raise StoreUnusable(
            f"no server has run on port {settings.http.port} and kept sessions: "
            f"pass --store {others or 'DIR'}"
        )
    return directory


def made_store(directory: Path) -> Path:
    """Return a directory that somebody has made a store of, also if that has lost its database.
    Raises StoreUnusable for others, OSError."""
    if directory.is_file():
        raise StoreUnusable(
            f"{directory} is a file, not a directory: pass the directory of a store"
        )
    if directory.is_dir() and not {*STORE_NAMES}.isdisjoint(os.listdir(directory)):
        return directory
    raise StoreUnusable(f"{directory} is no store: `serve --store {directory}` makes one")
