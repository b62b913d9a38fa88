"""The command line teaches: every command is listed, explained, and quick to ask about."""

from __future__ import annotations

import gc
import importlib
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

from session_server import cli
from session_server.core.sampling import MAX_OUTPUT_TOKENS
from session_server.flags import FLAGS, IGNORED_SWITCHES, IGNORED_VALUES
from session_server.foreign_flags import RENAMED_FLAGS, UNSUPPORTED_FLAGS


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


@pytest.mark.parametrize("words", [[], ["sing"], ["--loud"]])
def test_what_is_no_command_is_refused_with_a_hint(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert "usage: session-server" in done.stderr


def test_a_misspelt_command_is_told_which_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["srve"])
    assert "there is no 'srve'; did you mean serve?" in capsys.readouterr().err


def test_the_version_is_the_packages() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.strip()[0].isdigit()


def test_an_interrupt_while_a_command_is_imported_leaves_as_a_shell_expects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr(importlib, "import_module", interrupt)
    assert [cli.main(["serve"]), cli.main(["_engine", "0"])] == [130, 130]


def test_no_garbage_is_looked_for_while_a_command_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = list[bool]()

    def look(_name: str) -> ModuleType:
        looks.append(gc.isenabled())
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", look)
    assert [cli.main(["serve"]), cli.main(["_engine", "0"])] == [130, 130]
    assert (looks, gc.isenabled()) == ([False, False], True)


def test_a_reader_that_leaves_is_no_traceback() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    code = "from session_server import cli; cli._run = print; raise SystemExit(cli.main(['x']))"
    command = [sys.executable, "-c", code]
    with os.fdopen(theirs, "w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a file that is always full")
