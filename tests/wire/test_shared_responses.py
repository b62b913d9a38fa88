"""Responses that several servers keep in one store, as their clients see them over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.chaos.crashes import FLAGS
from tests.rig.echo_replica import echo_replica
from tests.rig.postgres import running


@pytest.fixture(scope="module")
def servers() -> Iterator[list[httpx.Client]]:
    with running(is_synced=False) as postgres, ExitStack() as opened:
        store = postgres.new_database()
        urls = [opened.enter_context(echo_replica(store, FLAGS, lease_s=3)).url for _ in range(2)]
        yield [opened.enter_context(httpx.Client(base_url=url, timeout=30)) for url in urls]


def respond(server: httpx.Client, said: str, previous: str | None = None) -> dict[str, Any]:
    body = {"input": said, "max_output_tokens": 4, "previous_response_id": previous}
    answer = server.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["durable"] is True
    return found


def test_one_of_a_chain_is_deleted_where_the_others_are_not_known(
    servers: list[httpx.Client],
) -> None:
    first, second = servers
    oldest = respond(first, "red")
    newest = respond(first, "green", oldest["id"])
    assert second.delete(f"/v1/responses/{oldest['id']}").json()["durable"] is True
    for server in (second, first):
        newest = respond(server, "blue", newest["id"])
        assert newest["usage"]["input_tokens"] > 3 * 4, "all that was said before is there"


def test_a_session_goes_with_the_last_of_its_responses_wherever_they_are_deleted(
    servers: list[httpx.Client],
) -> None:
    first, second = servers
    oldest = respond(first, "red")
    newest = respond(second, "green", oldest["id"])
    num_before = len(second.get("/v1/sessions", params={"limit": 100}).json()["data"])
    for server, response in ((first, oldest), (second, newest)):
        assert server.delete(f"/v1/responses/{response['id']}").status_code == 200
    for _ in range(100):
        found = second.get("/v1/sessions", params={"limit": 100}).json()["data"]
        if len(found) == num_before - 1:
            break
    assert len(found) == num_before - 1


def test_a_conversation_is_deleted_where_it_is_not_known(servers: list[httpx.Client]) -> None:
    first, second = servers
    path = f"/v1/conversations/{first.post('/v1/conversations', json={}).json()['id']}"
    assert second.delete(path).json()["durable"] is True
    assert {server.get(path).status_code for server in servers} == {404}
