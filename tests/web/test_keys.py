"""API keys: where they come from, what is refused, and whose sessions they open."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from session_server import flags, wiring
from session_server.arguments import add_server
from session_server.config import HttpOptions, Settings
from session_server.core.commands import SubmitTurn
from session_server.core.errors import Unauthorized
from session_server.core.owner import ANONYMOUS, KEY_VARIABLE, Owner, TenantLimits
from session_server.local_server import LocalServer
from session_server.serving import serve
from session_server.sessions.budget import RESERVED_PART
from session_server.sessions.quotas import QuotaLimits
from session_server.web import key_file
from session_server.web.app import ADMIN_ROUTERS
from session_server.web.key_file import (
    LIMITS,
    MAX_KEY_CHARS,
    MAX_LIMIT,
    InvalidKeys,
    digest_of,
    is_readable_by_all,
)
from session_server.web.keys import (
    SHARE_OF_MANY,
    KeyRing,
    KeySources,
    key_sources,
)
from session_server.web.requests import PUBLIC_ROUTES
from session_server.wiring import check_exposure, load_keys
from tests.web.serving import DEADLINE_S, serving, turn


def ring_of(path: Path, text: str) -> KeyRing:
    path.write_text(text, "utf-8")
    return key_sources(given=None, environment=None, path=path).ring()


def test_without_keys_everybody_is_the_same_owner() -> None:
    ring = key_sources(given=None, environment=None, path=None).ring()
    assert ring.is_open
    assert ring.credential_of(None).owner == ring.credential_of("anything").owner == ANONYMOUS


def test_keys_come_from_the_command_line_the_environment_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n", "utf-8")
    ring = key_sources(given="two", environment="three", path=path).ring()
    assert not ring.is_open
    for key in ("one", "two", "three"):
        assert ring.credential_of(key).owner == Owner(digest_of(key))
    for key in (None, "", "four", "one ", "x" * (MAX_KEY_CHARS + 1)):
        with pytest.raises(Unauthorized):
            ring.credential_of(key)


def test_a_file_has_comments_names_and_digests(tmp_path: Path) -> None:
    ring = ring_of(
        tmp_path / "keys",
        f"# ours\n\n  alice   first \nalice sha256:{digest_of('second')}\n"
        f"sha256:{digest_of('third')}\nbob\n",
    )
    assert (
        ring.credential_of("first").owner
        == ring.credential_of("second").owner
        == Owner("name:alice")
    )
    assert ring.credential_of("third").owner == Owner(digest_of("third"))
    assert ring.credential_of("bob").owner == Owner(digest_of("bob")), "one word is a key"
    with pytest.raises(Unauthorized):
        ring.credential_of(f"sha256:{digest_of('third')}")


def test_a_file_has_as_many_keys_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "MAX_KEYS", 3)
    for number in (2, 3):
        ring = ring_of(tmp_path / "keys", "\n".join(f"k{n}" for n in range(number)))
        assert ring.credential_of(f"k{number - 1}").owner == Owner(digest_of(f"k{number - 1}"))
    with pytest.raises(InvalidKeys, match="more than 3 keys"):
        ring_of(tmp_path / "keys", "k0\nk1\nk2\nk3")


def test_a_key_of_many_lines_counts_with_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_file, "MAX_KEYS", 3)
    for num_lines in (2, 3):
        assert len(key_file.grants_of("short\n" * num_lines, "f")) == 1
    caplog.clear()
    with pytest.raises(InvalidKeys, match="more than 3 keys"):
        key_file.grants_of("short\n" * 1000, "f")
    assert len(caplog.messages) == 4, "what comes behind is not looked at"


def test_what_is_kept_of_keys_shows_none(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "keys", "alice s3cret\n")
    assert "s3cret" not in repr(vars(ring))


def test_the_longest_key_is_one(tmp_path: Path) -> None:
    longest = "k" * MAX_KEY_CHARS
    assert ring_of(tmp_path / "keys", longest).credential_of(longest).owner == Owner(
        digest_of(longest)
    )
    with pytest.raises(InvalidKeys, match="1 to 512"):
        ring_of(tmp_path / "keys", longest + "k")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it contains no key"),
        ("# none\n\n", "it contains no key"),
        ("good\na b secret\n", "line 2: expected"),
        ("b@d secret\n", "line 1: expected"),
        ("alice \x01secret\n", "line 1: a key has"),
        ("secr\u00e9t-secret\n", "line 1: a key has"),
        ("sha256:secret\n", "line 1: sha256: must be followed by"),
        ("secret-of-alice #old\n", "line 1: a key cannot begin with #"),
        ("alice #secret max_priority=5\n", "line 1: a key cannot begin with #"),
        ("alice secret\nbob secret\n", "line 2: this key already has another owner"),
        (
            "alice secret\n\nalice secret2 share=0.1\n",
            "line 3: this name has other options in line 1",
        ),
        ("alice secret\nalice secret2 admin=1\n", "line 2: this name has other options in line 1"),
    ],
)
def test_a_bad_file_is_refused_by_line_and_shows_no_key(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(InvalidKeys, match=told) as refused:
        ring_of(tmp_path / "keys", text)
    assert "secret" not in str(refused.value)


def test_a_key_so_short_that_it_may_be_a_name_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`alice max_priority=5` is a line without its key."""
    path = tmp_path / "keys"
    ring_of(path, f"alice 12345678\nsha256:{digest_of('k')}\n")
    assert caplog.messages == []
    ring = ring_of(path, "12345678\nalice max_priority=5\n1234567 share=0.1\n")
    assert ring.credential_of("alice").owner.max_priority == 5
    told = "a short key; or is it a name, and its key is missing?"
    assert caplog.messages == [f"{path}, line {number}: {told}" for number in (2, 3)]


