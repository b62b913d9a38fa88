"""SGLang's HTTP contract over the same sessions, so that its clients and tests run unchanged.

What differs on purpose: `abort_request` matches the rid exactly and only the caller's own requests,
and a session belongs to the key that opened it. An aborted turn rolls its session back, and so does
one whose client hung up.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from session_server.core.errors import (
    ContextTooLong,
    InvalidRequest,
    SessionBusy,
    SessionClosing,
    SessionExists,
    SessionNotFound,
    SessionServerError,
    UnsupportedOperation,
)
from session_server.core.ids import new_turn_id
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import (
    TextInput,
    TokenInput,
    TurnEnd,
    TurnFailedEntry,
    TurnRequest,
)
from session_server.protocol.errors import ErrorResponse, clean
from session_server.protocol.frames import failure_body
from session_server.protocol.messages import MIN_TTL_S
from session_server.protocol.sglang import (
    AbortBody,
    CloseSessionBody,
    CumulativeAnswer,
    GenerateBody,
    Generation,
    OpenSessionBody,
    SessionParamsBody,
    generation,
)
from session_server.sessions.views import OpenRequest
from session_server.web.admin import is_healthy
from session_server.web.bodies import read_body
from session_server.web.caller import Call, Caller
from session_server.web.event_stream import HEARTBEAT, EventStream
from session_server.web.openapi import answers, body_of
from session_server.web.refusals import JsonResponse, status_of_code
from session_server.web.running_requests import RunningRequests
from session_server.web.turns import TurnReading

router = APIRouter(tags=["sglang"])

HEALTH_TIMEOUT_S: Final = 20.0
_DONE: Final = b"data: [DONE]\n\n"
_PROBE: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)


@router.get(
    "/open_session",
    openapi_extra=body_of(OpenSessionBody, required=False),
    responses=answers(None, "The session's id, a bare JSON string."),
)
@router.post(
    "/open_session",
    openapi_extra=body_of(OpenSessionBody, required=False),
    responses=answers(None, "The session's id, a bare JSON string."),
)
async def open_session(request: Request, caller: Caller) -> Response:
    """Open a session."""
    body = await read_body(request, OpenSessionBody, media_type=None)
    ttl_s = None if body.timeout is None else max(body.timeout, MIN_TTL_S)
    try:
        view = caller.sessions.open(
            caller.owner, OpenRequest(session_id=body.session_id, ttl_s=ttl_s)
        )
    except SessionExists:
        raise InvalidRequest(
            "Failed to open the session. Check if a session with the same id is still open."
        ) from None
    return JsonResponse(view.session_id)


@router.get(
    "/close_session",
    openapi_extra=body_of(CloseSessionBody),
    responses=answers(None, "Closed, or unknown: the answer is the same."),
)
@router.post(
    "/close_session",
    openapi_extra=body_of(CloseSessionBody),
    responses=answers(None, "Closed, or unknown: the answer is the same."),
)
async def close_session(request: Request, caller: Caller) -> Response:
    """Close a session; while a turn runs it closes with the turn."""
    body = await read_body(request, CloseSessionBody, media_type=None)
    with contextlib.suppress(SessionNotFound):
        caller.sessions.close(caller.owner, body.session_id)
    return Response()


@router.post(
    "/generate",
    openapi_extra=body_of(GenerateBody),
    responses=answers(None, "The answer; or cumulative events, with `stream`."),
)
@router.put(
    "/generate",
    openapi_extra=body_of(GenerateBody),
    responses=answers(None, "The answer; or cumulative events, with `stream`."),
)
async def generate(request: Request, caller: Caller) -> Response:
    """Run one turn, in a session or alone."""
    arrived_s = caller.services.now_s()
    body = await read_body(request, GenerateBody, media_type=None)
    rid = body.rid if isinstance(body.rid, str) and body.rid else secrets.token_hex(16)
    job = generation(body, rid=rid, turn_id=new_turn_id())
    run = await _start(caller, _requests_of(request), job, arrived_s)
    if job.stream:
        timeout_s = caller.services.settings.send_timeout_s
        return EventStream(run.events(), around=run.scope(), send_timeout_s=timeout_s)
    with run.scope():
        end = await run.reading.end(request.receive, on_entry=run.answer.add)
    if isinstance(end, TurnFailedEntry):
        failure = failure_body(end)
        return JsonResponse(ErrorResponse(error=failure), status_of_code(failure.code))
    return JsonResponse(run.answer.end(end, latency_s=run.latency_s()))


@router.post(
    "/abort_request",
    openapi_extra=body_of(AbortBody),
    responses=answers(None, "Aborted, or not running: the answer is the same."),
)
async def abort_request(request: Request, caller: Caller) -> Response:
    """Abort one request by its exact rid, or all of the caller's."""
    body = await read_body(request, AbortBody, media_type=None)
    rid = None if body.abort_all else body.rid or ""
    for session_id, turn_id in _requests_of(request).turns_of(caller.owner, rid):
        with contextlib.suppress(SessionServerError):
            caller.sessions.cancel(caller.owner, session_id, turn_id, keep_partial=False)
    return Response()


@router.get("/flush_cache", responses=answers(None, "Flushed; 400 when busy."))
@router.post("/flush_cache", responses=answers(None, "Flushed; 400 when busy."))
async def flush_cache(caller: Caller) -> Response:
    """Empty the tree and every session's KV; histories stay."""
    if await caller.sessions.flush():
        return PlainTextResponse("Cache flushed.\n")
    raise InvalidRequest("Flush cache failed: there are running or waiting requests.")


