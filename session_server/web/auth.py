"""Authenticate callers: an API key identifies the owner of sessions.

The check is a dependency of the whole application: a route needs a key unless `PUBLIC_ROUTES` names
it. It looks at the matched route, never at the path.
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
