"""A file of keys is taken over when it changes, as a whole or not at all, and what a key has opened
ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from session_server.core.errors import Unauthorized
from session_server.protocol.session_protocol import CloseCode
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.views import OpenRequest
from session_server.web import app as web_app
from session_server.web import key_watch
from session_server.web.authenticator import REVOKED_AT_ONCE, Authenticator
from session_server.web.key_file import InvalidKeys
from session_server.web.key_store import add_key, revoke_keys
from session_server.web.key_watch import KeyWatch
from session_server.web.keys import KeyChange, KeyRing, key_sources
from tests.web.serving import DEADLINE_S, Served, serving, turn

TODAY = "2026-11-24"
OPEN = OpenRequest()
ALICE, SECOND, BOB = (
    {"authorization": f"Bearer {key}"} for key in ("alice-1", "alice-2", "bobs-key")
)
EVERYBODY = "alice alice-1\nalice alice-2\nbob bobs-key\n"


def ring_at(path: Path, text: str) -> tuple[KeyRing, KeyWatch]:
    path.write_text(text, "utf-8")
    sources = key_sources(given=None, environment=None, path=path)
    ring = sources.ring()
    return ring, KeyWatch(ring, sources, path)


def replace_file(path: Path, text: str) -> None:
    """Put another file in its place, as `session-server keys` does."""
    other = path.with_suffix(".new")
    other.write_text(text, "utf-8")
    os.utime(other, (0, 0))  # before the clock of the file system shows that it was renamed later
    other.replace(path)


def lets_in(ring: KeyRing, *keys: str) -> list[bool]:
    def is_let_in(key: str) -> bool:
        try:
            ring.credential_of(key)
        except Unauthorized:
            return False
        return True

    return [is_let_in(key) for key in keys]


def looks(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    """Make a coroutine over a path a test."""

    def run(tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(tmp_path / "keys"), DEADLINE_S))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@looks
async def test_a_pipe_in_its_place_stops_nobody_from_looking_again(path: Path) -> None:
    ring, watch = ring_at(path, "alice alice-1\n")
    path.unlink()
    os.mkfifo(path)
    assert await watch.look() is None
    assert lets_in(ring, "alice-1") == [True]
    replace_file(path, "bob bobs-key\n")
    assert await watch.look() is not None
    assert lets_in(ring, "alice-1", "bobs-key") == [False, True]


async def found(watch: KeyWatch) -> KeyChange | None:
    """What has changed. Where the clock of the file system is too coarse to show that a file was
    renamed to its place, the second look finds it."""
    return await watch.look() or await watch.look()


@looks
async def test_what_the_command_writes_is_read_at_once(path: Path) -> None:
    ring, watch = ring_at(path, "alice alice-1\n")
    assert (change := await found(watch)) is not None
    assert (change.gone, change.gone_owners) == ((), ()), "the first look finds what is known"
    assert await found(watch) is None
    key, _ = add_key(path, "bob", (), today=TODAY)
    assert await found(watch) is not None
    assert lets_in(ring, "alice-1", key) == [True, True]
    alice = ring.credential_of("alice-1")
    revoke_keys(path, "alice", all_of_name=False, today=TODAY)
    change = await found(watch)
    assert change is not None
    assert (change.gone, change.gone_owners) == ((alice.digest,), (alice.owner,))
    assert lets_in(ring, "alice-1", key) == [False, True]
    assert await found(watch) is None


@looks
async def test_a_file_that_is_replaced_is_read_at_once(path: Path) -> None:
    ring, watch = ring_at(path, "alice alice-1\n")
    await found(watch)
    replace_file(path, "bob bobs-key\n")
    assert await watch.look() is not None
    assert lets_in(ring, "alice-1", "bobs-key") == [False, True]


@looks
async def test_a_file_that_is_made_anew_is_read_when_it_rests(path: Path) -> None:
    """Some editors write to the place of a file that they have moved away."""
    ring, watch = ring_at(path, EVERYBODY)
    await found(watch)
    for is_missed in (False, True):
        path.unlink()
        if is_missed:
            assert await watch.look() is None
        with path.open("w", encoding="utf-8") as file:
            file.write("alice alice-1\nalice a")
            file.flush()
            assert await watch.look() is None
            file.write("lice-2\nbob bobs-key\n")
        for _ in range(3):
            await watch.look()
        assert lets_in(ring, "alice-2", "a", "bobs-key") == [True, False, True]


@looks
async def test_a_file_that_is_written_in_place_is_read_when_it_rests(path: Path) -> None:
    ring, watch = ring_at(path, EVERYBODY)
    for _ in range(3):
        await watch.look()
    with path.open("w", encoding="utf-8") as file:
        file.write("alice alice-1\n")
        file.flush()
        assert await watch.look() is None
        file.write("bob bobs-key\n")
        file.flush()
        assert await watch.look() is None
    assert lets_in(ring, "alice-2", "bobs-key") == [True, True]
    assert await watch.look() is not None
    assert lets_in(ring, "alice-1", "alice-2", "bobs-key") == [True, False, True]


@looks
async def test_two_writes_in_one_moment_of_the_clock_are_both_seen(path: Path) -> None:
    ring, watch = ring_at(path, "alice alice-1\n")
    status = path.stat()
    await watch.look()
    path.write_text("alice alice-2\n", "utf-8")  # as long as before
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for _ in range(2):
        await watch.look()
    assert lets_in(ring, "alice-1", "alice-2") == [False, True]


@looks
async def test_a_file_that_could_not_be_read_is_read_as_soon_as_it_can_be(path: Path) -> None:
    """The disk may fail for a while: a key that was taken back meanwhile lets nobody in after."""

    def fail(_path: Path) -> str:
        raise InvalidKeys("Input/output error")

    ring, watch = ring_at(path, "alice alice-1\n")
    await watch.look()
    replace_file(path, "bob bobs-key\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_watch, "read_file", fail)
        for _ in range(4):
            assert await watch.look() is None
    assert lets_in(ring, "alice-1", "bobs-key") == [True, False]
    assert await watch.look() is not None
    assert lets_in(ring, "alice-1", "bobs-key") == [False, True]
    assert await watch.look() is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file or directory"),
        ("", "it contains no key"),
        ("  \n", "it contains no key"),
        ("alice\nb@d secret-of-bob\n", "line 2: expected"),
        ("\udcff", "it is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_taken_over_changes_nothing_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, told: str
) -> None:
    path = tmp_path / "keys"

    async def check() -> None:
        ring, watch = ring_at(path, EVERYBODY)
        await watch.look()
        if text is None:
            path.unlink()
        else:
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
        caplog.clear()
        for _ in range(4):
            assert await watch.look() is None
        assert lets_in(ring, "alice-1", "bobs-key") == [True, True]
        (message,) = (record.message for record in caplog.records if record.levelname == "ERROR")
        assert told in message
        assert message.endswith("; the keys from before stay")
        assert "secret" not in message
        replace_file(path, "alice alice-1\n")
        assert await watch.look() is not None
        assert lets_in(ring, "alice-1", "bobs-key") == [True, False]

    asyncio.run(check())


@looks
async def test_a_file_of_comments_lets_nobody_in(path: Path) -> None:
    ring, watch = ring_at(path, EVERYBODY)
    replace_file(path, "# nobody\n")
    await watch.look()
    assert not ring.is_open
    assert lets_in(ring, "alice-1", "alice-2", "bobs-key", "") == [False] * 4


# -- what a key has opened


@contextlib.asynccontextmanager
async def watched(
    path: Path, monkeypatch: pytest.MonkeyPatch, text: str = EVERYBODY, **options: Any
) -> AsyncIterator[Served]:
    """A server that looks at its keys often."""
    monkeypatch.setattr(web_app, "TICK_S", 0.01)
    path.write_text(text, "utf-8")
    ring = key_sources(given=None, environment=None, path=path).ring()
    async with serving(keys=ring, **options) as this:
        yield this


async def denied(this: Served, headers: dict[str, str]) -> None:
    """Wait until a key lets nobody in."""
    while (await this.http.get("/v1/models", headers=headers)).status_code != 401:
        await asyncio.sleep(0.01)


async def open_by(this: Served, headers: dict[str, str], session_id: str) -> None:
    answer = await this.http.post("/v1/sessions", json={"id": session_id}, headers=headers)
    assert answer.status_code == 201, answer.text


def socket_by(this: Served, path: str, headers: dict[str, str]) -> connect:
    url = this.url.replace("http", "ws", 1) + path
    return connect(url, proxy=None, compression=None, additional_headers=headers)


async def code_at_end(socket: ClientConnection) -> int | None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            await socket.recv()
    return socket.close_code


SOCKETS = ("/v1/sessions/s/ws", "/v1/realtime?session_id=r", "/v1/responses")


def test_sockets_of_a_key_close_with_it_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"

    async def check() -> None:
        async with watched(path, monkeypatch) as this, contextlib.AsyncExitStack() as stack:
            await open_by(this, ALICE, "s")
            await open_by(this, BOB, "s")
            ending = [
                await stack.enter_async_context(socket_by(this, each, ALICE)) for each in SOCKETS
            ]
            # The same sessions, by another key of the name: newest wins, so other sessions.
            staying = [
                await stack.enter_async_context(socket_by(this, each, headers))
                for each in ("/v1/sessions/new/ws", "/v1/realtime", "/v1/responses")
                for headers in (SECOND, BOB)
            ]
            await this.until(lambda: this.sockets.num_attached == 9)
            replace_file(path, "alice alice-2\nbob bobs-key\n")
            assert [await code_at_end(each) for each in ending] == [4401] * 3
            await this.until(lambda: this.sockets.num_attached == 6)
            assert all(each.close_code is None for each in staying)
            assert (await this.http.get("/v1/sessions/s", headers=SECOND)).status_code == 200
            assert this.app.state.authenticator.num_revocables == 6

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


def test_a_socket_whose_key_is_taken_back_is_heard_no_more_though_it_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"

    async def check() -> None:
        async with watched(path, monkeypatch, send_timeout_s=1e4) as this:
            await open_by(this, ALICE, "s")
            owner = this.services.settings.keys.credential_of("alice-1").owner
            async with socket_by(this, "/v1/sessions/s/ws", ALICE) as socket:
                await this.until(lambda: this.sockets.num_attached == 1)
                socket.transport.pause_reading()
                metadata = {str(key): "x" * 512 for key in range(16)}
                for _ in range(1000):  # more than the kernel buffers
                    this.sessions.update(owner, "s", metadata=metadata)
                    await asyncio.sleep(0)
                replace_file(path, "alice alice-2\n")
                await denied(this, ALICE)
                await this.until(lambda: this.sockets.num_attached == 0)
                assert this.app.state.authenticator.num_revocables == 0
                await socket.send(json.dumps({"type": "turn.create", "turn_id": "t", **turn()}))
            assert (
                await this.http.get("/v1/sessions/s/turns/t", headers=SECOND)
            ).status_code == 404

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


def test_event_streams_of_a_key_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"

    async def check() -> None:
        async with watched(path, monkeypatch) as this:
            await open_by(this, ALICE, "s")
            url = "/v1/sessions/s/events?after=0"
            async with (
                this.http.stream("GET", url, headers=ALICE) as ending,
                this.http.stream("GET", url, headers=SECOND) as staying,
            ):
                lines = staying.aiter_lines()
                replace_file(path, "alice alice-2\n")
                text = (await ending.aread()).decode()  # to its end, which is that of its chunks
                assert json.loads(text.split("data: ")[-1])["error"]["code"] == "unauthorized"
                answer = await this.http.patch(
                    "/v1/sessions/s", json={"metadata": {"n": "1"}}, headers=SECOND
                )
                assert answer.status_code == 200
                while "session.updated" not in await anext(lines):
                    pass
            again = await this.http.get(url, headers=ALICE)
            assert again.status_code == 401

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


@pytest.mark.parametrize("on_disconnect", ["cancel", "detach"])
def test_a_request_of_a_key_is_refused_with_it_and_its_turn_canceled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disconnect: str
) -> None:
    path = tmp_path / "keys"

    async def check() -> None:
        async with watched(path, monkeypatch) as this:
            await open_by(this, ALICE, "s")
            this.is_held = True
            body = turn(turn_id="t", on_disconnect=on_disconnect)
            url = "/v1/sessions/s/turns"
            asking = asyncio.create_task(this.http.post(url, json=body, headers=ALICE))
            owner = this.services.settings.keys.credential_of("alice-1").owner
            await this.until(lambda: bool(this.sessions.get(owner, "s").running_turn))
            replace_file(path, "alice alice-2\n")
            answer = await asking
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
            this.is_held = False
            status = "completed" if on_disconnect == "detach" else "cancelled"
            while (await this.http.get(f"{url}/t", headers=SECOND)).json()["status"] != status:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


def test_a_body_that_arrives_behind_its_key_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"

    async def check() -> None:
        async with watched(path, monkeypatch) as this:
            reader, writer = await asyncio.open_connection("127.0.0.1", this.port)
            head = b"POST /v1/sessions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer alice-1"
            writer.write(head + b"\r\ncontent-length: 12\r\n\r\n{")
            await this.until(lambda: this.app.state.authenticator.num_revocables == 1)
            replace_file(path, "alice alice-2\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            writer.write(b'"id": "x"}\n')
            writer.close()
            listed = await this.http.get("/v1/sessions", headers=SECOND)
            assert listed.json()["data"] == []

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


def test_what_a_tenant_holds_goes_with_its_last_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"

    async def check() -> None:
        async with watched(path, monkeypatch) as this:
            monkeypatch.setattr("session_server.web.revoked_owners.CLOSED_AT_ONCE", 2)
            for number in range(5):
                await open_by(this, ALICE, f"s{number}")
            await open_by(this, BOB, "s0")
            await hold_much(this, ALICE)
            owner = this.services.settings.keys.credential_of("alice-1").owner
            quotas = this.sessions.edits.parts.quotas
            replace_file(path, "alice alice-2\nbob bobs-key\n")
            await denied(this, ALICE)
            assert (await this.http.get("/v1/sessions/s4", headers=SECOND)).status_code == 200
            replace_file(path, "bob bobs-key\n")
            await this.until(lambda: not quotas.holds(owner))
            await this.until(lambda: len(this.app.state.revoked_owners) == 0)
            assert this.sessions.stats().closed_sessions["revoked"] >= 5
            assert (await this.http.get("/v1/sessions/s0", headers=BOB)).status_code == 200
            replace_file(path, EVERYBODY)
            while (found := await this.http.get("/v1/sessions", headers=ALICE)).status_code == 401:
                await asyncio.sleep(0.01)
            assert found.json()["data"] == []

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


async def hold_much(this: Served, headers: dict[str, str]) -> None:
    """Keep one of everything that a tenant can keep, and a turn that runs."""
    posts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}),
        ("/v1/conversations", {"items": [{"role": "user", "content": "Hello"}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
        ),
    )
    for path, body in posts:
        answer = await this.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    this.is_held = True
    body = turn(turn_id="t", on_disconnect="detach")
    with pytest.raises(httpx.ReadTimeout):
        await this.http.post("/v1/sessions/s1/turns", json=body, headers=headers, timeout=0.2)
    this.is_held = False


def test_a_session_that_opens_behind_its_tenant_is_closed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"

    async def check() -> None:
        async with watched(path, monkeypatch) as this:
            owner = this.services.settings.keys.credential_of("alice-1").owner
            quotas = this.sessions.edits.parts.quotas
            with quotas.turn_bytes.held(owner, 1):  # a request that has not noticed yet
                replace_file(path, "bob bobs-key\n")
                await denied(this, ALICE)
                this.sessions.open(owner, OPEN)
                await this.until(lambda: not quotas.sessions.held_by(owner))
                assert len(this.app.state.revoked_owners) == 1
            await this.until(lambda: len(this.app.state.revoked_owners) == 0)

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


@pytest.mark.parametrize("num_revocables", [REVOKED_AT_ONCE + step for step in (-1, 0, 1)])
def test_what_a_revoked_key_opened_is_ended_in_slices(num_revocables: int) -> None:
    ended: list[CloseCode] = []

    class Revocable:
        def end(self, code: CloseCode) -> None:
            ended.append(code)

    async def check() -> None:
        authenticator = Authenticator(KeyRing.of("the-secret"), now_s=lambda: 0.0)
        credential = authenticator.authenticate("the-secret")
        assert credential.digest is not None
        with contextlib.ExitStack() as tracked:
            for _ in range(num_revocables):
                tracked.enter_context(authenticator.track(credential, Revocable()))
            revoking = asyncio.create_task(authenticator.revoke([credential.digest]))
            await asyncio.sleep(0)
            assert len(ended) == min(num_revocables, REVOKED_AT_ONCE)
            await revoking
        assert ended == [CloseCode.UNAUTHORIZED] * num_revocables

    asyncio.run(check())


def test_tenants_that_go_together_leave_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    num_passes, closed_in = 0, list[int]()

    async def check() -> None:
        crowd = [f"tenant-{number} key-{number}" for number in range(20)]
        async with watched(path, monkeypatch, "\n".join([*crowd, "bob bobs-key\n"])) as this:
            for number in range(20):
                this.sessions.open(
                    this.services.settings.keys.credential_of(f"key-{number}").owner, OPEN
                )
            close = this.sessions.close
            loop = asyncio.get_running_loop()

            def count_pass() -> None:
                nonlocal num_passes
                num_passes += 1
                loop.call_soon(count_pass)

            def counted(*what: Any, **how: Any) -> Any:
                closed_in.append(num_passes)
                return close(*what, **how)

            monkeypatch.setattr(this.sessions, "close", counted)
            count_pass()
            replace_file(path, "bob bobs-key\n")
            await this.until(lambda: len(closed_in) == 20)
            await this.until(lambda: len(this.app.state.revoked_owners) == 0)

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))
    assert len(set(closed_in)) == 20, "others are served between two tenants"


def test_sessions_that_live_are_granted_what_the_file_says_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"

    async def check() -> None:
        text = "alice alice-1 share=0.4\nbob bobs-key\n"
        async with watched(path, monkeypatch, text, quotas=QuotaLimits(sessions=10)) as this:
            for number in range(4):
                await open_by(this, ALICE, f"s{number}")
            full = await this.http.post("/v1/sessions", headers=ALICE)
            assert full.status_code == 429
            replace_file(path, "alice alice-1 share=0.5 max_priority=7\nbob bobs-key\n")
            while (await this.http.post("/v1/sessions", headers=ALICE)).status_code != 201:
                await asyncio.sleep(0.01)
            journal = this.sessions.journal(
                this.services.settings.keys.credential_of("alice-1").owner, "s0"
            )
            session = this.sessions.edits.parts.sessions.get(
                this.services.settings.keys.credential_of("alice-1").owner, "s0"
            )
            assert session.journal is journal, "it has lived on"
            assert (session.owner.share, session.owner.max_priority) == (0.5, 7)

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


def test_a_ticket_goes_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"

    async def check() -> None:
        async with watched(path, monkeypatch) as this:
            answer = await this.http.post("/v1/ws-ticket", headers=ALICE)
            ticket = answer.json()["ticket"]
            replace_file(path, "alice alice-2\n")
            await denied(this, ALICE)
            with pytest.raises(Unauthorized):
                this.app.state.authenticator.redeem(ticket)

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))
