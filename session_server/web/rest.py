"""Serve sessions and their turns as REST resources."""

from __future__ import annotations

import contextlib
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from session_server.core.errors import InvalidRequest
from session_server.core.session_events import Message, TurnFailedEntry
from session_server.metrics.prometheus import ReaderKind
from session_server.protocol.frames import AnyServerFrame, TurnFrame
from session_server.protocol.messages import (
    MAX_SEQ,
    CancelBody,
    DraftBody,
    EditBody,
    ForkBody,
    OpenBody,
    RewindBody,
    TurnBody,
    UpdateBody,
    chat_messages,
    draft_request,
    turn_request,
)
from session_server.protocol.resources import (
    DraftResultBody,
    ItemList,
    SessionBody,
    SessionList,
    TurnResultBody,
)
from session_server.sessions.views import DraftView, OpenRequest
from session_server.web.event_stream import EventStream, until_disconnect
from session_server.web.headers import ACCEPT, IDEMPOTENCY_KEY, LAST_EVENT_ID
from session_server.web.openapi import answers, body_of, reads_headers
from session_server.web.refusals import HttpRefusal, JsonResponse, failure_response
from session_server.web.requests import Caller, read_body
from session_server.web.slices import encode_list, encode_page
from session_server.web.turns import TurnReader, session_events
from session_server.web.views import session_body, turn_body, turn_result


async def _load(request: Request, caller: Caller) -> None:
    """Bring a long session into memory in slices, before a route asks for it, which awaits nothing
    before that. One that is to be deleted is not read."""
    session_id = request.path_params.get("session_id")
    if session_id is not None and request.method != "DELETE":
        with contextlib.suppress(ClientDisconnect):  # `read_body` refuses it
            await request.body()
        await caller.sessions.load(caller.owner, session_id)


router = APIRouter(prefix="/v1/sessions", tags=["sessions"], dependencies=[Depends(_load)])

MAX_PAGE = 1000
MAX_PAGE_BYTES = 1 << 20
"""Bytes of JSON in a page of sessions, unless its first session alone has more."""

MAX_KEY_CHARS = 128
AfterSeq = Annotated[int | None, Query(ge=0, le=MAX_SEQ)]


@router.post(
    "",
    status_code=201,
    openapi_extra=body_of(
        OpenBody,
        required=False,
        headers={IDEMPOTENCY_KEY: "repeated with a request, it gives the same session"},
    ),
    responses=answers(SessionBody, "The new session.", status=201),
)
async def open_session(request: Request, caller: Caller) -> Response:
    """Open a session. A request repeated with its `Idempotency-Key` gives the same session."""
    body = await read_body(request, OpenBody)
    caller.services.check_model(body.model)
    key = None if body.id is not None else request.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not 1 <= len(key) <= MAX_KEY_CHARS:
        raise InvalidRequest("The Idempotency-Key is too long or empty.", param=IDEMPOTENCY_KEY)
    view = await caller.sessions.create(caller.owner, _open_request(body, key))
    location = {"location": f"/v1/sessions/{view.session_id}"}
    return JsonResponse(session_body(view, caller.services.model), 201, location)


def _open_request(body: OpenBody, key: str | None) -> OpenRequest:
    messages = chat_messages(body.messages or ())
    if body.instructions is not None:
        messages = (Message(role="system", content=body.instructions), *messages)
    return OpenRequest(
        session_id=body.id,
        messages=messages,
        ttl_s=body.ttl_s,
        metadata=body.metadata or {},
        pinned=body.pinned,
        history=body.history,
        idempotency_key=key,
        is_stored=True,
    )


