"""How many connections may be open, and how much of unfinished messages may be here."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from session_server.web.connection_table import ConnectionLimits, ConnectionTable


@dataclass(eq=False)
class Peer:
    """A connection that notes whether it was shed."""

    address: str = "a"
    is_shed: bool = False
    shed_order: list[Peer] = field(default_factory=list)

    def evict(self) -> None:
        assert not self.is_shed, "shed twice"
        self.is_shed = True
        self.shed_order.append(self)


def table(**bounds: int) -> ConnectionTable:
    unbounded = dict.fromkeys(ConnectionLimits.__annotations__, 1 << 40)
    return ConnectionTable(ConnectionLimits(**(unbounded | bounds)))


def test_a_newcomer_finds_room_below_the_bound_and_takes_it_from_the_longest_silent_at_it() -> None:
    connections = table(connections=3)
    peers = [Peer() for _ in range(4)]
    assert all(connections.add(peer) for peer in peers[:3])
    assert not any(peer.is_shed for peer in peers)
    connections.mark_served(peers[0])
    assert connections.add(peers[3])
    assert [peer.is_shed for peer in peers] == [False, True, False, False]
    assert connections.num_connections == 3


def test_where_everybody_is_served_a_newcomer_is_refused_and_closed_for_the_next_one() -> None:
    connections = table(connections=2)
    served = [Peer(), Peer()]
    for peer in served:
        assert connections.add(peer)
        connections.mark_served(peer)
    first, second = Peer(), Peer()
    assert not connections.add(first)
    assert not first.is_shed
    assert not connections.add(second)
    assert first.is_shed
    assert connections.num_connections == 2 + 1
    assert not any(peer.is_shed for peer in served)
    connections.remove(served[0])
    assert connections.add(Peer())
    assert second.is_shed


def test_one_address_is_bounded_by_itself() -> None:
    connections = table(connections_per_address=2)
    loud = [Peer("loud") for _ in range(3)]
    other = Peer("other")
    for peer in (*loud, other):
        assert connections.add(peer)
    assert [peer.is_shed for peer in loud] == [True, False, False]
    assert not other.is_shed
    for peer in (*loud, other):
        connections.remove(peer)
    assert connections.num_connections == connections.num_addresses == 0


def test_unfinished_bytes_are_bounded_over_all_and_per_address() -> None:
    for bounds in ({"input_bytes": 10}, {"input_bytes_per_address": 10}):
        connections = table(**bounds)
        first, second = Peer(), Peer()
        for peer in (first, second):
            connections.add(peer)
        connections.await_input(first, num_bytes=4)
        for num_bytes in (5, 6):  # one below the bound, and at it
            connections.await_input(second, num_bytes=num_bytes)
            assert not first.is_shed
            assert connections.num_input_bytes == 4 + num_bytes
        connections.await_input(second, num_bytes=7)
        assert first.is_shed, "who began first has had the most time"
        assert not second.is_shed
        assert connections.num_input_bytes == 7
        connections.await_input(second, num_bytes=11)
        assert second.is_shed
        assert connections.num_input_bytes == 0


def test_unread_bytes_are_bounded_over_all_and_per_address() -> None:
    for bounds in ({"output_bytes": 10}, {"output_bytes_per_address": 10}):
        connections = table(**bounds)
        first, second = Peer(), Peer()
        for peer in (first, second):
            connections.add(peer)
            connections.mark_served(peer)
        connections.await_reader(first, num_bytes=4)
        for num_bytes in (5, 6):  # one below the bound, and at it
            connections.await_reader(second, num_bytes=num_bytes)
            assert not first.is_shed
            assert connections.num_unread_bytes == 4 + num_bytes
        connections.await_reader(second, num_bytes=7)
        assert first.is_shed, "who stopped reading first has had the most time"
        connections.await_reader(second, num_bytes=11)
        assert not second.is_shed, "one answer may be larger than the bound"
        connections.await_reader(second, num_bytes=0)
        assert connections.num_unread_bytes == 0
        third = Peer()
        connections.add(third)
        connections.await_reader(third, num_bytes=10)
        connections.await_reader(second, num_bytes=10)
        assert third.is_shed, "who read everything has a new place"


@pytest.mark.parametrize("kind", ["input", "output"])
def test_one_message_evicts_few_at_a_time_and_the_rest_next(kind: str) -> None:
    async def run() -> list[int]:
        connections = table(**{f"{kind}_bytes": 100, f"{kind}_bytes_per_address": 100})
        wait = connections.await_input if kind == "input" else connections.await_reader
        peers = [Peer() for _ in range(80)]
        for peer in peers:
            connections.add(peer)
            wait(peer, num_bytes=1)
        large = Peer()
        connections.add(large)
        shed = []
        wait(large, num_bytes=90)
        while len(shed) < 5:
            shed.append(sum(peer.is_shed for peer in peers))
            await asyncio.sleep(0)
        return shed

    assert asyncio.run(run()) == [32, 64, 70, 70, 70]


def test_a_message_that_goes_on_keeps_its_place_and_the_next_one_gets_a_new_one() -> None:
    connections = table(input_bytes=10)
    first, second = Peer(), Peer()
    for peer in (first, second):
        connections.add(peer)
        connections.await_input(peer, num_bytes=1)
    connections.await_input(first, num_bytes=5)
    connections.mark_served(first)
    connections.await_input(first, num_bytes=5)
    connections.await_input(first, num_bytes=10)
    assert second.is_shed
    assert not first.is_shed


def test_the_books_of_the_table_balance_whatever_happens() -> None:
    chance, slow = random.Random(1), random.Random(2)
    connections = table(
        connections=12,
        connections_per_address=6,
        input_bytes=60,
        input_bytes_per_address=40,
        output_bytes=100,
        output_bytes_per_address=70,
    )
    shed: list[Peer] = []
    open_peers: list[Peer] = []
    num_refused = 0
    for _ in range(3000):
        if chance.random() < 0.3 or not open_peers:
            peer = Peer(chance.choice("abc"), shed_order=shed)
            num_refused += not connections.add(peer)
            open_peers.append(peer)
        peer = chance.choice(open_peers)
        match chance.randrange(8):
            case 0:
                connections.remove(peer)
                open_peers.remove(peer)
            case 1 | 2 | 3 | 4:
                connections.mark_served(peer)
            case _:
                connections.await_input(peer, num_bytes=chance.randrange(20))
        if open_peers and slow.random() < 0.05:
            connections.await_reader(slow.choice(open_peers), num_bytes=slow.choice((0, 20, 30)))
        alive = [peer for peer in open_peers if not peer.is_shed]
        assert connections.num_connections == len(alive) <= 12 + 1
        assert connections.num_input_bytes <= 60
        assert connections.num_unread_bytes <= 100
        for address in "abc":
            assert sum(peer.address == address for peer in alive) <= 6 + 1
    assert num_refused
    assert len(shed) > 100
    for peer in open_peers:
        connections.remove(peer)
    assert connections.num_connections == connections.num_input_bytes == 0
    assert connections.num_addresses == connections.num_unread_bytes == 0
