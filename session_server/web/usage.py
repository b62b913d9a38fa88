"""Serve what a tenant holds of its quotas."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from session_server.protocol.resources import QuotasBody, TenantUsageBody
from session_server.sessions.usage import quota_uses
from session_server.web.openapi import answers
from session_server.web.refusals import JsonResponse
from session_server.web.requests import Caller

router = APIRouter(prefix="/v1", tags=["sessions"])


@router.get("/usage", responses=answers(TenantUsageBody, "Your quotas."))
async def show_usage(caller: Caller) -> Response:
    """Show what you hold of each quota, and may hold; nothing of any other tenant."""
    edits = caller.sessions.edits
    uses = quota_uses(
        edits.parts.quotas,
        caller.owner,
        num_connections=caller.readers.num_of(caller.owner),
        now_s=edits.clock(),
    )
    quotas = msgspec.convert(uses, QuotasBody, from_attributes=True)
    return JsonResponse(TenantUsageBody(object="usage", quotas=quotas))
