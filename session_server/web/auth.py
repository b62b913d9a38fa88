"""Who asks: an API key becomes the owner of sessions, and without one nothing is shown.

Keys are kept and compared as digests, in constant time. The check is a dependency of the whole
application, so that a route is closed unless it is named in `PUBLIC_ROUTES`; it looks at the route
that was matched, never at the path.
"""

from __future__ import annotations

import hmac
from typing import Final

from starlette.requests import HTTPConnection

from session_server.core.errors import Unauthorized
from session_server.core.owner import Owner
from session_server.web.services import AppServices, digest_of

PUBLIC_ROUTES: Final = frozenset({"index", "health", "ready"})
ANONYMOUS: Final = Owner("anonymous")
MAX_KEY_CHARS: Final = 512
BEARER_PROTOCOL: Final = "bearer."


def services_of(connection: HTTPConnection) -> AppServices:
    """What the routes work on."""
    services = connection.app.state.services
    assert isinstance(services, AppServices), "create_app set it"
    return services


def owner_of(services: AppServices, key: str | None) -> Owner:
    """The owner behind a key.

    Raises:
        Unauthorized: keys are required, and this is none of them.
    """
    digests = services.settings.key_digests
    if not digests:
        return ANONYMOUS
    digest = digest_of((key or "")[:MAX_KEY_CHARS])
    # Every digest is compared, so that the time tells nothing.
    matches = [hmac.compare_digest(digest, known) for known in digests]
    if key is None or not any(matches):
        raise Unauthorized("A valid API key is required: Authorization: Bearer <key>.")
    return Owner(digest)


def header_key(connection: HTTPConnection) -> str | None:
    """The key of an Authorization header, if there is one."""
    scheme, _, key = connection.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


async def authorize(connection: HTTPConnection) -> Owner | None:
    """The owner who asks; None on the few routes that are open.

    Raises:
        Unauthorized: no or a wrong key.
    """
    route = connection.scope.get("route")
    if getattr(route, "name", None) in PUBLIC_ROUTES:
        return None
    return owner_of(services_of(connection), header_key(connection))
