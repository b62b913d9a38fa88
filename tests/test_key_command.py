"""`session-server keys`: keys are made, listed and revoked, and shown once."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from session_server import cli
from session_server.core.owner import KEY_FILE_VARIABLE
from session_server.web.key_file import digest_of


def keys(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(["keys", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_key_is_shown_once_and_alone_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    status, key, told = keys(capsys, "add", "alice", "share=0.2", "--file", str(path))
    assert (status, key.count("\n")) == (0, 1)
    digest = digest_of(key.strip())[:12]
    first, how = told.splitlines()
    assert first == f"added alice {digest} share=0.2 to {path}; the key is shown this once"
    assert "`Authorization: Bearer KEY`" in how
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(path))
    status, table, _ = keys(capsys, "list")
    assert status == 0
    *_, head, _, row, _ = (line.split() for line in table.splitlines())
    assert head == ["name", "digest", "added", "options"]
    assert (row[0], row[1], row[3]) == ("alice", digest, "share=0.2")
    assert key.strip() not in table
    assert keys(capsys, "revoke", digest) == (
        0,
        f"revoked alice {digest}\n",
        "that was the last key of alice: a server that runs with this file deletes its sessions,"
        " responses and conversations\n"
        "no key is left: nobody gets in, and no server starts with it\n",
    )


def test_words_may_stand_behind_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ("--file", str(tmp_path / "keys"))
    assert keys(capsys, "add", *file, "alice", "share=0.2")[0] == 0
    assert keys(capsys, "add", "bob", *file, "share=0.1")[2].startswith("added bob ")
    assert keys(capsys, "revoke", *file, "alice")[1].startswith("revoked alice ")


def test_what_is_deleted_with_the_last_key_of_a_name_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ("--file", str(tmp_path / "keys"))
    _, key, _ = keys(capsys, "add", "alice", *file)
    for name in ("alice", "bob"):
        keys(capsys, "add", name, *file)
    assert keys(capsys, "revoke", digest_of(key.strip())[:12], *file)[2] == ""
    told = keys(capsys, "revoke", "alice", *file)[2]
    assert told.startswith("that was the last key of alice: ")
    assert told.count("\n") == 1
    nameless = digest_of("sk-a"), digest_of("sk-b")
    with (tmp_path / "keys").open("a") as written:
        written.writelines(f"sha256:{digest}\n" for digest in nameless)
    told = keys(capsys, "revoke", nameless[0][:12], *file)[2]
    assert told.startswith("that was its owner's only key: ")


def test_what_the_file_refuses_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent")
    makes_one = f"session-server keys add NAME --file {absent} makes one"
    told = f"session-server keys: the key file {absent}: No such file or directory; {makes_one}\n"
    for words in (("list",), ("revoke", "alice")):
        assert keys(capsys, *words, "--file", absent) == (1, "", told)


def test_a_file_that_cannot_be_written_is_told_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    for parent in (tmp_path / "no", path):
        path.touch()
        told = f"{parent} is no directory: make it, or pass another --file"
        for words in (("add", "alice"), ("revoke", "alice")):
            refused = keys(capsys, *words, "--file", str(parent / "keys"))
            assert refused == (1, "", f"session-server keys: {told}\n")
    for number, told in (
        (errno.EACCES, f"it is replaced, so you must be allowed to write {tmp_path}"),
        (errno.ENOSPC, "No space left on device; it is as it was"),
    ):
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(tempfile, "mkstemp", Mock(side_effect=error))
        refused = keys(capsys, "add", "alice", "--file", str(path))
        assert refused == (1, "", f"session-server keys: cannot write {path}: {told}\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("add",), "add takes NAME"),
        (("revoke",), "revoke takes NAME or DIGEST"),
        (("revoke", "a", "b"), "revoke takes NAME or DIGEST"),
        (("list", "a"), "list takes no name"),
        (("add", "a", "--all"), "--all is a flag of `revoke`"),
        (("add", "a b"), "'a b' is no name: letters, digits and _ . - make one"),
        (("add", "a", "share=7"), "'share=7': share must be above 0 and at most 1"),
        (("add", "a", "admin=yes"), "'admin=yes': admin must be 0 or 1"),
    ],
)
def test_arguments_that_are_wrong_are_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert keys(capsys, *words, "--file", "x") == (2, "", f"session-server keys: {told}\n")


def test_only_the_action_is_always_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["keys"])
    assert "are required: ACTION\n" in capsys.readouterr().err


def test_the_file_has_to_be_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)
    told = f"session-server keys: pass --file FILE, or set {KEY_FILE_VARIABLE}\n"
    assert keys(capsys, "list") == (2, "", told)
