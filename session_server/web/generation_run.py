"""Run one `/generate` of SGLang's API, from its submission to its last byte."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import msgspec
from starlette.types import Receive

from session_server.core.errors import (
    ContextTooLong,
    InvalidRequest,
    SessionBusy,
    SessionClosing,
    SessionMoved,
    SessionNotFound,
    SessionServerError,
    TurnConflict,
    TurnNotFound,
    UnsupportedOperation,
)
from session_server.core.owner import Owner
from session_server.core.session_events import (
    SessionEntry,
    TextInput,
    TokenInput,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
    TurnRequest,
)
from session_server.protocol.cumulative_answer import CumulativeAnswer
from session_server.protocol.errors import error_body, sanitize
from session_server.protocol.frames import failure_body
from session_server.protocol.sglang import Generation, SessionParamsBody
from session_server.sessions.journal import Journal
from session_server.sessions.manager import SessionManager
from session_server.sessions.request_tree import BranchPoint, RequestTrees
from session_server.sessions.views import OpenRequest
from session_server.web.event_stream import DONE, HEARTBEAT, data_event, error_event
from session_server.web.requests import Call
from session_server.web.shared_task import SharedTask
from session_server.web.slices import run_in_slices
from session_server.web.turns import TurnReader, submitted


class SGLangState:
    """Track what runs by request id, the sessions that branch, and the probe.

    The server's turn limit bounds the request ids.
    """

    def __init__(self, sessions: SessionManager) -> None:
        self.trees = RequestTrees(sessions)
        self._running: dict[Owner, dict[str, tuple[str, str]]] = {}
        # Without sharing, callers could run any number of turns outside all quotas.
        self.probe = SharedTask[bool]()
        self._branching: WeakSet[Journal] = WeakSet()

    def add(self, owner: Owner, rid: str, turn: tuple[str, str]) -> None:
        """Make a turn (session id, turn id) abortable by `rid`. The newest turn of a rid wins."""
        self._running.setdefault(owner, {})[rid] = turn

    def remove(self, owner: Owner, rid: str, turn: tuple[str, str]) -> None:
        """Forget a turn that has ended or lost its reader."""
        turns = self._running.get(owner, {})
        if turns.get(rid) == turn:
            del turns[rid]
        if not turns:
            self._running.pop(owner, None)

    def turns_of(self, owner: Owner, rid: str | None) -> list[tuple[str, str]]:
        """Return (session id, turn id) of one rid, or of all the owner's turns if it is None."""
        turns = self._running.get(owner, {})
        if rid is not None:
            return [turns[rid]] if rid in turns else []
        return list(turns.values())

    def mark_branching(self, journal: Journal) -> None:
        """Mark the session of this journal as opened without `streaming`."""
        self._branching.add(journal)

    def is_branching(self, journal: Journal) -> bool:
        """Return whether requests of the session of this journal form a tree."""
        return journal in self._branching


