"""Read request bodies and decode them with the wire schemas.

`GuardedHttp` bounds their size and how long they may take to arrive.
"""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from session_server.protocol.messages import decode
from session_server.web.headers import CONTENT_TYPE
from session_server.web.refusals import JSON, HttpRefusal

BodyT = TypeVar("BodyT")


async def read_body(request: Request, kind: type[BodyT], *, media_type: str | None = JSON) -> BodyT:
    """Read and decode one JSON body; an empty one counts as `{}`. `media_type` None accepts any.

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
        raise HttpRefusal(415, "The body must be application/json.")
    return decode(payload, kind)
