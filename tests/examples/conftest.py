"""One real server process for everything a user copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from session_server.local_server import LocalServer


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where a server with the embedded model listens; it must leave in good order."""
    with LocalServer(["--memory-check", "strict", "--threads", "1"]) as server:
        yield server.url
    assert server.returncode == 0, server.last_lines
