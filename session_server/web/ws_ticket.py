"""Serve tickets, with which pages open WebSockets."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from session_server.protocol.resources import TicketBody
from session_server.web.openapi import answers
from session_server.web.refusals import JsonResponse
from session_server.web.requests import Caller
from session_server.web.tickets import TICKET_TTL_S

router = APIRouter(prefix="/v1", tags=["sockets"])


@router.post("/ws-ticket", responses=answers(TicketBody, "The ticket, for one handshake."))
async def make_ticket(caller: Caller) -> Response:
    """Make a ticket that opens one WebSocket, in place of this request's key."""
    ticket = caller.authenticator.tickets.issue(caller.credential)
    body = TicketBody(ticket=ticket, expires_in_s=TICKET_TTL_S)
    return JsonResponse(body, headers={"cache-control": "no-store"})
