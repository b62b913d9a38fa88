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
from session_server.metrics.prometheus import ReaderKind
from session_server.protocol.messages import decode
from session_server.sessions.manager import SessionManager
from session_server.web.authenticator import Authenticator
from session_server.web.headers import AUTHORIZATION, CONTENT_TYPE
from session_server.web.keys import Credential
from session_server.web.readers import Readers
from session_server.web.refusals import JSON, HttpRefusal
from session_server.web.revocable_request import revocable_request
from session_server.web.services import AppServices
from session_server.web.slim_exit_stack import SlimExitStack

PUBLIC_ROUTES: Final = frozenset(
    (
        "index",
        "dashboard",
        "asset",
        "health",
        "ready",
        "docs",
        "openapi",
        "asyncapi",
        "schema",
    )
)
BEARER_PROTOCOL: Final = "bearer."
TICKET_PROTOCOL: Final = "ticket."

BodyT = TypeVar("BodyT")


def services_of(connection: HTTPConnection) -> AppServices:
    """Return the services that the routes work on."""
    services = connection.app.state.services
    assert isinstance(services, AppServices), "create_app set it"
    return services


def header_key(connection: HTTPConnection) -> str | None:
    """Return the key of the Authorization header; None without one, or with several, of which a
    proxy may have checked another."""
    headers = connection.headers.getlist(AUTHORIZATION)
    scheme, _, key = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def authenticator_of(connection: HTTPConnection) -> Authenticator:
    """Return what decides who gets in."""
    authenticator = connection.app.state.authenticator
    assert isinstance(authenticator, Authenticator), "create_app set it"
    return authenticator


async def authorize(connection: HTTPConnection) -> Credential | None:
    """Return who calls; None on the few public routes.

    Raises:
        Unauthorized: the key is missing or wrong.
    """
    route = connection.scope.get("route")
    if getattr(route, "name", None) in PUBLIC_ROUTES:
        return None
    authenticator = authenticator_of(connection)
    credential = authenticator.authenticate(header_key(connection))
    revocable_request(connection).begin(authenticator, credential)
    return credential


@dataclass(frozen=True, slots=True)
class Call:
    """Hold who sent one request, and the services it may use.

    `place`: what it holds while it waits for turns: it counts as a connection and as readers of
    sessions, and turns may be bound to it. All of that is taken before a turn is submitted, and
    given back once: with the request at the latest, and before the last event of a stream, because
    the client may send its next request then.
    """

    credential: Credential
    services: AppServices
    readers: Readers
    authenticator: Authenticator
    resources: SlimExitStack

    @property
    def owner(self) -> Owner:
        """Return whose sessions and responses the request is about."""
        return self.credential.owner

    @property
    def sessions(self) -> SessionManager:
        """Return the session manager."""
        return self.services.sessions

    def connect(self, kind: ReaderKind = ReaderKind.HTTP) -> None:
        """Count the request as a connection. Raises QuotaExceeded, ServerBusy."""
        self.resources.enter_context(self.readers.connected(self.owner, kind))


async def call_of(
    connection: HTTPConnection, credential: Annotated[Credential | None, Depends(authorize)]
) -> Call:
    """Return the call of a connection that `authorize` admitted."""
    assert credential is not None, "only public routes have none"
    return make_call(connection, credential, revocable_request(connection).resources)


def make_call(connection: HTTPConnection, credential: Credential, resources: SlimExitStack) -> Call:
    """Return the call of somebody who was authorized in another way."""
    readers = connection.app.state.readers
    assert isinstance(readers, Readers), "create_app set it"
    return Call(
        credential=credential,
        services=services_of(connection),
        readers=readers,
        authenticator=authenticator_of(connection),
        resources=resources,
    )


Caller = Annotated[Call, Depends(call_of)]


async def admin_call_of(call: Caller) -> Call:
    """Return the call of a key that may use routes about the sessions of every key. Raises
    HttpRefusal."""
    if not call.owner.is_admin:
        raise HttpRefusal(403, "This key has no admin=1 in the key file.")
    return call


async def metrics_call_of(call: Caller) -> Call:
    """Return the call of a key that may read the totals of all keys. Raises HttpRefusal."""
    if not call.owner.sees_metrics:
        raise HttpRefusal(403, "This key has neither metrics=1 nor admin=1 in the key file.")
    return call


AdminCaller = Annotated[Call, Depends(admin_call_of)]
MetricsCaller = Annotated[Call, Depends(metrics_call_of)]


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
