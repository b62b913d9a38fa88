"""The server process, put together."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import get_args

from pydantic import SecretStr

from session_server import wiring
from session_server.config import HttpOptions, Settings
from session_server.web import server


def test_no_client_is_shown_a_secret_or_a_file_of_the_server() -> None:
    fields = {name: get_args(field.annotation) for name, field in HttpOptions.model_fields.items()}
    hidden = {name for name, kinds in fields.items() if {Path, SecretStr} & {*kinds}}
    hidden.add("otlp_traces_endpoint")  # its URL may hold a password
    http = HttpOptions.model_validate(dict.fromkeys(hidden, "http://canary@collector"))
    assert "canary" not in Settings(http=http).model_dump_json(exclude=wiring._SECRET)


def test_full_collections_are_rare_in_the_server_and_skip_what_exists_at_its_start() -> None:
    before = gc.get_threshold()
    try:
        server._settle_collector()
        young, middle, full = gc.get_threshold()
        assert young * (middle + 2) <= 20_000, "a young collection takes milliseconds"
        assert young * (middle + 2) * full >= 8_000_000
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