def test_a_file_is_as_large_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "MAX_FILE_BYTES", 20)
    for num_bytes in (19, 20):
        ring_of(tmp_path / "keys", "a-long-key".ljust(num_bytes))
    with pytest.raises(InvalidKeys, match="more than 20 bytes"):
        ring_of(tmp_path / "keys", "a-long-key".ljust(21))


def change(ring: KeyRing, sources: KeySources, text: str) -> None:
    ring.apply(ring.change_to(sources.owners(text, may_be_none=True)))


def test_keys_are_replaced_and_an_owner_that_stays_is_granted_what_its_line_says(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys"
    path.write_text("alice old-key share=0.2\nbob bobs-key\n", "utf-8")
    sources = key_sources(given=None, environment="of-the-environment", path=path)
    ring = sources.ring()
    alice, bob = ring.credential_of("old-key"), ring.credential_of("bobs-key")
    of_environment = ring.credential_of("of-the-environment")
    change(ring, sources, "alice new-key share=0.3 max_priority=4\nbobs-key\n")
    assert ring.credential_of("new-key").owner is alice.owner, "sessions hold it"
    assert (alice.owner.share, alice.owner.max_priority) == (0.3, 4)
    assert [ring.has(each) for each in (alice, bob, of_environment)] == [False, False, True]
    assert [ring.has_owner(each.owner) for each in (alice, bob)] == [True, False]
    assert ring.credential_of("bobs-key").owner == Owner(digest_of("bobs-key")), (
        "without a name it is another"
    )


@pytest.mark.parametrize("num_kept", [1, 100])
def test_a_change_is_applied_without_a_look_at_the_owners_that_stay(
    tmp_path: Path, num_kept: int
) -> None:
    """The event loop waits meanwhile, and there may be ten thousand of them."""
    path = tmp_path / "keys"
    kept = "".join(f"kept{n} key-of-{n}\n" for n in range(num_kept))
    path.write_text(f"{kept}alice alices-key\nbob bobs-key\n", "utf-8")
    sources = key_sources(given=None, environment=None, path=path)
    ring = sources.ring()
    staying = ring.credential_of("key-of-0").owner, ring.credential_of("bobs-key").owner
    to = ring.change_to(sources.owners(f"{kept}bob bobs-key share=0.1\ncarol carols-key\n"))
    calls: list[str] = []
    sys.setprofile(lambda frame, _event, _argument: calls.append(frame.f_code.co_qualname))
    try:
        ring.apply(to)
    finally:
        sys.setprofile(None)
    assert len(calls) < 100
    carol = ring.credential_of("carols-key").owner
    assert (to.new_owners, carol.share) == ((carol,), 0.5)
    assert staying == (ring.credential_of("key-of-0").owner, ring.credential_of("bobs-key").owner)
    assert staying[1].share == 0.1
    change(ring, sources, "alice alices-key\n")
    change(ring, sources, "carol carols-key share=0.3\n")
    assert ring.credential_of("carols-key").owner is carol, "she is known while somebody holds her"


def test_a_ring_whose_keys_are_all_gone_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice old-key\n", "utf-8")
    sources = key_sources(given=None, environment=None, path=path)
    ring = sources.ring()
    change(ring, sources, "# none\n")
    assert not ring.is_open
    for key in (None, "", "old-key", "anything"):
        with pytest.raises(Unauthorized):
            ring.credential_of(key)


def test_nobody_becomes_an_admin_because_the_last_one_goes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ops ops-key-1 admin=1\n", "utf-8")
    sources = key_sources(given=None, environment=None, path=path)
    ring = sources.ring()
    change(ring, sources, "alice alices-key\n")
    assert not ring.credential_of("alices-key").owner.is_admin
    started_again = ring_of(path, "alice alices-key\n")
    assert not started_again.credential_of("alices-key").owner.is_admin
    change(ring, sources, "alice alices-key admin=1\n")
    assert ring.credential_of("alices-key").owner.is_admin


@pytest.mark.parametrize("empty", ["", " ", "\t"])
def test_an_empty_key_is_refused_wherever_it_stands(empty: str) -> None:
    for given, environment in ((empty, None), (None, empty)):
        with pytest.raises(InvalidKeys, match="empty"):
            key_sources(given=given, environment=environment, path=None).ring()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_arguments(parser)
    settings = flags.read_settings(parser.parse_args(["--api-key", empty]))
    with pytest.raises(InvalidKeys, match="--api-key"):
        load_keys(settings.http, environment=None)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InvalidKeys, match=f"^the key file {path}: {reason}"):
            key_sources(given=None, environment=None, path=path).ring()
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidKeys, match="binary"):
        key_sources(given=None, environment=None, path=binary).ring()


