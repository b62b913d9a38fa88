"""Responses and conversations that several replicas read and write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from session_server.core.errors import SessionMoved
from tests.sessions.test_replicas import Cluster, Replica
from tests.sessions.test_stored_dialects import Desk
from tests.sessions.world import OWNER


@pytest.fixture
def cluster(url: str) -> Iterator[Cluster]:
    made = Cluster(url)
    yield made
    for replica in list(made.replicas):
        made.stop(replica)
    made.loop.close()


def state_of(replica: Replica, desk: Desk, name: str) -> str:
    """How a response is shown by a replica."""
    replica.world.do(desk.turns.store.load(OWNER, name))
    return desk.find(name).content.state


# -- responses in the background


def test_a_response_that_another_replica_runs_is_shown_as_running(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    here, there = Desk(first.world), Desk(second.world)
    here.begin("one", is_background=True)
    assert state_of(second, there, "resp_one") == "running"
    with pytest.raises(SessionMoved, match="at http://replica-0: ask there"):
        there.find("resp_one").check_here()
    assert state_of(first, here, "resp_one") == "running"
    here.find("resp_one").check_here()
    first.world.engine.run()
    first.world.do(first.world.manager.stored())
    assert state_of(second, there, "resp_one") == "said"
    there.find("resp_one").check_here()


def test_a_response_has_failed_once_the_lease_of_its_replica_is_over(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    there = Desk(second.world)
    Desk(first.world).begin("one", is_background=True)
    assert state_of(second, there, "resp_one") == "running"
    cluster.pause(first)
    first.lease._until_s = 0.0
    cluster.until(lambda: second.database.address_of(first.database.replica_id) is None)
    assert state_of(second, there, "resp_one") == "lost"
    assert there.find("resp_one").content.body == b"interrupted"
    there.find("resp_one").check_here()
    # It begins another lease, in which nothing runs.
    first.world.do(first.lease._renew())
    assert state_of(second, there, "resp_one") == "lost"


def test_a_response_that_ends_while_it_is_asked_for_is_not_shown_as_failed(
    cluster: Cluster,
) -> None:
    first, second = cluster.start(), cluster.start()
    there = Desk(second.world)
    Desk(first.world).begin("one", is_background=True)

    async def asked_when_it_has_left(_replica_id: int) -> None:
        first.world.engine.run()
        await first.world.manager.stored()

    there.turns.store._log.address_of = asked_when_it_has_left  # type: ignore[method-assign]
    assert state_of(second, there, "resp_one") == "said"
