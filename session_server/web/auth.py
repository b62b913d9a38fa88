"""Who asks: an API key becomes the owner of sessions, and without one nothing is shown.

The check is a dependency of the whole application, so that a route is closed unless it is named in
`PUBLIC_ROUTES`; it looks at the route that was matched, never at the path.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import HTTPConnection

from session_server.core.owner import Owner
from session_server.web.headers import AUTHORIZATION
from session_server.web.services import AppServices

PUBLIC_ROUTES: Final = frozenset({"index", "health", "ready"})
BEARER_PROTOCOL: Final = "bearer."


def services_of(connection: HTTPConnection) -> AppServices:
    """What the routes work on."""
    services = connection.app.state.services
    assert isinstance(services, AppServices), "create_app set it"
    return services


def header_key(connection: HTTPConnection) -> str | None:
    """The key of an Authorization header, if there is one."""
    scheme, _, key = connection.headers.get(AUTHORIZATION, "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


async def authorize(connection: HTTPConnection) -> Owner | None:
    """The owner who asks; None on the few routes that are open.

    Raises:
        Unauthorized: no or a wrong key.
    """
    route = connection.scope.get("route")
    if getattr(route, "name", None) in PUBLIC_ROUTES:
        return None
    return services_of(connection).settings.keys.owner_of(header_key(connection))