def test_a_key_that_others_on_the_machine_see_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("a-long-key", "utf-8")
    path.chmod(0o600)
    assert not is_readable_by_all(path)
    load_keys(HttpOptions(api_key_file=path), environment="e")
    assert caplog.messages == []
    path.chmod(0o644)
    load_keys(HttpOptions(api_key_file=path), environment="e")
    assert caplog.messages[0].endswith(f"can read {path}: chmod 600 {path}")


@pytest.mark.parametrize(
    ("host", "allow_open", "has_key", "starts"),
    [
        ("127.0.0.1", False, False, True),
        ("127.8.8.8", False, False, True),
        ("localhost", False, False, True),
        ("::1", False, False, True),
        ("0.0.0.0", False, False, False),
        ("::", False, False, False),
        ("192.0.2.7", False, False, False),
        ("server.example", False, False, False),
        ("0.0.0.0", True, False, True),
        ("0.0.0.0", False, True, True),
    ],
)
def test_a_server_open_to_the_network_starts_only_when_told_to(
    host: str, allow_open: bool, has_key: bool, starts: bool
) -> None:
    http = HttpOptions(host=host, allow_open=allow_open)
    ring = KeyRing.of("k") if has_key else KeyRing()
    if starts:
        check_exposure(http, ring)
        return
    with pytest.raises(ValueError, match=r"--api-key-file.*--allow-open"):
        check_exposure(http, ring)


