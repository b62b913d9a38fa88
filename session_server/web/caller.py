"""Who calls a route, and what the route works on: the one dependency of every route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from session_server.core.owner import Owner
from session_server.sessions.manager import SessionManager
from session_server.web.auth import authorize, services_of
from session_server.web.readers import Readers
from session_server.web.services import AppServices


@dataclass(frozen=True, slots=True)
class Call:
    """One request's owner and what it may use."""

    owner: Owner
    services: AppServices
    readers: Readers

    @property
    def sessions(self) -> SessionManager:
        """The sessions of the server."""
        return self.services.sessions


async def call_of(
    connection: HTTPConnection, owner: Annotated[Owner | None, Depends(authorize)]
) -> Call:
    """The call behind a connection that was authorised."""
    assert owner is not None, "only public routes have no owner"
    return make_call(connection, owner)


def make_call(connection: HTTPConnection, owner: Owner) -> Call:
    """The call of an owner who was authorised in another way."""
    readers = connection.app.state.readers
    assert isinstance(readers, Readers), "create_app set it"
    return Call(owner=owner, services=services_of(connection), readers=readers)


Caller = Annotated[Call, Depends(call_of)]
