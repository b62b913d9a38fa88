"""Tickets: each opens one WebSocket of any kind, once, within half a minute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from session_server.core.errors import QuotaExceeded, ServerBusy, Unauthorized
from session_server.core.owner import Owner
from session_server.web import tickets as tickets_module
from session_server.web.authenticator import Authenticator
from session_server.web.key_file import digest_of
from session_server.web.keys import Credential, KeyRing
from session_server.web.tickets import (
    MAX_OWNER_TICKET_BYTES,
    MAX_TICKET_BYTES,
    TICKET_BYTES,
    TICKET_TTL_S,
    Tickets,
)
from tests.web.serving import Served, served

SOCKETS = (
    ("/v1/sessions/new/ws", "kvsession.v1"),
    ("/v1/realtime", "realtime"),
    ("/v1/responses", "responses"),
)
KEY = {"authorization": "Bearer secret"}


def credential(name: str = "a", **granted: Any) -> Credential:
    return Credential(Owner(name, **granted), digest_of(name))


class Clock:
    """A time that tests set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_ticket_is_used_once_and_before_it_expires() -> None:
    clock = Clock()
    tickets = Tickets(clock)
    first, second, late = (tickets.issue(credential()) for _ in range(3))
    assert tickets.redeem(first) == credential()
    assert tickets.redeem(first) is None
    clock.now_s = TICKET_TTL_S - 0.001
    assert tickets.redeem(second) == credential()
    clock.now_s = TICKET_TTL_S
    assert tickets.redeem(late) is None
    for never in ("", "x", first[:-1], first + "A", "A" * len(first)):
        assert tickets.redeem(never) is None
    assert len(tickets) == 0


def test_tickets_are_random_and_kept_as_digests() -> None:
    tickets = Tickets(Clock())
    issued = [tickets.issue(credential()) for _ in range(100)]
    assert len(set(issued)) == 100
    assert min(map(len, issued)) * 6 >= 128, "bits, of characters with six each"
    assert not any(ticket in repr(vars(tickets)) for ticket in issued)


def test_a_ticket_of_one_of_several_servers_says_whose_it_is() -> None:
    ours, others = Tickets(Clock(), tag="0a1b2c3d"), Tickets(Clock(), tag="ffffffff")
    ticket = ours.issue(credential())
    assert ticket.startswith("0a1b2c3d")
    assert len(ticket) == len("0a1b2c3d") + len(Tickets(Clock()).issue(credential()))
    assert others.redeem(ticket) is None
    assert ours.redeem(ticket.removeprefix("0a1b2c3d")) is None
    assert ours.redeem(ticket) == credential()


def test_tickets_of_an_owner_are_bounded_until_they_are_used_or_expire() -> None:
    clock = Clock()
    tickets = Tickets(clock)
    most = MAX_OWNER_TICKET_BYTES // TICKET_BYTES
    issued = [tickets.issue(credential()) for _ in range(most)]
    with pytest.raises(QuotaExceeded):
        tickets.issue(credential())
    tickets.issue(credential("b"))
    assert tickets.redeem(issued[0]) == credential()
    tickets.issue(credential())
    with pytest.raises(QuotaExceeded):
        tickets.issue(credential())
    clock.now_s = TICKET_TTL_S
    tickets.issue(credential())


def test_tickets_of_all_owners_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets_module, "MAX_TICKET_BYTES", 3 * TICKET_BYTES)
    tickets = Tickets(Clock())
    issued = [tickets.issue(credential(name)) for name in "abc"]
    with pytest.raises(ServerBusy):
        tickets.issue(credential("d"))
    tickets.redeem(issued[1])
    tickets.issue(credential("d"))
    assert MAX_TICKET_BYTES > 2 * MAX_OWNER_TICKET_BYTES, "one owner cannot take all"


def test_expired_tickets_are_dropped_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets_module, "DROPPED_AT_ONCE", 2)
    clock = Clock()
    tickets = Tickets(clock)
    for name in "abcde":
        tickets.issue(credential(name))
    clock.now_s = TICKET_TTL_S
    left = []
    while len(tickets):
        tickets.drop_expired()
        left.append(len(tickets))
    assert left == [3, 1, 0]