@dataclass(frozen=True, slots=True)
class GenerationRun:
    """Hold the state of one running `/generate`."""

    call: Call
    job: Generation
    reader: TurnReader
    answer: CumulativeAnswer
    arrived_s: float

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the cumulative answer as events without a name, then `[DONE]`."""
        try:
            async for item in self.reader.entries():
                if item is None:
                    yield HEARTBEAT
                    continue
                if self.reader.has_ended:
                    self.call.resources.close()  # the client may send its next request now
                await self.add_entry(item[1])
                if content := self._content(item[1]):
                    yield data_event(content)
        except (SessionClosing, SessionMoved, TurnNotFound) as error:
            yield error_event(error_body(error))
        yield DONE

    async def body(self, receive: Receive) -> dict[str, Any] | TurnFailedEntry:
        """Wait for the turn's end and return the answer.

        Raises:
            HttpRefusal: the client disconnected before.
            And what `TurnReader.entries` raises.
        """
        end = await self.reader.end(receive, on_entry=self.add_entry)
        if isinstance(end, TurnFailedEntry):
            return end
        await self.add_entry(end)
        return self.answer.end(end, latency_s=self.latency_s())

    async def add_entry(self, entry: SessionEntry) -> None:
        """Add an entry to the answer, in slices so that other requests are served in between."""
        await run_in_slices(self.answer.add(entry))

    def _content(self, entry: SessionEntry) -> dict[str, Any]:
        """Return the event that an entry gives; empty if it changes nothing for the client."""
        if isinstance(entry, TurnFailedEntry):
            return {"error": msgspec.to_builtins(failure_body(entry))}
        if isinstance(entry, TurnEnd):
            return self.answer.end(entry, latency_s=self.latency_s())
        is_due = isinstance(entry, TurnDelta) and self.answer.is_due
        return self.answer.current_body() if is_due else {}

    def latency_s(self) -> float:
        """Return the seconds since the request arrived."""
        return self.call.services.now_s() - self.arrived_s


async def start_generation(
    call: Call, state: SGLangState, job: Generation, *, arrived_s: float
) -> GenerationRun:
    """Submit the turn: to its session, at its branch point, or to a session of its own. It can be
    aborted by its rid, and is when the client disconnects.

    Raises:
        SessionServerError: refused, with the text and status that SGLang's clients match.
    """
    with _sglang_errors(job.session):
        if job.session is None:
            reader = await _submit_alone(call, state, job)
        else:
            session_id = job.session.id or ""
            await call.sessions.load(call.owner, session_id)
            journal = call.sessions.journal(call.owner, session_id)
            if state.is_branching(journal):
                reader = await _submit_branch(call, state, job, job.session)
            else:
                _check_session_params(job.session, job.request)
                reader = await _submit(call, state, job, session_id)
    return GenerationRun(
        call=call,
        job=job,
        reader=reader,
        answer=CumulativeAnswer(job, call.services.model.token_text),
        arrived_s=arrived_s,
    )


def _add(call: Call, state: SGLangState, job: Generation, session_id: str) -> None:
    """Let the turn be aborted by its rid, until the call ends."""
    turn = (session_id, job.request.turn_id)
    call.resources.callback(state.remove, call.owner, job.rid, turn)
    state.add(call.owner, job.rid, turn)


async def _submit(call: Call, state: SGLangState, job: Generation, session_id: str) -> TurnReader:
    """Submit the turn; its rid can be aborted even before it is accepted."""
    reader = TurnReader(call, session_id, keep_partial=False)
    _add(call, state, job, session_id)
    return reader.follow(await submitted(call, job.request, session_id))


async def _submit_alone(call: Call, state: SGLangState, job: Generation) -> TurnReader:
    session_id = call.sessions.open(call.owner, OpenRequest(single_turn=True)).session_id
    try:
        return await _submit(call, state, job, session_id)
    except BaseException:
        with contextlib.suppress(SessionServerError):
            call.sessions.close(call.owner, session_id)
        raise


async def _submit_branch(
    call: Call, state: SGLangState, job: Generation, params: SessionParamsBody
) -> TurnReader:
    point = BranchPoint(
        rid=params.rid or None,
        replace=bool(params.replace),
        offset=params.offset,
        drop_previous_output=bool(params.drop_previous_output),
    )
    branch = await state.trees.submit(
        call.owner, params.id or "", rid=job.rid, point=point, request=job.request
    )
    reader = TurnReader(call, branch.session_id, keep_partial=False, is_bounded=False)
    _add(call, state, job, branch.session_id)
    return reader.follow(branch.view)


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
def _sglang_errors(params: SessionParamsBody | None) -> Iterator[None]:
    """Raise refusals with the text and status (400) that SGLang's clients match."""
    name = sanitize(params.id or "") if params is not None else ""
    try:
        yield
    except SessionNotFound:
        raise InvalidRequest(f"Invalid request: session id {name} does not exist") from None
    except SessionClosing:
        raise InvalidRequest(f"Invalid request: close was requested for session {name}") from None
    except SessionBusy as error:
        is_branch = error.param is not None
        text = error.message if is_branch else "Streaming session already has an active request."
        raise InvalidRequest(text) from None
    except (ContextTooLong, TurnNotFound, TurnConflict) as error:
        raise InvalidRequest(error.message, param=error.param) from None
