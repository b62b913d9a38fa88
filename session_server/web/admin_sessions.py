"""Show operators what the server does and the sessions of all owners, and let them act on those."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Final, Literal, assert_never

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from session_server.core.errors import EngineUnavailable
from session_server.core.events import MemoryReported
from session_server.core.ids import SessionId
from session_server.metrics.prometheus import ReaderKind
from session_server.protocol.operations import AdminSessionBody, AdminSessionList, SampleBody
from session_server.sessions.overview import (
    SessionOverview,
    SessionSummary,
    SortKey,
    percentile,
)
from session_server.web.event_stream import EventStream
from session_server.web.headers import LAST_EVENT_ID
from session_server.web.openapi import answers, reads_headers
from session_server.web.refusals import JsonResponse
from session_server.web.requests import AdminCaller, Call
from session_server.web.server_watch import ServerWatch

router = APIRouter(prefix="/v1/admin", tags=["operations"])

MAX_ADMIN_PAGE: Final = 200
MAX_MATCH_CHARS: Final = 64
REPORT_TIMEOUT_S: Final = 1.0
"""A page of sessions does not wait longer than this for what the engine says of them."""

Action = Literal["close", "cool", "warm", "pin", "unpin", "fork"]


@router.get(
    "/events",
    openapi_extra=reads_headers({LAST_EVENT_ID: "ignored: each event is complete in itself"}),
    responses=answers(
        None, "What the server does, about once a second, until it drains.", events=SampleBody
    ),
)
async def watch_server(request: Request, caller: AdminCaller) -> Response:
    """Follow the server: accounts, rates, readers, and what each forward computed for whom.

    The accounts are those of `GET /v1/admin/memory`. Nothing is computed while nobody reads.
    """
    caller.connect(ReaderKind.SSE)
    watch = watch_of(request)
    chunks = watch.chunks(lambda: caller.owner.is_admin)
    caller.resources.enter_context(watch.listening())
    return EventStream(chunks)


@router.get("/sessions", responses=answers(AdminSessionList, "A page of all sessions."))
async def list_all_sessions(
    request: Request,
    caller: AdminCaller,
    *,
    limit: Annotated[int, Query(ge=1, le=MAX_ADMIN_PAGE)] = 50,
    after: Annotated[str | None, Query(max_length=128)] = None,
    sort: SortKey = "active",
    match: Annotated[str, Query(max_length=MAX_MATCH_CHARS)] = "",
) -> Response:
    """List the sessions of all owners: the last used, longest, slowest or oldest ones first.

    `match`: what the session's id, its owner's digest or its state must contain.
    """
    overview = overview_of(request)
    page = await overview.page(sort=sort, limit=limit, after=after, matching=match)
    data = await _bodies(caller, overview, page.summaries)
    return JsonResponse(
        AdminSessionList(
            object="list", data=data, total=page.num_matching, next_after=page.next_after
        )
    )


@router.post(
    "/sessions/{session_id}/{action}",
    responses=answers(AdminSessionBody, "The session as it is now; for `fork` the new one."),
)
async def act_on_session(
    session_id: str, action: Action, request: Request, caller: AdminCaller
) -> Response:
    """Close, cool, warm, pin, unpin or fork a session of any owner, as its owner could.

    A fork belongs to the session's owner. A session in which a turn runs can only be closed;
    to warm it changes nothing.
    """
    overview, sessions = overview_of(request), caller.sessions
    shown = await overview.show(session_id)
    owner, name = shown.owner, shown.view.session_id
    if action == "close":
        num_readers = caller.readers.num_readers(owner, name)
        view = await sessions.exits.delete(owner, name)  # it may be gone with this call
        return JsonResponse(_body(replace(shown, view=view), None, num_readers))
    await sessions.load(owner, name)
    match action:
        case "cool":
            sessions.edits.retention.cool(owner, name)
        case "warm":
            sessions.edits.retention.warm(owner, name)
        case "pin" | "unpin":
            sessions.edits.retention.pin(owner, name, pinned=action == "pin")
        case "fork":
            name = sessions.edits.fork(owner, name).session_id
        case _:
            assert_never(action)
    (body,) = await _bodies(caller, overview, (overview.show_of(owner, name),))
    return JsonResponse(body)


def overview_of(request: Request) -> SessionOverview:
    """Return what knows the sessions of all owners."""
    overview = request.app.state.overview
    assert isinstance(overview, SessionOverview), "create_app set it"
    return overview


def watch_of(request: Request) -> ServerWatch:
    """Return what makes samples of the server."""
    watch = request.app.state.watch
    assert isinstance(watch, ServerWatch), "create_app set it"
    return watch


async def _bodies(
    caller: Call, overview: SessionOverview, summaries: Iterable[SessionSummary]
) -> list[AdminSessionBody]:
    shown = tuple(summaries)
    report = await _report(overview, [summary.id for summary in shown]) if shown else None
    readers = caller.readers
    return [
        _body(summary, report, readers.num_readers(summary.owner, summary.view.session_id))
        for summary in shown
    ]


async def _report(overview: SessionOverview, ids: list[SessionId]) -> MemoryReported | None:
    with contextlib.suppress(TimeoutError, EngineUnavailable):
        async with asyncio.timeout(REPORT_TIMEOUT_S):
            return await overview.report(session_ids=ids)
    return None


def _body(
    summary: SessionSummary,
    report: MemoryReported | None,
    num_readers: int,
) -> AdminSessionBody:
    view = summary.view
    pages, kv_bytes = _held(summary.id, report)
    num_input = summary.input_tokens
    return AdminSessionBody(
        id=summary.id,
        object="admin.session",
        session_id=view.session_id,
        owner=summary.owner_digest,
        state=view.state,
        tokens=view.num_tokens,
        turns=view.num_turns,
        running_turn=view.running_turn,
        queued_turns=view.queued_turns,
        pinned=view.is_pinned,
        readers=num_readers,
        idle_s=round(summary.idle_s, 1),
        pages=pages,
        kv_bytes=kv_bytes,
        cached_share=round(summary.cached_tokens / num_input, 4) if num_input else None,
        ttft_p50_ms=percentile(summary.ttft_ms, 0.5),
        ttft_p95_ms=percentile(summary.ttft_ms, 0.95),
    )


def _held(session_id: SessionId, report: MemoryReported | None) -> tuple[int | None, int | None]:
    """Return the pages that a session holds and their bytes: nothing where the engine has not
    heard of it, None where it does not answer."""
    if report is None:
        return None, None
    held = next((each for each in report.sessions if each.session_id == session_id), None)
    if held is None:
        return 0, 0
    pools = (held.protected_pages, held.private_pages)
    pages = [(pool, count) for kind in pools for pool, count in kind.items()]
    num_bytes = sum(count * report.pools[pool].page_bytes for pool, count in pages)
    return sum(count for _, count in pages), num_bytes
