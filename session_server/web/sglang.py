"""Serve SGLang's HTTP API over the same sessions, so that its clients run unchanged.

Deliberate differences: `abort_request` matches the exact rid and only the caller's requests, and a
session belongs to the key that opened it. Sessions are opened and closed by POST only, because any
web page can make a browser send a GET; the GET that flushes the cache, which SGLang's clients send,
is refused for browsers. An aborted turn rolls its session back, and so does one whose client
disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from session_server.core.errors import (
    InvalidRequest,
    SessionExists,
    SessionNotFound,
    SessionServerError,
)
from session_server.core.ids import new_turn_id
from session_server.core.owner import Owner
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import (
    TokenInput,
    TurnFailedEntry,
    TurnRequest,
)
from session_server.protocol.generation_body import GenerationBody
from session_server.protocol.messages import MAX_PRIORITY, MIN_TTL_S
from session_server.protocol.sglang import (
    AbortBody,
    CloseSessionBody,
    GenerateBody,
    Generation,
    OpenSessionBody,
    parse_generation,
)
from session_server.sessions.views import OpenRequest
from session_server.web.admin import is_healthy
from session_server.web.event_stream import EventStream, until_disconnect
from session_server.web.generation_run import SGLangState, start_generation
from session_server.web.keys import Credential
from session_server.web.openapi import answer, answers, body_of
from session_server.web.refusals import HttpRefusal, JsonResponse, failure_response
from session_server.web.request_guard import is_browser
from session_server.web.requests import AdminCaller, Call, Caller, read_body
from session_server.web.slim_exit_stack import SlimExitStack

router = APIRouter(tags=["sglang"])
operators = APIRouter(tags=["operations"])
"""Routes about everybody's sessions, for the admin bind if there is one."""

HEALTH_TIMEOUT_S: Final = 20.0
ABORTED_AT_ONCE: Final = 64
"""Requests that `abort_all` ends before others are served."""

PROBER: Final = Owner("server:probe", max_priority=MAX_PRIORITY, is_exempt=True)
"""The owner of probes. Ids of keys' owners are digests or start with `name:`: no client is this."""

_PROBE: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)


@router.post(
    "/open_session",
    openapi_extra=body_of(OpenSessionBody, required=False),
    responses=answers(str, "The session's id, a bare JSON string."),
)
async def open_session(request: Request, caller: Caller) -> Response:
    """Open a session."""
    body = await read_body(request, OpenSessionBody, media_type=None)
    ttl_s = None if body.timeout is None else max(body.timeout, MIN_TTL_S)
    try:
        # Where requests branch off is known to this process alone.
        asked = OpenRequest(body.session_id, ttl_s=ttl_s, is_stored=bool(body.streaming))
        view = caller.sessions.open(caller.owner, asked)
    except SessionExists:
        raise InvalidRequest(
            "Failed to open the session. Check if a session with the same id is still open."
        ) from None
    if not body.streaming:
        _state_of(request).mark_branching(caller.sessions.journal(caller.owner, view.session_id))
    await caller.sessions.stored()
    return JsonResponse(view.session_id)


@router.post(
    "/close_session",
    openapi_extra=body_of(CloseSessionBody),
    responses=answers(None, "Closed, or unknown: the answer is the same."),
)
async def close_session(request: Request, caller: Caller) -> Response:
    """Close a session; one with a running turn closes when the turn ends."""
    body = await read_body(request, CloseSessionBody, media_type=None)
    with contextlib.suppress(SessionNotFound):
        await caller.sessions.exits.delete(caller.owner, body.session_id)
    return Response()


@router.post(
    "/generate",
    openapi_extra=body_of(GenerateBody),
    responses=answers(
        GenerationBody, "The answer; or cumulative events, with `stream`.", events=GenerationBody
    ),
)
@router.put(
    "/generate",
    openapi_extra=body_of(GenerateBody),
    responses=answers(
        GenerationBody, "The answer; or cumulative events, with `stream`.", events=GenerationBody
    ),
)
async def generate(request: Request, caller: Caller) -> Response:
    """Run one turn, in a session or alone."""
    caller.connect()
    arrived_s = caller.services.now_s()
    body = await read_body(request, GenerateBody, media_type=None)
    rid = body.rid if isinstance(body.rid, str) and body.rid else secrets.token_hex(16)
    job = parse_generation(body, rid=rid, turn_id=new_turn_id())
    work = start_generation(caller, _state_of(request), job, arrived_s=arrived_s)
    run = await until_disconnect(work, request.receive)
    if job.stream:
        return EventStream(run.events())
    answer = await run.body(request.receive)
    if isinstance(answer, TurnFailedEntry):
        return failure_response(answer)
    return JsonResponse(answer)


