"""A server process over a disk that fails, and over one that loses what was not synced."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from session_server.core.child_process import PROGRAM
from session_server.sessions.store.session_file import file_of
from session_server.sessions.store.session_store import SessionStore
from session_server.wiring import EXIT_UNWRITTEN
from tests.disk.campaign import Campaign
from tests.disk.recording import Kind, Notes, Watched, environment
from tests.disk.store_runs import labels_of, watched_disk, with_any_memory
from tests.rig.decisions import Decisions
from tests.rig.echo_server import echo_server
from tests.rig.history import ENDS
from tests.rig.scene import echo_turn
from tests.web.wire_client import Wire, greeted, http_client

SPACE = {Kind.CREATE, Kind.WRITE, Kind.TRUNCATE}
FAULTS = {
    "no space": (errno.ENOSPC, SPACE, False),
    "no quota": (errno.EDQUOT, SPACE, False),
    "half a write, then no space": (errno.ENOSPC, SPACE, True),
    "no sync": (errno.EIO, {Kind.SYNC}, False),
    "nothing": (errno.EIO, set(Kind), False),
}

Said = tuple[str, Any]


class ServerHistory:
    """Know what clients of one session were told to be on disk. What was asked for and not told may
    be there behind that."""

    def __init__(self) -> None:
        self.num_notes = 0
        self._told: list[Said] = []
        self._asked: set[str] = set()

    @property
    def labels(self) -> Iterator[str]:
        """Yield whether a turn is under way."""
        yield "a turn" if len(self._asked) > len(self._told) else "no turn"

    def take(self, note: dict[str, Any]) -> None:
        """Know what a client was told."""
        self.num_notes += 1
        self._asked.add(note["asked"])
        if note.get("durable"):
            self._told = [tuple(said) for said in note["said"]]

    def check(self, image: Path) -> str | None:
        """Open an image. Return what is wrong, if anything."""
        return asyncio.run(self._check(image / "store"))

    async def _check(self, directory: Path) -> str | None:
        store = SessionStore.in_directory(directory, model=b"any")
        store.start(asyncio.get_running_loop())
        try:
            found: list[Said] = []
            for row in store._database.walk(None):
                items = file_of(row, store._database.entries(row.number)).items
                answers = [item for item in items if item.role == "assistant"]
                found = [(item.id, item.content) for item in answers]
                if any(item.turn_id not in self._asked for item in answers):
                    return f"nobody asked for all of {found}"
            if found[: len(self._told)] != self._told:
                return f"told {self._told}, found {found}"
        finally:
            await store.close()
        return None


class Client:
    """A client of one session that writes down what it was told."""

    def __init__(self, wire: Wire, notes: Notes) -> None:
        self._wire, self._notes = wire, notes
        self._chance = Decisions(1, "client")
        self.said: list[Said] = []
        self._num_asked = 0

    async def ask(self) -> bool:
        """Have a turn; return whether it was told to be on disk."""
        self._num_asked += 1
        name = f"t{self._num_asked}"
        self._notes.add(asked=name)
        await self._wire.send("turn.create", **echo_turn(self._chance, name, max_tokens=8))
        end = await self._wire.until(*ENDS, "error")
        assert end["type"] == "turn.completed", end
        self.said.append((end["item"]["id"], end["item"]["content"]))
        self._notes.add(asked=name, durable=end["durable"], said=self.said)
        return bool(end["durable"])


async def scraped(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"session_server_store_{name} ")]
    return float(line.rpartition(" ")[2])


async def live(watched: Watched, url: str, names: Sequence[str]) -> list[Said]:
    """Talk before, while and after calls fail in each of these ways."""
    notes = Notes(watched.log)
    async with http_client(url) as http, greeted(url) as wire:
        client = Client(wire, notes)
        assert [await client.ask(), await client.ask()] == [True, True]
        for name in names:
            error, kinds, is_short = FAULTS[name]
            watched.fail(error, kinds, is_short=is_short)
            assert [await client.ask(), await client.ask()] == [False, False], name
            health = await http.get("/health")
            assert (health.status_code, health.json()) == (200, {"status": "store_failing"})
            assert await scraped(http, "failing") == 1.0
            assert await scraped(http, "sessions_behind") == 1.0
            watched.heal()
            while await scraped(http, "sessions_behind"):
                await asyncio.sleep(0.05)
            assert (await http.get("/health")).json() == {"status": "ok"}
            assert [await client.ask(), await client.ask()] == [True, True], name
    notes.close()
    return client.said


@pytest.mark.parametrize(
    "names", [("no space", "no quota", "half a write, then no space"), ("no sync", "nothing")]
)
def test_a_server_lives_through_a_disk_that_fails_and_loses_nothing_by_a_crash(
    names: tuple[str, ...],
) -> None:
    with watched_disk() as watched:
        flags = ["--store", str(watched.root / "store")]
        with environment(watched.environment), echo_server(flags) as server:
            said = asyncio.run(live(watched, server.url, names))
            os.kill(server.pid, signal.SIGKILL)
            server.wait(timeout_s=60)
        done = watched.operations()
        campaign = Campaign(Decisions(1, *names), 0.02, 6, watch=labels_of, mess=with_any_memory)
        report = campaign.run(watched.inode, done, ServerHistory())
        assert not report.problems, report.problems[0]
        assert report.saw["a turn"]
        assert report.saw["a commit"]
        with echo_server(flags) as server:
            items = httpx.get(f"{server.url}/v1/sessions").json()["data"]
            found = httpx.get(f"{server.url}/v1/sessions/{items[0]['id']}/items").json()["data"]
        answers = [(item["id"], item["content"]) for item in found if item["role"] == "assistant"]
        assert answers == said


def test_a_command_on_a_full_disk_says_so_in_a_line_and_changes_nothing(tmp_path: Path) -> None:
    def sessions(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*PROGRAM, "sessions", *words, "--store", str(watched.root / "store")]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    with watched_disk() as watched:
        with echo_server(["--store", str(watched.root / "store")]) as server:
            httpx.post(f"{server.url}/v1/sessions", json={}).raise_for_status()
        held = sessions("list").stdout
        (name,) = [word for word in held.split() if word.startswith("s_")]
        assert sessions("export", name, "talk.json").returncode == 0
        for words in (("vacuum",), ("delete", name), ("import", "talk.json", "--id", "other")):
            with environment(watched.environment):
                watched.fail(errno.ENOSPC, {Kind.WRITE}, first=30)  # it is open by then
                refused = sessions(*words)
            assert watched.num_failed, words
            assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
            assert "full" in refused.stderr
            watched.forget()
            assert sessions("list").stdout == held, words


def test_a_server_that_ends_with_what_is_not_on_disk_says_so() -> None:
    lines: list[str] = []
    with watched_disk() as watched:
        flags = ["--store", str(watched.root / "store")]
        with (
            environment(watched.environment),
            echo_server(flags, on_line=lines.append) as server,
        ):
            for number in range(3):
                httpx.post(f"{server.url}/v1/sessions", json={"id": f"s{number}"})
            watched.fail(errno.ENOSPC, SPACE)
            for number in range(1, 3):
                turn = {"input_ids": [1, 2, 3], "sampling": {"max_tokens": 2}}
                url = f"{server.url}/v1/sessions/s{number}/turns"
                assert httpx.post(url, json=turn).json()["durable"] is False
            assert server.stop() == EXIT_UNWRITTEN
            watched.heal()
        (lost,) = [line for line in lines if "lost with this process" in line]
        assert "of 2 sessions" in lost
        assert f"{watched.root / 'store'}" in lost
        assert "ERROR" in lost