@pytest.mark.parametrize("admin_host", ["127.0.0.1", "192.0.2.7"])
def test_an_address_for_operators_needs_a_port(admin_host: str) -> None:
    http = HttpOptions(admin_host=admin_host)
    told = f"--admin-host {admin_host} has no port, .*: add --admin-port N"
    with pytest.raises(ValueError, match=told):
        check_exposure(http, KeyRing.of("k"))
    check_exposure(http.model_copy(update={"admin_port": 0}), KeyRing.of("k"))
    check_exposure(HttpOptions(admin_port=0), KeyRing())


def test_serve_refuses_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("session_server.serving.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("session_server.serving.open_model", None)
    exposed = Settings(http=HttpOptions(host="0.0.0.0"))
    assert serve(exposed) == wiring.EXIT_UNUSABLE
    assert "--allow-open" in capsys.readouterr().err
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert serve(Settings()) == wiring.EXIT_UNUSABLE
    assert f"{KEY_VARIABLE}: the key is empty" in capsys.readouterr().err
    assert KEY_VARIABLE not in os.environ, "processes of the server inherit it"


def test_a_key_of_the_environment_is_shown_to_others_and_not_asked_for_by_our_own_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k")
    parser = argparse.ArgumentParser()
    add_server(parser, about="a server")
    assert parser.parse_args([]).api_key == "k"
    assert parser.parse_args(["--api-key", "other"]).api_key == "other"
    told = f"import os; print('listening on http://' + os.environ.get({KEY_VARIABLE!r}, 'open'))"
    with LocalServer(program=(sys.executable, "-c", told)) as server:
        assert server.url == "http://open"


def test_a_key_has_the_priority_and_the_share_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "a first share=0.25 max_priority=-3\nsecond max_priority=100\nshare=1\n", "utf-8"
    )
    ring = key_sources(given=None, environment=None, path=path, max_priority=7).ring()
    owners = [ring.credential_of(key).owner for key in ("first", "second", "share=1")]
    assert [owner.max_priority for owner in owners] == [-3, 100, 7]
    assert [owner.share for owner in owners] == [0.25, SHARE_OF_MANY, SHARE_OF_MANY]


def test_a_key_has_the_limits_of_its_line_and_for_the_rest_those_of_the_server(
    tmp_path: Path,
) -> None:
    options = " ".join(f"{name}={n}" for n, name in enumerate(LIMITS, 1))
    path = tmp_path / "keys"
    path.write_text(f"all {options}\nmany max_sessions={MAX_LIMIT}\nplain-key\n", "utf-8")
    defaults = TenantLimits(max_sessions=7, max_bytes=8)
    ring = key_sources(given=None, environment=None, path=path, limits=defaults).ring()
    limits = [ring.credential_of(key).owner.limits for key in ("all", "many", "plain-key")]
    assert limits == [
        TenantLimits(*range(1, len(LIMITS) + 1)),
        TenantLimits(max_sessions=MAX_LIMIT, max_bytes=8),
        defaults,
    ]
    open_ring = key_sources(given=None, environment=None, path=None, limits=defaults).ring()
    assert open_ring.credential_of(None).owner.limits == defaults


