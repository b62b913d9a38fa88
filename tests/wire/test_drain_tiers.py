"""What a real server writes as it ends: all that fits where there is room, and of what does not
fit the KV of the sessions used last.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from session_server.local_server import LocalServer
from tests.wire.test_tiers import NUM_SESSIONS, ON_DISK, POOL, Kept, ask, files_in, keep, served

PLENTY = ("--max-total-tokens", "16384")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return keep(tmp_path_factory.mktemp("kept") / "store", *PLENTY)


async def cached(url: str, session_ids: list[str], turn_id: str) -> list[int]:
    """How much of the prompt of the next turn of each was not computed."""
    ends = [await ask(url, each, turn_id, "What is my name?") for each in session_ids]
    return [end["usage"]["cached_tokens"] for end in ends]


def end(server: LocalServer) -> None:
    os.kill(server.pid, signal.SIGTERM)
    server.wait(timeout_s=60)


@pytest.mark.timeout(240)
def test_what_does_not_fit_into_host_memory_at_once_is_written_too(
    tmp_path: Path, kept: Kept
) -> None:
    """Host memory is what it passes through."""
    store = kept.copy_to(tmp_path / "store")
    assert len(files_in(tmp_path / "store" / "kv")) >= NUM_SESSIONS
    with served(*PLENTY, *store, *ON_DISK) as server:
        assert all(num > 100 for num in asyncio.run(cached(server.url, kept.session_ids, "t2")))


@pytest.mark.parametrize("pool", [PLENTY, POOL], ids=["plenty", "pressure"])
@pytest.mark.timeout(240)
def test_of_what_the_disk_has_no_room_for_those_used_last_are_written(
    tmp_path: Path, kept: Kept, pool: tuple[str, str]
) -> None:
    kv, session_ids = tmp_path / "store" / "kv", kept.session_ids
    room = (*kept.copy_to(kv.parent), "--disk-kv-bytes")
    # Each segment counts for more than its file has.
    largest = max(file.stat().st_size for file in files_in(kv)) + 4096
    for file in files_in(kv):
        file.unlink()
    few = str(3 * largest + largest // 2)
    with served(*pool, *room, few) as server:
        asyncio.run(cached(server.url, [*session_ids[2:], *session_ids[1::-1]], "t2"))
        end(server)
    assert sum(file.stat().st_size for file in files_in(kv)) <= int(few)
    with served(*PLENTY, *room, few) as server:
        # Used last, last first: 0, 1, 7, 6, ...; a look at the others comes behind them.
        order = [0, 1, 7, 6, 5, 4, 3, 2]
        asked = [session_ids[number] for number in order]
        found = [num > 100 for num in asyncio.run(cached(server.url, asked, "t3"))]
        end(server)
    assert found[:2] == [True, True]
    assert found == sorted(found, reverse=True), "none is there that was used less recently"
