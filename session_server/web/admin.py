"""Serve probes, metrics and views for operators."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from session_server.core.errors import EngineUnavailable
from session_server.core.events import MemoryReported, TierReport
from session_server.metrics.prometheus import CONTENT_TYPE
from session_server.protocol.resources import (
    MemoryBody,
    ModelBody,
    ModelList,
    StatusBody,
)
from session_server.web.openapi import NEEDS_NO_KEY, answer, answers
from session_server.web.refusals import JsonResponse
from session_server.web.requests import AdminCaller, Call, Caller, MetricsCaller, services_of
from session_server.web.services import AppServices
from session_server.web.shared_task import SharedTask

router = APIRouter(tags=["operations"])
operators = APIRouter(tags=["operations"])
"""Routes about everybody's sessions, for the admin bind if there is one."""

SCRAPE_TIMEOUT_S = 1.0
Switch = Annotated[int, Query(ge=0, le=1)]


@router.get(
    "/health",
    openapi_extra=NEEDS_NO_KEY,
    responses=answers(StatusBody, "The server works.") | {503: answer(StatusBody, "It does not.")},
)
async def health(request: Request) -> Response:
    """Report liveness: 503 once a memory invariant has failed, until a restart. A store that cannot
    be written to is told of, and a disk that has no room for KV; sessions go on without either."""
    services = services_of(request)
    if not is_healthy(services):
        return _status("memory_invariant_failed", is_good=False)
    stats = services.sessions.stats()
    is_failing = stats.store is not None and stats.store.is_failing
    message = msgspec.UNSET if stats.engine is None else _want_of_room(stats.engine.tiers)
    return JsonResponse(StatusBody(status="store_failing" if is_failing else "ok", message=message))


@router.get(
    "/ready",
    openapi_extra=NEEDS_NO_KEY,
    responses=answers(StatusBody, "The server takes sessions and turns.")
    | {503: answer(StatusBody, "It does not.")},
)
async def ready(request: Request) -> Response:
    """Report readiness: 503 while the server drains, or the engine is down or completes no step,
    and always on one that only computes prompts for others."""
    services = services_of(request)
    sessions = services.sessions
    if sessions.is_draining:
        return _status("draining", is_good=False)
    if sessions.engine_ready is None:
        return _status("engine_unavailable", is_good=False)
    if (stalled_s := sessions.engine_stalled_s) is not None:
        body = StatusBody(status="engine_stalled", stalled_s=round(stalled_s, 3))
        return JsonResponse(body, 503)
    if services.roles.service is not None:
        return _status("prefill", is_good=False)
    return _status("ready", is_good=True)


@operators.get("/metrics", responses=answers(str, "Prometheus text format.", media="text/plain"))
async def metrics(request: Request, caller: MetricsCaller) -> Response:
    """Return all metrics, with the memory accounts as of now."""
    report: SharedTask[MemoryReported] = request.app.state.scraped_report
    with contextlib.suppress(TimeoutError, EngineUnavailable):
        # The report updates the gauges as an event; a scrape does not wait long for a busy engine.
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            await report.run(partial(caller.sessions.memory, max_sessions=0))
    return Response(caller.services.metrics.exposition(), media_type=CONTENT_TYPE)


@router.get("/v1/models", responses=answers(ModelList, "The models served: one."))
async def list_models(caller: Caller) -> Response:
    """List the models."""
    return JsonResponse(ModelList(object="list", data=[_model_body(caller)]))


@router.get("/v1/models/{model_id:path}", responses=answers(ModelBody, "The model."))
async def show_model(model_id: str, caller: Caller) -> Response:
    """Show one model."""
    caller.services.check_model(model_id)
    return JsonResponse(_model_body(caller))


def _model_body(caller: Call) -> ModelBody:
    card = caller.services.model
    return ModelBody(
        id=card.name,
        object="model",
        created=card.created_s,
        owned_by="session-server",
        max_model_len=caller.services.max_context,
    )


@operators.get("/v1/admin/memory", responses=answers(MemoryBody, "The memory accounts."))
async def memory(
    request: Request, caller: AdminCaller, full: Switch = 0, trace: Switch = 0
) -> Response:
    """Return the page accounts per pool and session, and what the memory checker found.

    The first 1,000 sessions are listed, in the order of their opening; `num_sessions` counts all.
    `full=1` first recounts every page between two steps, once for all who ask meanwhile; `trace=1`
    adds the engine's steps before the first violation: ids, lengths and decisions.
    """
    count = partial(caller.sessions.memory, full=bool(full), trace=bool(trace))
    recount: SharedTask[MemoryReported] = request.app.state.recounts[trace]
    report = await (recount.run(count) if full else count())
    return JsonResponse(msgspec.convert(report, MemoryBody, from_attributes=True))


def is_healthy(services: AppServices) -> bool:
    """Return whether no memory invariant has failed since the engine started."""
    sample = services.sessions.stats().engine
    return sample is None or sample.check_violations == 0


def _want_of_room(tiers: TierReport) -> str | msgspec.UnsetType:
    """Return what to do where the disk has no room for the files of KV that it may have."""
    if tiers.disk_max_bytes >= tiers.disk_given_bytes:
        return msgspec.UNSET
    mib = (num_bytes >> 20 for num_bytes in (tiers.disk_max_bytes, tiers.disk_given_bytes))
    has_room = "the disk has room for {:,} of {:,} MiB of --disk-kv-bytes".format(*mib)
    return f"{has_room}, beside what is kept free for the log: make room on it, or lower that"


def _status(text: str, *, is_good: bool) -> Response:
    return JsonResponse(StatusBody(status=text), 200 if is_good else 503)
