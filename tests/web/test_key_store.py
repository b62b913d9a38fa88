"""Files of keys are rewritten as a whole: digests only, comments kept, nothing lost to a race."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from session_server.web import key_store
from session_server.web.key_file import InvalidKeys, digest_of, lines_of
from session_server.web.key_store import NoSuchKey, add_key, added_dates, revoke_keys, short_digest
from session_server.web.keys import key_sources

TODAY = "2026-11-24"


def names_in(path: Path) -> list[str | None]:
    return [line.name for line in lines_of(path.read_text("utf-8"), "")]


def test_a_new_key_is_in_a_private_file_as_its_digest_only(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key, line = add_key(path, "alice", ("share=0.2",), today=TODAY)
    assert key.startswith("sk-")
    assert len(key) >= 3 + 256 / 6, "bits, of characters with six each"
    assert (line.name, line.digest, line.options) == ("alice", digest_of(key), ("share=0.2",))
    text = path.read_text("utf-8")
    assert key not in text
    assert f"# alice ({short_digest(digest_of(key))}) added {TODAY}\nalice sha256:" in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (
        key_sources(given=None, environment=None, path=path)
        .ring()
        .credential_of(key)
        .owner.owner_id
        == "name:alice"
    )
    assert added_dates(text) == {short_digest(digest_of(key)): TODAY}
    assert [each.name for each in tmp_path.iterdir()] == ["keys"], "nothing is left beside it"


def test_comments_order_and_permissions_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "keys", tmp_path / "link"
    before = "# ours\n\nbob a-key-of-bob  share=0.3\n  # why\nalone-key-1"
    path.write_text(before, "utf-8")
    path.chmod(0o640)
    link.symlink_to(path)
    _, line = add_key(link, "alice", (), today=TODAY)
    assert path.read_text("utf-8").startswith(before + "\n# alice (")
    revoke_keys(link, "alice", all_of_name=False, today=TODAY)
    noted = f"# alice ({short_digest(line.digest)}) revoked {TODAY}\n"
    assert path.read_text("utf-8") == f"{before}\n{noted}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert link.is_symlink()


def test_a_second_key_of_a_name_has_the_options_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, "alice", ("share=0.2", "admin=1"), today=TODAY)
    _, line = add_key(path, "alice", (), today=TODAY)
    assert line.options == ("share=0.2", "admin=1")
    text = path.read_text("utf-8")
    with pytest.raises(InvalidKeys, match=r"alice has share=0\.2 admin=1 in line 3, and all"):
        add_key(path, "alice", ("share=0.3",), today=TODAY)
    assert path.read_text("utf-8") == text


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("x y", (), "'x y' is no name"),
        ("", (), "'' is no name"),
        ("#x", (), "'#x' is no name"),
        ("x\n", (), "is no name"),
        ("x" * 65, (), "is no name"),
        ("x", ("y",), "'y' is no option"),
        ("x", ("share=1 admin=1",), "is no option"),
        ("x", ("share=2",), "^'share=2': share must be above 0 and at most 1$"),
        ("x", ("max_bytes=0",), r"^'max_bytes=0': max_bytes must be an integer in \[1, "),
        ("x", ("share=1", "shares=1"), "^'shares=1' is no option: each is NAME=VALUE, of max_pri"),
        ("x", ("share=1", "share=0.5"), "^share is given twice$"),
        ("x", ("sha256:ff",), "is no option"),
    ],
)
def test_what_no_line_could_say_is_refused_and_makes_no_file(
    tmp_path: Path, name: str, options: tuple[str, ...], told: str
) -> None:
    with pytest.raises(InvalidKeys, match=told):
        add_key(tmp_path / "keys", name, options, today=TODAY)
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_revoked_by_its_name_or_the_beginning_of_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for name in ("alice", "bob", "carol"):
        add_key(path, name, (), today=TODAY)
    lines = {line.name: line for line in lines_of(path.read_text("utf-8"), "")}
    assert revoke_keys(path, "bob", all_of_name=False, today=TODAY)[0].name == "bob"
    prefix = "sha256:" + lines["alice"].digest[:6]
    assert revoke_keys(path, prefix, all_of_name=False, today=TODAY)[0].name == "alice"
    assert names_in(path) == ["carol"]
    for unknown in ("bob", "dave", lines["alice"].digest, lines["carol"].digest[:3], ""):
        with pytest.raises(NoSuchKey, match="no key has this name"):
            revoke_keys(path, unknown, all_of_name=False, today=TODAY)
    revoke_keys(path, "carol", all_of_name=False, today=TODAY)
    assert names_in(path) == []
    add_key(path, "erin", (), today=TODAY)
    assert names_in(path) == ["erin"]


def test_what_means_several_keys_revokes_none_unless_all_of_a_name_are_meant(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys"
    digests = ("abcd" + "0" * 60, "abcd" + "1" * 60, "abcd" + "2" * 60)
    path.write_text("".join(f"{n} sha256:{d}\n" for n, d in zip("aab", digests, strict=True)))
    for meant, is_all in (("a", False), ("abcd", False), ("abcd", True)):
        with pytest.raises(NoSuchKey, match=r"more than one key is meant, a abcd00.*--all"):
            revoke_keys(path, meant, all_of_name=is_all, today=TODAY)
    assert len(revoke_keys(path, "a", all_of_name=True, today=TODAY)) == 2
    assert names_in(path) == ["b"]


def test_a_malformed_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a b secret\n", "utf-8")
    with pytest.raises(InvalidKeys, match="line 1: expected"):
        add_key(path, "alice", (), today=TODAY)
    assert path.read_text("utf-8") == "a b secret\n"


def test_a_file_that_cannot_be_written_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    add_key(path, "alice", (), today=TODAY)
    before = path.read_text("utf-8")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        add_key(path, "bob", (), today=TODAY)
    assert path.read_text("utf-8") == before
    assert len(list(tmp_path.iterdir())) == 1


def test_keys_that_are_added_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with ThreadPoolExecutor(8) as pool:
        adding = [pool.submit(add_key, path, f"n{i}", (), today=TODAY) for i in range(24)]
        keys = [each.result()[0] for each in adding]
    ring = key_sources(given=None, environment=None, path=path).ring()
    assert {ring.credential_of(key).owner.owner_id for key in keys} == {
        f"name:n{i}" for i in range(24)
    }


def test_a_file_gets_no_more_keys_than_a_server_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("session_server.web.key_file.MAX_KEYS", 2)
    path = tmp_path / "keys"
    for name in ("a", "b"):
        add_key(path, name, (), today=TODAY)
    with pytest.raises(InvalidKeys, match="more than 2 keys"):
        add_key(path, "c", (), today=TODAY)
    assert names_in(path) == ["a", "b"]
    assert key_store.KEY_RANDOM_BYTES * 8 == 256