def test_the_limits_of_the_server_hold_from_the_flag_to_the_reread_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice alices-key\nbob bobs-key max_sessions=3\n", "utf-8")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_arguments(parser)
    words = ["--api-key-file", str(path), "--tenant-limits", "max_sessions=8  turns_per_min=60"]
    ring = load_keys(flags.read_settings(parser.parse_args(words)).http, environment="of-env")
    assert ring.credential_of("of-env").owner.limits == TenantLimits(
        max_sessions=8, turns_per_min=60
    )
    assert ring.credential_of("bobs-key").owner.limits == TenantLimits(
        max_sessions=3, turns_per_min=60
    )
    assert ring.sources is not None
    change(ring, ring.sources, "alice alices-key turns_per_min=5\nbob bobs-key\n")
    assert ring.credential_of("alices-key").owner.limits == TenantLimits(
        max_sessions=8, turns_per_min=5
    )
    assert ring.credential_of("bobs-key").owner.limits == TenantLimits(
        max_sessions=8, turns_per_min=60
    )
    open_ring = load_keys(HttpOptions(tenant_limits="max_bytes=1"), environment=None)
    assert open_ring.credential_of(None).owner.limits == TenantLimits(max_bytes=1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("max_bytes=0", f"max_bytes must be an integer in [1, {MAX_LIMIT}]"),
        (f"max_bytes={MAX_LIMIT + 1}", f"max_bytes must be an integer in [1, {MAX_LIMIT}]"),
        ("turns_per_min", "turns_per_min must be an integer"),
        ("share=0.5", "'share=0.5' is no limit: each is NAME=N, of max_sessions,"),
        ("max_bytes=1 max_bytes=2", "max_bytes is given twice"),
    ],
)
def test_wrong_limits_of_the_server_are_refused_by_word_and_bound(words: str, told: str) -> None:
    with pytest.raises(InvalidKeys, match=re.escape(f"--tenant-limits: {told}")):
        load_keys(HttpOptions(tenant_limits=words), environment=None)


