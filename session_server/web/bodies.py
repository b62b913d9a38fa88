"""Request bodies: bounded in size and time, decoded by the wire schemas and by nothing else."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from session_server.protocol.messages import decode
from session_server.web.auth import services_of
from session_server.web.refusals import JSON, HttpRefusal

BodyT = TypeVar("BodyT")


async def read_body(request: Request, kind: type[BodyT], *, media_type: str | None = JSON) -> BodyT:
    """Read and decode one JSON body; an empty one counts as `{}`. `media_type` None takes any.

    Raises:
        HttpRefusal: too large, too slow, or not JSON by its media type.
        InvalidRequest: it does not decode.
    """
    settings = services_of(request).settings
    payload = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                payload += chunk
                if len(payload) > settings.max_message_bytes:
                    raise HttpRefusal(
                        413, f"The body is larger than {settings.max_message_bytes} bytes."
                    )
    except TimeoutError:
        raise HttpRefusal(408, "The body did not arrive in time.") from None
    except ClientDisconnect:
        raise HttpRefusal(400, "The body is incomplete.") from None
    if not payload:
        return decode(b"{}", kind)
    said = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media_type is not None and said != media_type:
        raise HttpRefusal(415, "The body must be application/json.")
    return decode(bytes(payload), kind)
