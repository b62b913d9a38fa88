"""uvicorn's configuration, and what the guards of its connections share."""

from __future__ import annotations

from typing import Any

import uvicorn
from fastapi import FastAPI

from session_server.web.connection_table import ConnectionTable
from session_server.web.services import WebSettings


class GuardedConfig(uvicorn.Config):
    """A configuration whose protocols bound what a peer can make the server keep or wait for."""

    def __init__(
        self, app: FastAPI, *, settings: WebSettings, table: ConnectionTable, **options: Any
    ) -> None:
        super().__init__(app, **options)
        self.web_settings = settings
        self.connection_table = table


def guarded(config: uvicorn.Config) -> GuardedConfig:
    """Return the configuration that a guard was made with."""
    assert isinstance(config, GuardedConfig), "guards run under a GuardedConfig"
    return config
