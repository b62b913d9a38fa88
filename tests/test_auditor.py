"""The auditor reads books and says what is off."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps
from threading import Thread
from typing import Any

import msgspec
import pytest
from rich.console import Console

from session_server import auditor
from session_server.auditor import imbalances
from session_server.core.events import ACCOUNTS, TierReport


def pool(**accounts: int) -> dict[str, int]:
    return {"pages": 10, "page_size": 16, **dict.fromkeys(ACCOUNTS, 0), "free": 10} | accounts


def memory(*, violations: int = 0, **accounts: int) -> dict[str, Any]:
    held = {
        "session_id": "s_1",
        "state": "PARKED",
        "tokens": 40,
        "committed_len": 39,
        "protected_pages": {"full": 2},
        "private_pages": {"full": 1},
    }
    return {
        "pools": {"full": pool(**accounts)},
        "rows": 4,
        "rows_free": 3,
        "sessions": [held],
        "checks": checks(violations),
        "tiers": msgspec.to_builtins(TierReport(spilled_tokens=20, host_bytes=3 << 20)),
    }


def checks(violations: int) -> dict[str, Any]:
    return {
        "runs": 7,
        "levels": {"0": 4, "1": 2, "2": 1, "3": 0},
        "violations": violations,
        "recent": ["a page has two holders"] * violations,
        "quarantined_sessions": ["s_2"] * violations,
        "rebuilds": violations,
        "reprefill_tokens": 0,
        "probes": 3,
        "last_probe_ago_s": 7.4,
        "cost_share": 0.0042,
    }


@pytest.mark.parametrize(
    ("books", "words"),
    [
        (memory(), []),
        (memory(free=9), ["add up to 9"]),
        (memory(free=9, quarantine=1), ["1 pages are quarantined"]),
        (
            memory(violations=2),
            ["2 violations", "two holders", "two holders", "s_2, s_2", "rebuilt 2 times"],
        ),
    ],
)
def test_what_is_off_is_said_in_words(books: dict[str, Any], words: list[str]) -> None:
    problems = imbalances(books)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


@pytest.fixture
def served() -> Iterator[tuple[str, dict[str, Any]]]:
    """A server that answers what the test puts into the dictionary."""
    answers: dict[str, Any] = {}
    refusal = {"type": "x", "code": "x", "message": "a sentence " * 9, "param": None}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            status = 200 if found is not None else 404
            wants_key = "key" in answers and self.headers["Authorization"] != answers["key"]
            self.send_response(401 if wants_key else status)
            self.end_headers()
            self.wfile.write(dumps(found or {"error": refusal}).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", answers
    server.shutdown()
    thread.join()
    server.server_close()


def audit(url: str, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    auditor.add_arguments(parser)
    return auditor.run(parser.parse_args(["--url", url, *flags]))


@pytest.mark.parametrize("flags", [[], ["--json"], ["--full"]])
def test_balanced_books_are_shown_and_good(
    served: tuple[str, dict[str, Any]], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    url, answers = served
    answers["/v1/admin/memory"] = memory()
    answers["/v1/admin/sessions"] = {"data": [{"id": "s_1", "session_id": "mine", "turns": 3}]}
    assert audit(url, *flags) == 0
    shown = capsys.readouterr().out
    if "--json" in flags:
        assert "s_1" in shown
    else:
        assert "mine" in shown
        assert "s_1" not in shown
        assert "checks: 4 of accounts, 2 of sessions, 1 recounts, 0 page probes" in shown
        line = "0 violations, 0.42% of the time the engine worked, the last probe 7 s ago"
        assert line in shown


def test_books_that_are_off_are_an_exit_status(served: tuple[str, dict[str, Any]]) -> None:
    url, answers = served
    answers["/v1/admin/memory"] = memory(violations=1)
    answers["/v1/admin/sessions"] = {"data": []}
    assert audit(url) == 1


def test_a_refusal_and_a_dead_address_are_errors_and_not_tracebacks(
    served: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = served
    assert audit(url) == 1
    assert capsys.readouterr().out == "404: " + "a sentence " * 9 + "\n", "no JSON, no line breaks"
    assert audit("http://127.0.0.1:1") == 1
    assert "no answer" in capsys.readouterr().out
    assert audit("127.0.0.1:30000") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "give one as http://HOST:PORT" in said
    assert "is a server running" not in said


def test_a_server_that_asks_for_a_key_gets_one_or_the_flag_is_named(
    served: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, answers = served
    answers |= {"key": "Bearer k", "/v1/admin/memory": memory(), "/v1/admin/sessions": {"data": []}}
    assert audit(url) == 1
    assert "pass --api-key" in capsys.readouterr().out
    assert audit(url, "--api-key", "bad") == 1
    said = capsys.readouterr().out
    assert "does not know the key" in said
    assert "pass --api-key" not in said
    assert audit(url, "--api-key", "k") == 0


def test_tables_of_a_large_server_fit_into_eighty_columns() -> None:
    pools = {
        name: pool() | dict.fromkeys(ACCOUNTS, 12_345_678) for name in ("full", "window", "state")
    }
    held = memory()["sessions"][0] | {
        "session_id": f"s_{'0123456789abcdef' * 2}",
        "tokens": 131_072,
        "committed_len": 131_071,
        "protected_pages": {"full": 8_192},
        "private_pages": {"full": 128},
    }
    sessions = [{"id": held["session_id"], "turns": 12_345}]
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(auditor.pool_table(pools))
    console.print(auditor.session_table([held], sessions, 20))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if held["session_id"] in line)
    assert row.split()[1:] == ["parked", "131072", "131071", "8192", "+", "128", "12345"]
    assert any("session " in line and "turns" in line for line in lines)
