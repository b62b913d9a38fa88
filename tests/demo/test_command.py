"""The demo does what the README says: real processes, real sockets, every answer judged."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from session_server.client import ClientOptions, connect
from session_server.demo.command import _judge
from session_server.local_server import LocalServer


@pytest.mark.timeout(280)
def test_the_demo_holds_and_says_so_as_json() -> None:
    command = [sys.executable, "-m", "session_server", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(done.stdout)

    assert report["num_sessions"] >= 8
    assert report["num_turns"] >= 48
    assert report["right_share"] >= 0.99
    assert report["ledger_flushed"]["check_violations"] == 0
    assert report["ledger_flushed"]["check_runs"] > 0
    assert report["ledger_open"]["held"] > 0, "parked sessions held their KV"
    assert report["pages_back"]
    flushed = report["ledger_flushed"]
    assert flushed["free"] + flushed["reserved"] == flushed["pages"]
    assert not report["errors"]
    for turn in report["turns"]:
        assert turn["new_tokens"] == turn["input_tokens"] - turn["cached_tokens"] > 0
        if turn["turn"] == 0:
            assert turn["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("http://127.0.0.1:9", "is a server running there?"),
        ("127.0.0.1:9", "give one as http://HOST:PORT"),
    ],
)
def test_a_server_that_is_not_there_is_an_error_that_says_so(url: str, advice: str) -> None:
    words = ["demo", "--url", url, "--sessions", "1", "--turns", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "session_server", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "could not run" in done.stdout
    assert advice in " ".join(done.stdout.split())


async def leave_a_session(url: str) -> None:
    session = await connect(url, options=ClientOptions(token="sesame"))
    await session.ask("My name is Bob.", sampling={"temperature": 0})
    await session.leave()


def test_a_server_with_a_key_is_shown_one_or_the_flag_is_named() -> None:
    words = [sys.executable, "-m", "session_server", "demo", "--sessions", "1", "--turns", "1"]
    with LocalServer(["--api-key", "sesame"]) as server:
        asyncio.run(leave_a_session(server.url))
        words += ["--url", server.url]
        refused, welcome = (
            subprocess.run([*words, *more], capture_output=True, text=True, check=False)
            for more in ([], ["--api-key", "sesame"])
        )
    assert refused.returncode == 1
    assert "--api-key" in refused.stdout
    assert welcome.returncode == 0, welcome.stdout
    assert "pages all back" in welcome.stdout, "what others hold is not the demo's"
    assert "tree emptied" not in welcome.stdout, "their cache is not the demo's to empty"


@pytest.mark.parametrize(("held_after", "is_back"), [(7, True), (8, False)])
def test_pages_of_others_may_stay_and_the_demos_may_not(*, held_after: int, is_back: bool) -> None:
    ledgers = {
        moment: {"held": held, "check_runs": 1, "check_violations": 0}
        for moment, held in (("ledger_start", 7), ("ledger_closed", held_after))
    }
    judged = _judge([], [], 1, ledgers)
    assert judged["pages_back"] == is_back
