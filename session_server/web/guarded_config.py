"""Configure uvicorn, and give its connection guards what they share."""

from __future__ import annotations

from typing import Any

import uvicorn
from fastapi import FastAPI

from session_server.web.connection_table import ConnectionTable
from session_server.web.services import WebSettings


class GuardedConfig(uvicorn.Config):
    """Configure uvicorn with protocols that bound what a peer makes the server keep."""

    def __init__(
        self, app: FastAPI, *, settings: WebSettings, table: ConnectionTable, **options: Any
    ) -> None:
        super().__init__(app, **options)
        self.web_settings = settings
        self.connection_table = table


def guarded(config: uvicorn.Config) -> GuardedConfig:
    """Return the configuration that a guard was created with."""
    assert isinstance(config, GuardedConfig), "guards run under a GuardedConfig"
    return config