def test_the_first_to_expire_is_found_at_once_behind_all_that_were_dropped() -> None:
    """A plain map walks over each of them every time."""
    tickets = Tickets(Clock())
    tickets.issue(credential())
    (unused,) = (kept for kept in vars(tickets).values() if isinstance(kept, dict))
    assert isinstance(unused, OrderedDict)


def test_a_ticket_ends_with_the_key_it_was_made_for() -> None:
    authenticator = Authenticator(KeyRing.of("one"), now_s=Clock())
    ticket = authenticator.tickets.issue(Credential(Owner(digest_of("two")), digest_of("two")))
    with pytest.raises(Unauthorized):
        authenticator.redeem(ticket)


def socket_of(this: Served, path: str, *offers: str, **options: Any) -> connect:
    url = this.url.replace("http", "ws", 1) + path
    return connect(url, proxy=None, compression=None, subprotocols=offers, **options)  # type: ignore[arg-type]


async def ticket_of(this: Served, **headers: str) -> str:
    answer = await this.http.post("/v1/ws-ticket", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    body = answer.json()
    assert body["expires_in_s"] == 30
    ticket: str = body["ticket"]
    return ticket


async def refusal_of(opening: Callable[[], connect]) -> int:
    with pytest.raises(InvalidStatus) as refused:
        async with opening():
            pass
    return refused.value.response.status_code


@served(keys=KeyRing.of("secret", "other"))
async def test_a_ticket_opens_one_socket_of_any_kind_and_is_not_echoed(this: Served) -> None:
    assert (await this.http.post("/v1/ws-ticket")).status_code == 401
    for path, subprotocol in SOCKETS:
        ticket = await ticket_of(this, **KEY)
        async with socket_of(this, path, f"ticket.{ticket}", subprotocol, origin=this.url) as ws:
            assert ws.subprotocol == subprotocol
            assert ticket not in str(ws.response)
        assert await refusal_of(lambda p=path, t=ticket: socket_of(this, p, f"ticket.{t}")) == 401


@served(keys=KeyRing.of("secret", "other"))
async def test_what_a_ticket_opens_is_its_owners(this: Served) -> None:
    opened = await this.http.post("/v1/sessions", json={"id": "mine"}, headers=KEY)
    assert opened.status_code == 201
    path = "/v1/sessions/mine/ws"
    foreign, own = await ticket_of(this, authorization="Bearer other"), await ticket_of(this, **KEY)
    assert await refusal_of(lambda: socket_of(this, path, f"ticket.{foreign}")) == 404
    async with socket_of(this, path, "kvsession.v1", f"ticket.{own}") as ws:
        assert '"session.opened"' in str(await ws.recv())


@served(keys=KeyRing.of("secret"))
async def test_a_page_whose_ticket_is_used_reads_the_close_code(this: Served) -> None:
    for path, subprotocol in SOCKETS:
        offers = ("ticket.used", subprotocol)
        async with socket_of(this, path, *offers, origin=this.url) as ws:
            assert "unauthorized" in str(await ws.recv())
            await ws.wait_closed()
            assert ws.close_code == 4401


@served(keys=KeyRing.of("secret"))
async def test_a_header_counts_before_a_ticket_and_leaves_it_unused(this: Served) -> None:
    ticket = await ticket_of(this, **KEY)
    wrong = {"authorization": "Bearer wrong"}
    path, offer = "/v1/responses", f"ticket.{ticket}"
    assert await refusal_of(lambda: socket_of(this, path, offer, additional_headers=wrong)) == 401
    async with socket_of(this, path, offer):
        pass


@served()
async def test_an_open_server_makes_tickets_and_asks_for_none(this: Served) -> None:
    for ticket in (await ticket_of(this), "anything"):
        async with socket_of(this, "/v1/responses", "responses", f"ticket.{ticket}") as ws:
            assert ws.subprotocol == "responses"
