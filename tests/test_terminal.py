"""What others have written is printed, and commands no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from session_server.local_server import ServerFailed
from session_server.terminal import make_table, print_failure, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc é 🙂 \\x", "a\tb\nc é 🙂 \\x"),
        ("\x1b[2J\x07\r\x7f\x00", "\\x1b[2J\\x07\\r\\x7f\\x00"),
        ("\x9b2J\u202eabc\u2066\ud800", "\\x9b2J\\u202eabc\\u2066\\ud800"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_tables_and_failures_print_no_escape() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    console.print(make_table(("text",), [("a\x1b]0;title\x07b",)]))
    print_failure(ServerFailed("said \x1b[2J"), console, key=None)
    assert isinstance(console.file, io.StringIO)
    told = console.file.getvalue()
    assert "\x1b" not in told
    assert "a\\x1b]0;title\\x07b" in told
    assert "said \\x1b[2J" in told
