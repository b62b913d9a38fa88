"""The server process, put together."""

from __future__ import annotations

import gc

from session_server import wiring


def test_full_collections_are_rare_in_the_server_and_skip_what_exists_at_its_start() -> None:
    before = gc.get_threshold()
    try:
        wiring._settle_collector()
        young, middle, full = gc.get_threshold()
        assert young * middle <= 100_000, "a young collection takes milliseconds"
        assert young * middle * full >= 5_000_000
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
