"""Read requests: who calls, the services to use, and the body.

`authorize` is a dependency of the whole application: a route needs a key unless `PUBLIC_ROUTES`
names it. It looks at the matched route, never at the path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

from fastapi import Depends
from starlette.requests import ClientDisconnect, HTTPConnection, Request

from session_server.core.owner import Owner
from session_server.protocol.messages import decode
from session_server.sessions.manager import SessionManager
from session_server.web.headers import AUTHORIZATION, CONTENT_TYPE
from session_server.web.readers import Readers
from session_server.web.refusals import JSON, HttpRefusal
from session_server.web.services import AppServices

PUBLIC_ROUTES: Final = frozenset(
    {"index", "health", "ready", "docs", "openapi", "asyncapi", "schema"}
)
BEARER_PROTOCOL: Final = "bearer."

BodyT = TypeVar("BodyT")


def services_of(connection: HTTPConnection) -> AppServices:
    """Return the services that the routes work on."""
    services = connection.app.state.services
    assert isinstance(services, AppServices), "create_app set it"
    return services


def header_key(connection: HTTPConnection) -> str | None:
    """Return the key of the Authorization header; None without one."""
    scheme, _, key = connection.headers.get(AUTHORIZATION, "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


async def authorize(connection: HTTPConnection) -> Owner | None:
    """Return the owner who calls; None on the few public routes.

    Raises:
        Unauthorized: the key is missing or wrong.
    """
    route = connection.scope.get("route")
    if getattr(route, "name", None) in PUBLIC_ROUTES:
        return None
    return services_of(connection).settings.keys.owner_of(header_key(connection))


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

    def require_admin(self) -> None:
        """Raise HttpRefusal if routes about the sessions of every key are not for this one."""
        if not self.owner.is_admin:
            raise HttpRefusal(403, "This key has no admin=1 in the key file.")


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


async def read_body(request: Request, kind: type[BodyT], *, media_type: str | None = JSON) -> BodyT:
    """Read and decode one JSON body; an empty one counts as `{}`. `media_type` None accepts any.

    `GuardedHttp` bounds its size and how long it may take to arrive.

    Raises:
        HttpRefusal: the body is incomplete, or its media type is not JSON.
        InvalidRequest: the body does not match the schema.
    """
    try:
        payload = await request.body()
    except ClientDisconnect:
        raise HttpRefusal(400, "The body is incomplete.") from None
    if not payload:
        return decode(b"{}", kind)
    said = request.headers.get(CONTENT_TYPE, JSON).partition(";")[0].strip().lower()
    if media_type is not None and said != media_type:
        raise HttpRefusal(
            415, "The body must be JSON. Send the header content-type: application/json."
        )
    return decode(payload, kind)