@router.post(
    "/abort_request",
    openapi_extra=body_of(AbortBody, required=False),
    responses=answers(None, "Aborted, or not running: the answer is the same."),
)
async def abort_request(request: Request, caller: Caller) -> Response:
    """Abort one request by its exact rid, or all of the caller's."""
    body = await read_body(request, AbortBody, media_type=None)
    rid = None if body.abort_all else body.rid or ""
    for number, turn in enumerate(_state_of(request).turns_of(caller.owner, rid), start=1):
        with contextlib.suppress(SessionServerError):
            caller.sessions.cancel(caller.owner, *turn, keep_partial=False)
        if number % ABORTED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return Response()


@operators.get(
    "/flush_cache", responses=answers(str, "Flushed; 400 when busy.", media="text/plain")
)
@operators.post(
    "/flush_cache", responses=answers(str, "Flushed; 400 when busy.", media="text/plain")
)
async def flush_cache(request: Request, caller: AdminCaller) -> Response:
    """Empty the radix tree and the KV of all sessions, of every key; histories stay."""
    if request.method == "GET" and is_browser(request.headers):
        raise HttpRefusal(403, "From a browser, flush the cache with POST.")
    if await caller.sessions.flush():
        return PlainTextResponse("Cache flushed.\n")
    raise InvalidRequest("Flush cache failed: there are running or waiting requests.")


@router.get(
    "/health_generate",
    responses=answers(None, "One token was generated.") | {503: answer(None, "None was.")},
)
async def health_generate(request: Request, caller: Caller) -> Response:
    """Generate one token in a session of its own; 503 if that fails or times out."""
    state = _state_of(request)
    is_good = await state.probe.run(partial(_generate_one, caller, state))
    return Response(status_code=200 if is_good else 503)


async def _generate_one(caller: Call, state: SGLangState) -> bool:
    job = Generation(
        rid=f"HEALTH_CHECK_{secrets.token_hex(8)}",
        request=TurnRequest(
            turn_id=new_turn_id(),
            input=TokenInput((0,)),
            sampling=_PROBE,
            queue=False,
            priority=PROBER.max_priority,
        ),
        session=None,
        stream=False,
        return_logprob=False,
        text_in_logprobs=False,
    )
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            with SlimExitStack() as resources:  # other callers wait for the same probe
                probing = replace(caller, credential=Credential(PROBER, None), resources=resources)
                run = await start_generation(
                    probing, state, job, arrived_s=probing.services.now_s()
                )
                end = await run.reader.wait()
    except (TimeoutError, SessionServerError):
        return False
    return is_healthy(caller.services) and not isinstance(end, TurnFailedEntry)


@router.get("/get_model_info", responses=answers(dict[str, Any], "The model."))
@router.get("/model_info", responses=answers(dict[str, Any], "The model."))
async def model_info(caller: Caller) -> Response:
    """Describe the served model."""
    card = caller.services.model
    return JsonResponse(
        {
            "model_path": card.path,
            "tokenizer_path": card.path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "served_model_name": card.name,
            "vocab_size": card.vocab_size,
            "context_length": caller.services.max_context,
        }
    )


@router.get(
    "/get_server_info", responses=answers(dict[str, Any], "The server's settings and state.")
)
@router.get("/server_info", responses=answers(dict[str, Any], "The server's settings and state."))
async def server_info(caller: Caller) -> Response:
    """Return the server's settings and current state; without `admin=1`, of your own sessions."""
    ready = caller.sessions.engine_ready  # the first page of a pool is padding
    return JsonResponse(
        {
            **caller.services.server_args,
            "context_length": caller.services.max_context,
            "page_size": None if ready is None else ready.page_size,
            "max_total_num_tokens": None
            if ready is None
            else (ready.num_pages - 1) * ready.page_size,
            "served_model_name": caller.services.model.name,
            "version": metadata.version("session-server"),
            "internal_states": [_counts_for(caller)],
        }
    )


def _counts_for(caller: Call) -> dict[str, int]:
    """Return the counts of all owners, or the caller's own where others' are not its business."""
    if not caller.owner.is_admin:
        quotas = caller.sessions.edits.parts.quotas
        return {
            "sessions": quotas.owned_sessions.held_by(caller.owner),
            "unfinished_turns": quotas.turns.held_by(caller.owner),
        }
    stats = caller.sessions.stats()
    sample = stats.engine
    return {
        "sessions": stats.sessions,
        "live_turns": stats.live_turns,
        "queued_turns": stats.queued_turns,
        "running": 0 if sample is None else sample.running,
        "waiting": 0 if sample is None else sample.waiting,
    }


def _state_of(request: Request) -> SGLangState:
    state = request.app.state.sglang
    assert isinstance(state, SGLangState), "create_app set it"
    return state
