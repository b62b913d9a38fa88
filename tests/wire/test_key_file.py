"""A server that runs, and a file of keys that the command line changes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx

from session_server.local_server import LocalServer
from tests.web.wire_client import open_wire
from tests.wire.conftest import SMALL


def keys(*words: str) -> str:
    """What `session-server keys` says."""
    argv = [sys.executable, "-m", "session_server", "keys", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


async def until_status(http: httpx.AsyncClient, key: str, status: int) -> None:
    headers = {"authorization": f"Bearer {key}"}
    while (await http.get("/v1/models", headers=headers)).status_code != status:
        await asyncio.sleep(0.02)


def test_keys_are_handed_out_and_taken_back_while_the_server_runs(tmp_path: Path) -> None:
    file = ("--file", str(tmp_path / "keys"))
    first = keys("add", "alice", *file)

    async def scenario(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
            second = keys("add", "alice", *file)
            await until_status(http, second, 200)
            asked = await http.post("/v1/ws-ticket", headers={"authorization": f"Bearer {first}"})
            offers = ["kvsession.v1", f"ticket.{asked.json()['ticket']}"]
            async with open_wire(url, subprotocols=offers) as wire:
                session_id = (await wire.receive())["session_id"]
                keys("revoke", keys("list", *file).split()[6], *file)
                assert await wire.close_code() == 4401
            await until_status(http, first, 401)
            kept = {"authorization": f"Bearer {second}"}
            assert (await http.get(f"/v1/sessions/{session_id}", headers=kept)).status_code == 200
            keys("revoke", "alice", *file)
            await until_status(http, second, 401)

    lines: list[str] = []
    flags = [*SMALL, "--log-level", "info", "--api-key-file", file[1]]
    with LocalServer(flags, on_line=lines.append) as server:
        asyncio.run(asyncio.wait_for(scenario(server.url), 60))
        assert server.stop() == 0
    assert any("keys read owners=1 admins=0 gone_keys=1 gone_owners=0" in line for line in lines)
    assert any("keys read owners=0 admins=0 gone_keys=1 gone_owners=1" in line for line in lines)
