"""Provide the one dependency of every route: who calls, and the services to use."""

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
    """Hold the owner of one request and the services it may use."""

    owner: Owner
    services: AppServices
    readers: Readers

    @property
    def sessions(self) -> SessionManager:
        """Return the session manager."""
        return self.services.sessions


async def call_of(
    connection: HTTPConnection, owner: Annotated[Owner | None, Depends(authorize)]
) -> Call:
    """Return the call of a connection that `authorize` admitted."""
    assert owner is not None, "only public routes have no owner"
    return make_call(connection, owner)


def make_call(connection: HTTPConnection, owner: Owner) -> Call:
    """Return the call of an owner who was authorized in another way."""
    readers = connection.app.state.readers
    assert isinstance(readers, Readers), "create_app set it"
    return Call(owner=owner, services=services_of(connection), readers=readers)


Caller = Annotated[Call, Depends(call_of)]
