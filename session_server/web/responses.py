"""Serve OpenAI's Responses over HTTP.

A response is a turn of a session. One with `background` runs on when its client leaves, and can be
read again; any other is canceled then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from session_server.core.errors import (
    InternalInconsistency,
    ItemNotFound,
    SessionNotFound,
    TurnNotActive,
    TurnNotFound,
)
from session_server.protocol.messages import MAX_SEQ
from session_server.protocol.response_body import (
    CompactionBody,
    InputTokenCount,
    ResponseBody,
    ResponseDeleted,
    ResponseItems,
)
from session_server.protocol.response_events import ResponseEvent, ResponseEvents
from session_server.protocol.response_items import AnyItem, message_items, message_number
from session_server.protocol.responses import CompactBody, InputTokensBody, ResponseCreateBody
from session_server.sessions.response_turns import ResponseTurns
from session_server.sessions.responses import StoredResponse
from session_server.web.compaction import compact
from session_server.web.event_stream import DONE, EventStream, until_disconnect
from session_server.web.headers import REQUEST_ID
from session_server.web.openapi import answers, body_of
from session_server.web.refusals import JsonResponse
from session_server.web.requests import Call, Caller, read_body
from session_server.web.response_run import (
    count_tokens,
    event_bytes,
    parse,
    resume_response,
    start_response,
)
from session_server.web.slices import encode_list

router = APIRouter(prefix="/v1/responses", tags=["openai"])

MAX_ITEM_PAGE: Final = 100


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Say which page of items is asked for: those behind the one of id `after`."""

    limit: Annotated[int, Query(ge=1, le=MAX_ITEM_PAGE)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str | None, Query(max_length=128)] = None


Page = Annotated[PageQuery, Depends()]


def turns_of(request: Request) -> ResponseTurns:
    """Return what runs the responses of this server."""
    turns = request.app.state.responses
    assert isinstance(turns, ResponseTurns), "create_app set it"
    return turns


async def _find(request: Request, call: Call, response_id: str) -> StoredResponse:
    await turns_of(request).store.load(call.owner, response_id)
    return turns_of(request).store.find(call.owner, response_id, scope=None)


@router.post(
    "",
    openapi_extra=body_of(ResponseCreateBody),
    responses=answers(
        ResponseBody, "The response; or its events, with `stream`.", events=ResponseEvent
    ),
)
async def create_response(request: Request, caller: Caller) -> Response:
    """Answer an input."""
    caller.connect()
    body = await read_body(request, ResponseCreateBody)
    turns = turns_of(request)
    asked = await parse(turns, caller, body)
    work = start_response(caller, turns, asked)
    run = await (work if body.background else until_disconnect(work, request.receive))
    headers = {REQUEST_ID: asked.response_id}
    if body.stream:
        return EventStream(run.stream(), headers=headers)
    if asked.body.background:
        return JsonResponse(msgspec.Raw(run.stored.content.body), headers=headers)
    answer = await run.response(request.receive)
    answer.headers.update(headers)
    return answer


@router.post(
    "/input_tokens",
    openapi_extra=body_of(InputTokensBody),
    responses=answers(InputTokenCount, "The tokens of the context that it would have."),
)
async def count_input_tokens(request: Request, caller: Caller) -> Response:
    """Count the tokens of an input, and of all that it goes on from."""
    body = await read_body(request, InputTokensBody)
    turns = turns_of(request)
    num_tokens = await count_tokens(turns, caller, await parse(turns, caller, body))
    return JsonResponse(InputTokenCount(input_tokens=num_tokens))


@router.post(
    "/compact",
    openapi_extra=body_of(CompactBody),
    responses=answers(CompactionBody, "What stands for the conversation from here on."),
)
async def compact_response(request: Request, caller: Caller) -> Response:
    """Let the model sum a conversation up."""
    caller.connect()
    body = await read_body(request, CompactBody)
    return await compact(turns_of(request), caller, body, request.receive)


@router.get(
    "/{response_id}",
    responses=answers(
        ResponseBody,
        "The response as it is now; or its events, with `stream`.",
        events=ResponseEvent,
    ),
)
async def get_response(
    response_id: str,
    request: Request,
    caller: Caller,
    *,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1, le=MAX_SEQ)] = -1,
) -> Response:
    """Show a response, or read its events again behind number `starting_after`."""
    stored = await _find(request, caller, response_id)
    if not stream:
        return JsonResponse(msgspec.Raw(_shown(stored)))
    stored.check_here()
    caller.connect()
    run = resume_response(caller, stored)
    if run is not None:
        return EventStream(run.stream(after=starting_after))
    body = msgspec.json.decode(stored.content.body, type=ResponseBody)
    events = ResponseEvents(body.begun())
    kept = list(events.replay(body)) if starting_after < 0 else []
    kept = kept or [events.last(body, after=starting_after)]
    payload = b"".join((*map(event_bytes, kept), DONE))
    return Response(payload, media_type="text/event-stream")