@router.get("", responses=answers(SessionList, "A page of your sessions, oldest first."))
async def list_sessions(
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    after: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    """List your sessions. A page of large metadata has fewer than `limit`."""
    page = await caller.sessions.list(caller.owner, limit=limit, after=after)
    model = caller.services.model
    bodies = (session_body(view, model) for view in page.sessions)
    data, count = await encode_page(bodies, max_bytes=MAX_PAGE_BYTES)
    page = page.first(count)
    return JsonResponse(
        SessionList(object="list", data=data, has_more=page.has_more, next_after=page.next_after)
    )


@router.get("/{session_id}", responses=answers(SessionBody, "The session."))
async def get_session(session_id: str, caller: Caller) -> Response:
    """Show one session."""
    view = caller.sessions.get(caller.owner, session_id)
    return JsonResponse(session_body(view, caller.services.model))


@router.patch(
    "/{session_id}",
    openapi_extra=body_of(UpdateBody, required=False),
    responses=answers(SessionBody, "The session with its effective settings."),
)
async def update_session(session_id: str, request: Request, caller: Caller) -> Response:
    """Change a session's time to live or metadata, or pin it."""
    body = await read_body(request, UpdateBody)
    if body.pinned is not None:
        caller.sessions.edits.retention.pin(caller.owner, session_id, pinned=body.pinned)
    view = caller.sessions.update(
        caller.owner, session_id, ttl_s=body.ttl_s, metadata=body.metadata
    )
    view = await caller.sessions.edits.stored_view(caller.owner, view)
    return JsonResponse(session_body(view, caller.services.model))


@router.delete("/{session_id}", responses=answers(SessionBody, "The session as it closes."))
async def close_session(session_id: str, caller: Caller) -> Response:
    """Close a session; a running turn is canceled first."""
    view = await caller.sessions.exits.delete(caller.owner, session_id)
    return JsonResponse(session_body(view, caller.services.model))


@router.get("/{session_id}/items", responses=answers(ItemList, "The conversation so far."))
async def list_items(session_id: str, caller: Caller) -> Response:
    """List a session's items."""
    snapshot = await caller.sessions.settled_snapshot(caller.owner, session_id)
    data = await encode_list(snapshot.items)
    return JsonResponse(ItemList(object="list", data=data))


@router.patch(
    "/{session_id}/items/{item_id}",
    openapi_extra=body_of(EditBody),
    responses=answers(SessionBody, "The session, which ends with the edited item."),
)
async def edit_item(session_id: str, item_id: str, request: Request, caller: Caller) -> Response:
    """Give an item another text. The items behind it go; the next turn goes on from it."""
    body = await read_body(request, EditBody)
    view = caller.sessions.edits.edit_item(caller.owner, session_id, item_id, body.content)
    view = await caller.sessions.edits.stored_view(caller.owner, view)
    return JsonResponse(session_body(view, caller.services.model))


@router.post(
    "/{session_id}/rewind",
    openapi_extra=body_of(RewindBody),
    responses=answers(SessionBody, "The session, which ends with that item."),
)
async def rewind_session(session_id: str, request: Request, caller: Caller) -> Response:
    """Go back to an item."""
    body = await read_body(request, RewindBody)
    view = caller.sessions.edits.rewind(caller.owner, session_id, body.to_item)
    view = await caller.sessions.edits.stored_view(caller.owner, view)
    return JsonResponse(session_body(view, caller.services.model))


@router.post("/{session_id}/cool", responses=answers(SessionBody, "The session, which is cold."))
async def cool_session(session_id: str, caller: Caller) -> Response:
    """Leave the KV of a session to the radix tree."""
    view = caller.sessions.edits.retention.cool(caller.owner, session_id)
    return JsonResponse(session_body(view, caller.services.model))


@router.post("/{session_id}/warm", responses=answers(SessionBody, "The session as it is."))
async def warm_session(session_id: str, caller: Caller) -> Response:
    """Bring back what is kept of a session's KV outside of the pools, if there is room for it."""
    view = caller.sessions.edits.retention.warm(caller.owner, session_id)
    return JsonResponse(session_body(view, caller.services.model))


@router.post(
    "/{session_id}/fork",
    status_code=201,
    openapi_extra=body_of(ForkBody, required=False),
    responses=answers(SessionBody, "The new session.", status=201),
)
async def fork_session(session_id: str, request: Request, caller: Caller) -> Response:
    """Open a session with this one's conversation, or its beginning."""
    body = await read_body(request, ForkBody)
    edits = caller.sessions.edits
    view = await edits.fork_as(caller.owner, session_id, body.id, at_item=body.at_item)
    view = await edits.stored_view(caller.owner, view)
    location = {"location": f"/v1/sessions/{view.session_id}"}
    return JsonResponse(session_body(view, caller.services.model), 201, location)


@router.post(
    "/{session_id}/turns",
    openapi_extra=body_of(TurnBody),
    responses=answers(
        TurnResultBody, "The turn's end; or its events, for text/event-stream.", events=TurnFrame
    ),
)
async def create_turn(session_id: str, request: Request, caller: Caller) -> Response:
    """Run one turn, and wait for its end or stream its events.

    A client that leaves cancels the turn, and keeps its partial answer in the history, unless
    `on_disconnect` is `detach`.
    """
    caller.connect()
    body = await read_body(request, TurnBody)
    turn = turn_request(body, defaults=caller.services.model.defaults, on_disconnect="cancel")
    keep_partial = True if turn.on_disconnect == "cancel" else None
    reader = TurnReader(caller, session_id, keep_partial=keep_partial)
    work = caller.sessions.submit(caller.owner, session_id, turn)
    try:
        reader.follow(await until_disconnect(work, request.receive))
    except HttpRefusal:
        reader.bind(turn.turn_id)
        raise
    if "text/event-stream" in request.headers.get(ACCEPT, ""):
        return EventStream(reader.events())
    end = await reader.end(request.receive)
    if isinstance(end, TurnFailedEntry):
        return failure_response(end)
    return JsonResponse(await turn_result(session_id, end))


@router.post(
    "/{session_id}/draft",
    openapi_extra=body_of(DraftBody),
    responses=answers(DraftResultBody, "How far it was computed."),
)
async def draft_turn(session_id: str, request: Request, caller: Caller) -> Response:
    """Say what the next turn would be if it were sent now, and wait until that is computed.

    Each draft takes the place of the one before. A client that leaves drops nothing.
    """
    body = await read_body(request, DraftBody)
    draft = draft_request(body, defaults=caller.services.model.defaults)
    if draft is None:
        caller.sessions.drafts.abandon(caller.owner, session_id)
        answer = DraftView("", 0, 0, 0)
    else:
        caller.connect()
        work = caller.sessions.drafts.compute(caller.owner, session_id, draft)
        answer = await until_disconnect(work, request.receive)
    return JsonResponse(
        DraftResultBody(
            object="draft",
            draft_id=body.draft_id,
            processed=answer.processed,
            kept=answer.kept,
            total=answer.total,
        )
    )


@router.get("/{session_id}/turns/{turn_id}", responses=answers(TurnResultBody, "The turn now."))
async def get_turn(session_id: str, turn_id: str, caller: Caller) -> Response:
    """Show a turn that waits, runs or has ended."""
    return JsonResponse(await turn_body(caller.sessions.turn(caller.owner, session_id, turn_id)))


@router.post(
    "/{session_id}/turns/{turn_id}/cancel",
    openapi_extra=body_of(CancelBody, required=False),
    responses=answers(TurnResultBody, "The turn as it ends."),
)
async def cancel_turn(session_id: str, turn_id: str, request: Request, caller: Caller) -> Response:
    """Cancel a turn."""
    body = await read_body(request, CancelBody)
    view = caller.sessions.cancel(caller.owner, session_id, turn_id, keep_partial=body.keep_partial)
    return JsonResponse(await turn_body(view))


@router.get(
    "/{session_id}/events",
    openapi_extra=reads_headers({LAST_EVENT_ID: "the `seq` of the last event that was seen"}),
    responses=answers(
        None,
        "Frames of `kvsession.v1` as events: replay after `after`, then live.",
        events=AnyServerFrame,
    ),
)
async def read_events(
    session_id: str,
    request: Request,
    caller: Caller,
    after: AfterSeq = None,
) -> Response:
    """Follow a session. `Last-Event-ID` wins over `after`; without both it starts now."""
    caller.connect(ReaderKind.SSE)
    caller.sessions.edits.retention.attach(caller.owner, session_id)
    journal = caller.sessions.journal(caller.owner, session_id)
    caller.resources.enter_context(caller.readers.reading(caller.owner, session_id))
    start = _last_event_id(request)
    if start is None:
        start = after
    if start is None:
        start = journal.last_seq
    elif journal.first_seq - 1 <= start <= journal.last_seq:
        caller.services.metrics.count_resume("resumed")
    return EventStream(session_events(caller, session_id, after=start))


def _last_event_id(request: Request) -> int | None:
    text = request.headers.get(LAST_EVENT_ID)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        raise HttpRefusal(400, "Last-Event-ID is not a sequence number.", param="last-event-id")
    return int(text)
