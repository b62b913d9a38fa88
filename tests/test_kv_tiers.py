"""What a server keeps outside of its pools, as its settings say."""

from __future__ import annotations

import logging
from typing import cast

import pytest

from session_server.config import CacheOptions, SessionOptions, Settings
from session_server.kv_tiers import make_tiers
from session_server.runner.loader import LoadedRunner


def test_a_disk_without_a_store_has_no_effect_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = Settings(
        cache=CacheOptions(host_kv_bytes=0, disk_kv_bytes=1 << 30),
        sessions=SessionOptions(store="none"),
    )
    with caplog.at_level(logging.WARNING, "session_server.engine"):
        tiers = make_tiers(settings, cast("LoadedRunner", None), "fingerprint")
    assert tiers.policy.disk_bytes == 0
    assert "--store" in caplog.text