def _shown(stored: StoredResponse) -> bytes:
    """Return a response as its client sees it now."""
    if stored.runs_at is None:
        return stored.content.body
    return msgspec.json.encode(msgspec.json.decode(stored.content.body, type=ResponseBody).begun())


@router.delete("/{response_id}", responses=answers(ResponseDeleted, "It is gone."))
async def delete_response(response_id: str, request: Request, caller: Caller) -> Response:
    """Forget a response. Others that went on from it stay."""
    turns = turns_of(request)
    with contextlib.suppress(InternalInconsistency):  # one that cannot be read can be deleted
        await turns.store.load(caller.owner, response_id)
    await turns.store.records.look_up_beside(caller.owner, response_id)
    number = turns.store.records.number_of(caller.owner, response_id)
    if not turns.forget_unread(caller.owner, response_id):
        stored = await _find(request, caller, response_id)
        stored.check_here()
        if stored.content.state == "running":
            with contextlib.suppress(SessionNotFound, TurnNotFound, TurnNotActive):
                session_id = stored.made_in
                caller.sessions.cancel(caller.owner, session_id, response_id, keep_partial=False)
        turns.forget(stored)
    await caller.sessions.stored()
    is_gone = turns.store.records.is_gone(number)
    return JsonResponse(ResponseDeleted(id=response_id, durable=is_gone))


@router.post("/{response_id}/cancel", responses=answers(ResponseBody, "The response as it ends."))
async def cancel_response(response_id: str, request: Request, caller: Caller) -> Response:
    """Cancel a response that runs; what it has said stays. One that has ended is shown."""
    stored = await _find(request, caller, response_id)
    stored.check_here()
    is_running = stored.content.state == "running"
    run = resume_response(caller, stored, is_bounded=False) if is_running else None
    if run is not None:
        run.cancel(keep_partial=True)
        await run.reader.end(request.receive)
    return JsonResponse(msgspec.Raw(stored.content.body))


@router.get(
    "/{response_id}/input_items", responses=answers(ResponseItems, "A page of what was asked.")
)
async def list_input_items(
    response_id: str, request: Request, caller: Caller, query: Page
) -> Response:
    """List the items that a request sent, the newest first unless `order` says otherwise."""
    stored = await _find(request, caller, response_id)
    messages, prefix = stored.asked.messages, response_id.partition("_")[2]
    source = ItemSource(
        len(messages),
        lambda index: message_items(messages[index], prefix, index),
        lambda item_id: message_number(item_id, prefix),
    )
    return await item_page(source, query)


@dataclass(frozen=True, slots=True)
class ItemSource:
    """Tell the items of `num_groups` groups in order: those of one, and which one holds an id if
    any does."""

    num_groups: int
    items_of: Callable[[int], Sequence[AnyItem]]
    group_of: Callable[[str], int | None]


async def item_page(source: ItemSource, query: PageQuery) -> Response:
    """Return a page of items; no others are built than those of the groups that it shows. Raises
    ItemNotFound."""
    limit, after, is_forward = query.limit, query.after, query.order == "asc"
    step = 1 if is_forward else -1
    group, found = (0 if is_forward else source.num_groups - 1), list[AnyItem]()
    if after is not None:
        named = source.group_of(after)
        is_there = named is not None and 0 <= named < source.num_groups
        items = source.items_of(named)[::step] if named is not None and is_there else ()
        index = next((index for index, item in enumerate(items) if item.id == after), None)
        if named is None or index is None:
            raise ItemNotFound("There is no such item.", param="after")
        group, found = named + step, [*items[index + 1 :]]
    while len(found) <= limit and 0 <= group < source.num_groups:
        found += source.items_of(group)[::step]
        group += step
    page = found[:limit]
    data: Any = await encode_list(page)
    return JsonResponse(
        ResponseItems(
            data=data,
            first_id=page[0].id if page else "",
            last_id=page[-1].id if page else "",
            has_more=len(found) > limit,
        )
    )
