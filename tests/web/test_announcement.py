"""What a server says when it listens: one line to a program, the next steps to a person."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest

from session_server import cli
from session_server.core.child_process import PROGRAM
from session_server.web.server import announce

URL = "http://127.0.0.1:30000"


class Terminal(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


def test_a_program_gets_the_one_line_that_it_waits_for() -> None:
    out = io.StringIO()
    announce(URL, out, needs_key=False, kept_in=None)
    assert out.getvalue() == f"listening on {URL}\n"


def test_the_line_is_one_write() -> None:
    """The log may go to the same pipe, and would come between a line and its end."""
    writes: list[str] = []

    class Pipe(io.StringIO):
        def write(self, text: str, /) -> int:
            writes.append(text)
            return len(text)

    announce(URL, Pipe(), needs_key=False, kept_in=None)
    assert writes == [f"listening on {URL}\n"]


@pytest.mark.parametrize("needs_key", [False, True])
def test_a_person_gets_the_next_steps_as_they_can_be_typed(*, needs_key: bool) -> None:
    out = Terminal()
    announce(URL, out, needs_key=needs_key, kept_in=Path("/kept") if needs_key else None)
    first, *steps = out.getvalue().splitlines()
    assert first == f"listening on {URL}"
    commands = [shlex.split(step[17:]) for step in steps[:3]]
    for words in commands[:2]:
        if needs_key:  # in the environment, which ps does not show
            assert words.pop(0) == "SESSION_SERVER_API_KEY=KEY"
        assert words[: len(PROGRAM)] == list(PROGRAM)
        assert words[len(PROGRAM)] in cli.COMMANDS
    assert commands[2][0] == "curl"
    assert commands[2][1] == f"{URL}/v1/sessions"
    assert ("authorization: Bearer KEY" in commands[2]) == needs_key
    assert (steps[3].split()[1:4] == ["are", "kept", "in"]) == needs_key
