"""A real server process on a free port, and proof at the end that it kept its books."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from session_server.local_server import LocalServer
from tests.rig.recovery import well_kept

FLAGS = ["--threads", "1", "--log-level", "warning", "--memory-check", "warn"]
CONTEXT_LEN = 2048
SMALL = [*FLAGS, "--context-length", str(CONTEXT_LEN), "--max-total-tokens", "65536"]


@pytest.fixture(scope="session")
def server() -> Iterator[LocalServer]:
    """The embedded model, with chunks so small that a prefill can be seen and stopped."""
    with well_kept([*SMALL, "--chunked-prefill-size", "32"]) as running:
        yield running


@pytest.fixture(scope="session")
def plain() -> Iterator[LocalServer]:
    """The embedded model that keeps nothing, for what servers with more to do must say as well."""
    with well_kept(SMALL) as running:
        yield running


@pytest.fixture
def http(server: LocalServer) -> Iterator[httpx.Client]:
    """A client of that server."""
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60.0) as client:
        yield client
