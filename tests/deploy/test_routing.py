"""The key of a request, from what is known before its body is read."""

from __future__ import annotations

from typing import Any

import pytest

from session_server.deploy.routing import (
    MAX_KEY_CHARS,
    MAX_QUERY_FIELDS,
    key_for,
    routing_key,
    tag_in,
    tag_of,
)
from session_server.sessions.quotas import SessionLimits
from tests.sessions.world import World

TAG = tag_of("abc123")


def scope(path: str, query: str = "", root: str = "", **headers: str) -> dict[str, Any]:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"path": path, "root_path": root, "query_string": query.encode(), "headers": given}


@pytest.mark.parametrize(
    ("request_scope", "key"),
    [
        (scope("/v1/sessions/s_1/ws"), "s_1"),
        (scope("/v1/sessions/s_1/turns/t/cancel"), "s_1"),
        (scope("/v1/admin/sessions/s_1/close"), "s_1"),
        (scope("/v1/conversations/conv_1/items"), "conv_1"),
        (scope("/v1/responses/resp_1"), "resp_1"),
        (scope("/under/v1/sessions/s_1", root="/under"), "s_1"),
        (scope("/v1/sessions/s_1", x_session_id="other"), "s_1"),
        (scope("/v1/chat/completions", x_session_id="ada"), "ada"),
        (scope("/v1/sessions/new/ws", x_session_id="ada"), "ada"),
        (scope("/v1/responses", x_conversation_id="ada", thread_id="bob"), "ada"),
        (scope("/v1/responses", x_session_affinity="ada"), "ada"),
        (scope("/v1/sessions", idempotency_key="once"), "once"),
        (scope("/v1/sessions", x_session_id="ada", idempotency_key="once"), "ada"),
        (scope("/metrics", f"replica={TAG}"), key_for(TAG)),
        ({**scope("/v1/sessions/s_1/ws"), "subprotocols": ["kvsession.v1"]}, "s_1"),
        (
            {**scope("/v1/sessions/s_1/ws"), "subprotocols": ["kvsession.v1", f"ticket.{TAG}xY_-"]},
            key_for(TAG),
        ),
        ({**scope("/v1/sessions/s_1/ws"), "subprotocols": ["ticket.xyz"]}, "s_1"),
        (scope("/v1/sessions/new/ws"), None),
        (scope("/v1/sessions"), None),
        (scope("/v1/chat/completions", authorization="Bearer k"), None),
        (scope("/metrics", "replica="), None),
        (scope("/"), None),
        ({"type": "websocket"}, None),
    ],
    ids=str,
)
def test_the_key_of_a_request(request_scope: dict[str, Any], key: str | None) -> None:
    assert routing_key(request_scope) == key


def test_a_key_is_bounded_however_long_its_header_is() -> None:
    key = routing_key(scope("/v1/chat/completions", x_session_id="x" * 10_000))
    assert key == "x" * MAX_KEY_CHARS


def test_a_query_of_too_many_fields_names_no_replica() -> None:
    query = f"replica={TAG}" + "&a=1" * MAX_QUERY_FIELDS
    assert routing_key(scope("/metrics", query)) is None
    assert routing_key(scope("/v1/chat/completions", query, x_session_id="ada")) == "ada"


def test_an_id_names_the_replica_that_gave_it() -> None:
    assert tag_in(key_for(TAG)) == TAG
    assert tag_in(f"s_{TAG}{'0' * 24}") == TAG
    assert tag_in("s_ada") is None
    assert tag_in("ada") is None


def test_the_ids_that_a_replica_gives_begin_with_its_tag_and_are_as_long_as_any() -> None:
    with World() as plain, World(limits=SessionLimits(replica_tag=TAG)) as tagged:
        ids = {tagged.create() for _ in range(8)}
        assert len(ids) == 8
        assert {tag_in(each) for each in ids} == {TAG}
        assert {len(each) for each in ids} == {len(plain.create())}
        assert tagged.create(session_id="s_ada") == "s_ada", "a client's own id stays as it is"