def test_only_lines_that_say_so_make_an_admin(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = "given", "first-key", "second-key", "third-key"
    path.write_text("first-key\nalice second-key\nthird-key\n", "utf-8")
    ring = key_sources(given="given", environment=None, path=path).ring()
    assert not any(ring.credential_of(key).owner.is_admin for key in keys)
    assert not any(ring.credential_of(key).owner.sees_metrics for key in keys)
    path.write_text("first-key admin=0\nops second-key admin=1\nthird-key metrics=1\n", "utf-8")
    ring = key_sources(given="given", environment=None, path=path).ring()
    owners = [ring.credential_of(key).owner for key in keys]
    assert [owner.is_admin for owner in owners] == [False, False, True, False]
    assert [owner.sees_metrics for owner in owners] == [False, False, True, True]


def test_without_a_key_file_whoever_gets_in_is_an_admin() -> None:
    rings = (
        key_sources(given="given", environment="of-env", path=None).ring(),
        key_sources(given=None, environment=None, path=None).ring(),
    )
    shown = ((rings[0], "given"), (rings[0], "of-env"), (rings[1], None))
    owners = [ring.credential_of(key).owner for ring, key in shown]
    assert all(owner.is_admin and owner.sees_metrics for owner in owners)


def test_routes_about_the_sessions_of_every_key_are_for_admins(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "keys", "first-key\nops second-key admin=1\n")

    async def check() -> None:
        async with serving(keys=ring) as this:
            first, second = (
                {"authorization": f"Bearer {key}"} for key in ("first-key", "second-key")
            )
            routes = [route for router in ADMIN_ROUTERS for route in router.routes]
            asked = [
                (method, re.sub("{.*?}", "x", route.path))
                for route in routes
                if isinstance(route, APIRoute) and route.endpoint.__name__ not in PUBLIC_ROUTES
                for method in sorted(route.methods)
            ]
            assert len(asked) >= 7
            for method, path in asked:
                answer = await this.http.request(method, path, headers=first)
                assert answer.status_code == 403, (method, path)
            for method, path in (("GET", "/v1/admin/memory"), ("POST", "/flush_cache")):
                assert (await this.http.request(method, path, headers=second)).status_code == 200

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


def test_totals_of_all_are_for_admins_and_whoever_may_read_them(tmp_path: Path) -> None:
    """Two owners could work out each other's: their sum less their own."""
    ring = ring_of(
        tmp_path / "keys", "alice alices-key\nops admins-key admin=1\nprom scrapes-key metrics=1\n"
    )

    async def check() -> None:
        async with serving(keys=ring) as this:
            allowed = {
                "alices-key": (403, 403),
                "scrapes-key": (200, 403),
                "admins-key": (200, 200),
            }
            for key, statuses in allowed.items():
                header = {"authorization": f"Bearer {key}"}
                answers = [
                    await this.http.get(path, headers=header)
                    for path in ("/metrics", "/v1/admin/memory")
                ]
                assert tuple(answer.status_code for answer in answers) == statuses, key

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


def test_the_state_of_the_server_is_for_admins_and_of_their_own_for_others(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "keys", "first-key\nother-key\nops second-key admin=1\n")

    async def check() -> None:
        async with serving(keys=ring) as this:
            this.http.headers["authorization"] = "Bearer first-key"
            session_id = await this.open()
            this.is_held = True
            path = f"/v1/sessions/{session_id}/turns"
            asked = asyncio.create_task(this.http.post(path, json=turn()))
            await this.until(lambda: this.sessions.stats().live_turns == 1)
            states = []
            for key in ("first-key", "other-key", "second-key"):
                header = {"authorization": f"Bearer {key}"}
                answer = await this.http.get("/server_info", headers=header)
                (state,) = answer.json()["internal_states"]
                states.append(state)
            this.is_held = False
            assert (await asked).status_code == 200
            assert states[:2] == [
                {"sessions": 1, "unfinished_turns": 1},
                {"sessions": 0, "unfinished_turns": 0},
            ]
            assert (states[2]["sessions"], states[2]["live_turns"]) == (1, 1)

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


def test_one_owner_may_hold_everything_and_one_of_several_a_share(tmp_path: Path) -> None:
    alone = ring_of(tmp_path / "keys", "a old\na new\n")
    assert (
        alone.credential_of("old").owner.share,
        alone.credential_of("old").owner.max_priority,
    ) == (1.0, 0)
    assert (
        ring_of(tmp_path / "keys", "a old\nb new\n").credential_of("old").owner.share
        == SHARE_OF_MANY
    )
    assert ring_of(tmp_path / "keys", "a old share=0.2\n").credential_of("old").owner.share == 0.2
    greedy = ring_of(tmp_path / "keys", "a old share=1\nb new share=0.95\n")
    assert [greedy.credential_of(key).owner.share for key in ("old", "new")] == [
        1.0 - RESERVED_PART
    ] * 2
    ring = key_sources(given=None, environment=None, path=None, max_priority=5).ring()
    assert (ring.credential_of(None).owner.share, ring.credential_of(None).owner.max_priority) == (
        1.0,
        5,
    )


@pytest.mark.parametrize(
    "option",
    [
        *(
            f"{name}={n}"
            for name in LIMITS
            for n in ("0", "-1", "", "1.5", "x", str(MAX_LIMIT + 1))
        ),
        *("share=0", "share=1.01", "share=nan", "share=", "share=1e-3"),
        *("admin=2", "admin=", "admin=yes"),
        *("max_priority=101", "max_priority=-101", "max_priority=1.0", "max_priority="),
    ],
)
def test_an_option_out_of_its_range_is_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(InvalidKeys, match=f"line 1: {option.partition('=')[0]}"):
        ring_of(tmp_path / "keys", f"name key {option}\n")


def test_a_key_may_not_hold_everything_beside_another_and_cannot_push_ahead(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "keys", "greedy\nmodest max_priority=2\n")

    async def check() -> None:
        async with serving(quotas=QuotaLimits(sessions=10), keys=ring) as this:
            hog, other = ({"authorization": f"Bearer {key}"} for key in ("greedy", "modest"))
            codes = [await this.http.post("/v1/sessions", headers=hog) for _ in range(6)]
            assert [answer.status_code for answer in codes] == [201] * 5 + [429]
            opened = await this.http.post("/v1/sessions", headers=other)
            assert opened.status_code == 201
            for headers, answer, priority in ((hog, codes[0], 0), (other, opened, 2)):
                path = f"/v1/sessions/{answer.json()['id']}/turns"
                body = turn(input_ids=[7], priority=100)
                assert (await this.http.post(path, json=body, headers=headers)).status_code == 200
                sent = [each for each in this.engine.seen if isinstance(each, SubmitTurn)]
                assert sent[-1].priority == priority

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))
