"""What a user types at a terminal, against a real server."""

from __future__ import annotations

import json
import subprocess
import sys


def command(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "session_server", *argv],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_terminal_chat_remembers_and_shows_what_a_turn_cost(url: str) -> None:
    done = command("chat", "--url", url, stdin="My name is Ada.\nWhat is my name?\n/quit\n")
    assert done.returncode == 0, done.stderr
    second = done.stdout.split("you > ")[2]
    assert "Your name is Ada." in second
    assert "cached, 9 new)" in second


def test_a_chat_comes_back_to_a_session_that_is_still_open(url: str) -> None:
    opened = subprocess.run(
        [sys.executable, "-c", OPEN_AND_LEAVE, url], capture_output=True, text=True, check=True
    )
    session = opened.stdout.strip()
    done = command("chat", "--url", url, "--session", session, stdin="What is my name?\n/keep\n")
    assert "Your name is Bob." in done.stdout
    assert f"kept: {session}" in done.stdout
    done = command("chat", "--url", url, "--session", session, stdin="What is my name?\n")
    assert "goes on from 2 turns, " in done.stdout
    assert "you > What is my name?\n it > Your name is Bob.\n" in done.stdout
    assert done.stdout.count("Your name is Bob.") == 2
    assert f"kept: {session}" in done.stdout, "it was there before the chat"
    command("chat", "--url", url, "--session", session, stdin="/forget\n")
    again = command("chat", "--url", url, "--session", session, stdin="Hello?\n")
    assert again.returncode == 1, "the session was deleted"
    assert "session_not_found" in again.stdout
    assert "without --session a new session begins" in again.stdout


def test_the_auditor_finds_the_books_of_a_live_server_in_order(url: str) -> None:
    subprocess.run([sys.executable, "-c", OPEN_AND_LEAVE, url], check=True, capture_output=True)
    shown = command("audit", "--url", url, "--full")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "0 violations" in " ".join(shown.stdout.split()), "lines are as long as the terminal"
    found = json.loads(command("audit", "--url", url, "--json").stdout)
    assert found["memory"]["checks"]["runs"] > 0
    assert len(found["sessions"]) >= 1


def test_a_chat_without_a_server_says_so_without_a_stack() -> None:
    for url, words in (("nonsense", "http://HOST:PORT"), ("http://127.0.0.1:1", "serve")):
        done = command("chat", "--url", url)
        assert done.returncode == 1
        assert words in done.stdout
        assert "Traceback" not in done.stderr


def test_a_chat_with_a_server_of_its_own_says_that_both_end() -> None:
    done = command("chat", stdin="Hello.\n/keep\n")
    assert done.returncode == 0, done.stderr
    assert "kept" not in done.stdout
    assert "this conversation has ended with its server" in done.stdout
    assert "chat --url http://127.0.0.1:30000" in done.stdout


OPEN_AND_LEAVE = """
import asyncio, sys
from session_server.client import connect

async def main():
    session = await connect(sys.argv[1])
    await session.ask("My name is Bob.", sampling={"temperature": 0})
    print(session.session_id)
    await session.leave()

asyncio.run(main())
"""