@router.get("/health_generate", responses=answers(None, "One token was generated."))
async def health_generate(caller: Caller) -> Response:
    """Generate one token in a session of its own; 503 when that does not work in time."""
    job = Generation(
        rid=f"HEALTH_CHECK_{secrets.token_hex(8)}",
        request=TurnRequest(
            turn_id=new_turn_id(), input=TokenInput((0,)), sampling=_PROBE, queue=False
        ),
        session=None,
        stream=False,
        return_logprob=False,
        text_in_logprobs=False,
    )
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            run = await _start(caller, RunningRequests(), job, caller.services.now_s())
            with run.scope():
                end = await run.reading.wait()
    except (TimeoutError, SessionServerError):
        return Response(status_code=503)
    is_good = is_healthy(caller.services) and not isinstance(end, TurnFailedEntry)
    return Response(status_code=200 if is_good else 503)


@router.get("/get_model_info", responses=answers(None, "The model."))
@router.get("/model_info", responses=answers(None, "The model."))
async def model_info(caller: Caller) -> Response:
    """What is served."""
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
            "context_length": card.max_context,
        }
    )


@router.get("/get_server_info", responses=answers(None, "The server's settings and state."))
@router.get("/server_info", responses=answers(None, "The server's settings and state."))
async def server_info(caller: Caller) -> Response:
    """How the server was started, and what it does now."""
    stats = caller.sessions.stats()
    sample = stats.engine
    internal = {
        "sessions": stats.sessions,
        "live_turns": stats.live_turns,
        "queued_turns": stats.queued_turns,
        "running": 0 if sample is None else sample.running,
        "waiting": 0 if sample is None else sample.waiting,
    }
    return JsonResponse(
        {
            **caller.services.server_args,
            "served_model_name": caller.services.model.name,
            "version": metadata.version("session-server"),
            "internal_states": [internal],
        }
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One `/generate` under way."""

    call: Call
    requests: RunningRequests
    job: Generation
    turn: tuple[str, str]
    reading: TurnReading
    answer: CumulativeAnswer
    arrived_s: float

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Abortable by its rid, and aborted when its client goes."""
        try:
            with self.reading:
                yield
        finally:
            self.requests.remove(self.call.owner, self.job.rid, self.turn)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The cumulative answer, each time as an event without a name, then `[DONE]`."""
        async for item in self.reading.entries():
            if item is None:
                yield HEARTBEAT
                continue
            entry = item[1]
            if isinstance(entry, TurnFailedEntry):
                yield _event({"error": msgspec.to_builtins(failure_body(entry))})
            elif isinstance(entry, TurnEnd):
                yield _event(self.answer.end(entry, latency_s=self.latency_s()))
            elif self.answer.add(entry):
                yield _event(self.answer.so_far())
        yield _DONE

    def latency_s(self) -> float:
        """Seconds since the request arrived."""
        return self.call.services.now_s() - self.arrived_s


async def _start(call: Call, requests: RunningRequests, job: Generation, arrived_s: float) -> _Run:
    """Submit the turn in its session, or in one that lives for this turn only."""
    sessions, owner = call.sessions, call.owner
    params = job.session
    if params is None:
        session_id = sessions.open(owner, OpenRequest(single_turn=True)).session_id
    else:
        session_id = params.id or ""
        _check_session_params(params, job.request)
    turn = (session_id, job.request.turn_id)
    requests.add(owner, job.rid, turn)
    try:
        with _sglang_words(session_id):
            journal = sessions.journal(owner, session_id)
            view = await sessions.submit(owner, session_id, job.request)
    except BaseException:
        requests.remove(owner, job.rid, turn)
        if params is None:
            with contextlib.suppress(SessionServerError):
                sessions.close(owner, session_id)
        raise
    return _Run(
        call=call,
        requests=requests,
        job=job,
        turn=turn,
        reading=TurnReading(call, journal, view, keep_partial=False),
        answer=CumulativeAnswer(job, call.services.model.token_text),
        arrived_s=arrived_s,
    )


def _check_session_params(params: SessionParamsBody, request: TurnRequest) -> None:
    for name in ("replace", "drop_previous_output", "offset"):
        if getattr(params, name):
            raise UnsupportedOperation(f"Streaming sessions do not support {name}.", param=name)
    content = request.input
    is_empty = (isinstance(content, TokenInput) and not content.token_ids) or (
        isinstance(content, TextInput) and not content.text
    )
    if is_empty:
        raise InvalidRequest("A session request must contain input tokens after restoring history.")


@contextlib.contextmanager
def _sglang_words(session_id: str) -> Iterator[None]:
    """Refusals in the words and with the status (400) that SGLang's clients match."""
    name = clean(session_id)
    try:
        yield
    except SessionNotFound:
        raise InvalidRequest(f"Invalid request: session id {name} does not exist") from None
    except SessionClosing:
        raise InvalidRequest(f"Invalid request: close was requested for session {name}") from None
    except SessionBusy:
        raise InvalidRequest("Streaming session already has an active request.") from None
    except ContextTooLong as error:
        raise InvalidRequest(error.message) from None


def _requests_of(request: Request) -> RunningRequests:
    requests = request.app.state.requests
    assert isinstance(requests, RunningRequests), "create_app set it"
    return requests


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