def test_a_disk_that_has_no_room_for_the_output_is_no_traceback() -> None:
    command = [sys.executable, "-m", "session_server", "--version"]
    with open("/dev/full", "w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, check=False
        )
    told = "session-server: what it prints cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_the_server_side_starts_without_torch() -> None:
    code = "import sys, session_server.wiring; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_engines_process_begins_to_start_before_the_web_framework_is_imported() -> None:
    late = "{'fastapi', 'uvicorn', 'session_server.engine.engine', 'torch'}"
    code = f"import sys, session_server.serve; print({late} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("words", "explain_unknown_flags"),
    [
        ("serve --nope", "unrecognized argument --nope"),
        ("serve --hots ::1", "unrecognized argument --hots; did you mean --host?"),
        ("chat --urll=x", "unrecognized argument --urll; did you mean --url?"),
        ("chat extra", "unrecognized arguments: extra"),
        (
            "serve dir/of/model",
            "unrecognized arguments: dir/of/model; pass a checkpoint as --model-path dir/of/model",
        ),
        ("chat --tp 2", "unrecognized argument --tp"),
        (
            "serve --pp 2",
            "--pp is not supported, because a model is split by --tensor-parallel-size alone",
        ),
        ("serve --max-model-len=8", "--max-model-len is called --context-length here"),
        ("audit --limit -1", "argument --limit: expected a whole number at least 0, got '-1'"),
        (
            "demo --turns two",
            "argument --turns: expected a whole number between 1 and 4096, got 'two'",
        ),
        (
            "doctor --port x",
            "argument --port: expected a whole number between 0 and 65535, got 'x'",
        ),
        (
            "chat --temperature hot",
            "argument --temperature: expected a number between 0 and 100, got 'hot'",
        ),
        (
            "chat --temperature nan",
            "argument --temperature: expected a number between 0 and 100, got 'nan'",
        ),
        (
            "chat --max-tokens 0",
            f"argument --max-tokens: expected a whole number between 1 and {MAX_OUTPUT_TOKENS}, "
            "got '0'",
        ),
        ("sessions lst", "argument ACTION: there is no 'lst'; did you mean list?"),
        ("keys zzz", "argument ACTION: there is no 'zzz'; there are add, list, revoke"),
    ],
)
def test_what_a_command_does_not_take_is_answered_with_the_reason_first(
    words: str, explain_unknown_flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *_ = words.split()
    with pytest.raises(SystemExit) as left:
        cli.main(words.split())
    assert left.value.code == 2
    reason, usage, advice = capsys.readouterr().err.splitlines()
    assert reason == f"session-server {command}: {explain_unknown_flags}"
    assert usage.startswith(f"usage: session-server {command} ")
    assert advice.startswith(f"`session-server {command} --help`")


def test_a_session_to_resume_needs_the_server_that_has_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["chat", "--session", "s_gone"]) == 2
    told = "session-server chat: --session needs --url http://HOST:PORT of its server\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("kept --turns 30", "--turns is a flag of `bench sessions`"),
        ("memory-check --plot x.png", "--plot is a flag of `bench peers` and `bench sessions`"),
        ("sessions --turns 21", "--turns 21: 22 to 10000"),
        ("sessions --turns 10001", "--turns 10001: 22 to 10000"),
        ("kept --short", "--short is a flag of `bench peers`"),
        ("drafts --llama-server x", "--llama-server is a flag of `bench peers`"),
        ("peers --rounds 2", "--rounds 2: 3 or more, for a median"),
        ("peers --threads 0", "--threads 0: 1 or more"),
        (
            "peers --llama-server nowhere",
            "--llama-server nowhere: not a program; name llama.cpp's server",
        ),
        ("peers --model 7b", "--model 7b: not one of 100m, 0.6b, nor a checkpoint's directory"),
        ("kept --sessions 9", "--sessions is a flag of `bench tiers`"),
        (
            "kept --model 100m",
            "--model is a flag of `bench peers` and `bench roles` and `bench store` and "
            "`bench tiers`",
        ),
        (
            "tiers --sessions 20",
            "--resident 20 --sessions 20: at least 1, and fewer than all",
        ),
        (
            "tiers --compared 20",
            "--compared 20: more than --resident 20, which are not computed again, and at most"
            " --sessions 200",
        ),
        ("tiers --host-mib 0", "--host-mib 0: 1 or more, KV goes to disk by way of it"),
        ("tiers --model 100m 0.6b", "--model 100m 0.6b: `bench tiers` measures one"),
        (
            "store --model 7b",
            "--model 7b: neither one of 100m, 0.6b nor a directory with a config.json",
        ),
        (
            "tiers --model 7b",
            "--model 7b: neither one of 100m, 0.6b nor a directory with a config.json",
        ),
    ],
)
def test_a_benchmark_refuses_flags_that_it_would_not_use(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words.split()]) == 2
    assert capsys.readouterr().err == f"session-server bench: {reason}\n"


def test_every_unknown_flag_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--quantization", "fp8", "--chat-template", "x", "--loud"])
    lines = capsys.readouterr().err.splitlines()
    assert "--quantization is not supported, because the format of weights" in lines[0]
    assert lines[1].startswith("  --chat-template is not supported, because it is part of")
    assert lines[2] == "  unrecognized argument --loud"


def test_flags_of_other_servers_are_none_of_ours_and_lead_to_some_of_ours() -> None:
    ours = {name for flag in FLAGS for name in flag.names}
    ours |= {*IGNORED_SWITCHES, *IGNORED_VALUES}
    assert not ours & (UNSUPPORTED_FLAGS.keys() | RENAMED_FLAGS.keys())
    assert not UNSUPPORTED_FLAGS.keys() & RENAMED_FLAGS.keys()
    assert set(RENAMED_FLAGS.values()) <= ours


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_says_the_purpose_in_a_line_and_shows_examples(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    usage, _, purpose, *_ = text.splitlines()
    assert usage.startswith(f"usage: session-server {name} ")
    assert purpose.endswith(".")
    assert len(re.findall(rf"^  session-server {name}\b", text, re.MULTILINE)) >= 2
    groups = set(re.findall(r"^[a-z ]+:$", text, re.MULTILINE))
    assert groups - {"options:", "examples:", "positional arguments:"}
    assert max(map(len, text.splitlines())) <= 80
    assert "MemoryCheck" not in text
