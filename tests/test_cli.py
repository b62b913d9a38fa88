"""The command line teaches: every command is listed, explained, and quick to ask about."""

from __future__ import annotations

import subprocess
import sys

import pytest

from session_server import cli


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "session_server", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_names_every_command_and_first_steps() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name, command in cli.COMMANDS.items():
        assert name in done.stdout
        assert command.summary.split()[0] in done.stdout
    assert "first steps" in done.stdout


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_each_command_explains_itself(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 5


@pytest.mark.parametrize("words", [[], ["sing"], ["--loud"]])
def test_what_is_no_command_is_refused_with_a_hint(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert "usage: session-server" in done.stderr


def test_the_version_is_the_packages() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.strip()[0].isdigit()


def test_the_server_side_starts_without_torch() -> None:
    code = "import sys, session_server.wiring; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("serve --nope", "unrecognized arguments: --nope"),
        ("audit --limit -1", "argument --limit: a whole number, at least 0; got '-1'"),
        ("bench mla --turns 3", "argument --turns: a whole number, between 22 and 10000; got '3'"),
        ("demo --turns two", "argument --turns: a whole number, between 1 and 4096; got 'two'"),
        ("doctor --port x", "argument --port: a whole number, between 0 and 65535; got 'x'"),
    ],
)
def test_what_a_command_does_not_take_is_answered_with_its_usage(
    words: str, complaint: str
) -> None:
    command, *_ = words.split()
    done = run(*words.split())
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: session-server {command}")
    assert done.stderr.endswith(f"session-server {command}: error: {complaint}\n")
