"""`PrefillService`: compute prompts for other replicas, write their KV, and say so.

A prompt is a turn without output in a session of its own, which nobody else knows and which is
closed with the request. Its pages stay in the tree, so what prompts have in common is computed
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from session_server.core.commands import CancelTurn, CloseSession, OpenSession, SubmitTurn
from session_server.core.errors import SessionServerError
from session_server.core.events import (
    EngineDied,
    EngineEvent,
    PrefillProgressed,
    SessionRefused,
    TurnFailed,
    TurnFinished,
)
from session_server.core.ids import SessionId, TurnId, new_session_id, new_turn_id
from session_server.core.owner import Owner
from session_server.core.sampling import SamplingParams
from session_server.sessions.bugs import log_bug
from session_server.sessions.engine_link import EngineLink
from session_server.sessions.roles.messages import (
    News,
    PrefillRefused,
    PrefillRequest,
    PrefillWorking,
    PrefillWritten,
)
from session_server.sessions.salts import TenantSalts

MAX_PREFILLS: Final = 64
"""Prompts that a replica computes or keeps waiting; another one is refused: `busy`."""

MAX_PREFILL_TOKENS: Final = 1 << 18
"""Tokens of those, unless one alone has more."""

AT_ONCE: Final = 2
"""Prompts that are in the engine: one is computed while another is written."""

BEAT_S: Final = 1.0
"""How often whoever waits is told that somebody works for them."""

_TOKEN_BYTES: Final = 4


@dataclass(slots=True)
class ServedCounts:
    """Count prompts that others have asked for: `done` of `done_tokens`, written in `done_bytes`
    and `done_s`, with what they waited;
    `refused` at once; `failed`; and those that nobody waited for any more."""

    asked: int = 0
    done: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    done_tokens: int = 0
    done_bytes: int = 0
    done_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Running:
    """Follow a turn in the engine. `ended` resolves to None, or to why it has failed."""

    session_id: SessionId
    ended: asyncio.Future[str | None]
    computed: int = 0

    def end(self, why: str | None) -> None:
        """Note that it has ended."""
        if not self.ended.done():
            self.ended.set_result(why)


class PrefillService:
    """Compute prompts, in the order in which they are asked for. Call it on the event loop's
    thread."""

    def __init__(
        self,
        link: EngineLink,
        salts: TenantSalts,
        *,
        model: bytes,
        is_draining: Callable[[], bool],
    ) -> None:
        """`model`: see `PrefillRequest`. `is_draining`: whether the server takes no new work."""
        self._link, self._salts = link, salts
        self._model, self._is_draining = model, is_draining
        self._running: dict[TurnId, _Running] = {}
        self._places = asyncio.Semaphore(AT_ONCE)
        self.num_prefills = self.num_tokens = 0
        self.counts = ServedCounts()

    def on_event(self, event: EngineEvent) -> None:
        """Follow the turns of this service; ignore all others."""
        match event:
            case PrefillProgressed(turn_id=turn_id, computed=computed):
                if turn_id in self._running:
                    self._running[turn_id].computed = computed
            case TurnFinished(turn_id=turn_id):
                if turn_id in self._running:
                    self._running[turn_id].end(None)
            case TurnFailed(turn_id=turn_id, message=message):
                if turn_id in self._running:
                    self._running[turn_id].end(message)
            case SessionRefused(session_id=session_id, message=message):
                for each in self._running.values():
                    if each.session_id == session_id:
                        each.end(message)
            case EngineDied():
                for each in self._running.values():
                    each.end("the engine has died")
            case _:
                pass

    async def serve(self, request: PrefillRequest) -> AsyncGenerator[News, None]:
        """Yield news of a request until it is done or has failed. To close this takes back whatever
        was not written yet."""
        self.counts.asked += 1
        if (refusal := self._refusal(request)) is not None:
            self.counts.refused += 1
            yield refusal
            return
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        self.num_prefills += 1
        self.num_tokens += num_tokens
        running = _Running(new_session_id(), asyncio.get_running_loop().create_future())
        work = asyncio.create_task(self._compute(request, running), name="prefill")
        try:
            while not work.done():
                yield PrefillWorking(running.computed)
                await asyncio.wait([work], timeout=BEAT_S)
            yield work.result()
        finally:
            self.counts.cancelled += not work.done()
            work.cancel()
            self.num_prefills -= 1
            self.num_tokens -= num_tokens

    def _refusal(self, request: PrefillRequest) -> PrefillRefused | None:
        ready = self._link.ready
        if self._is_draining() or ready is None or not self._link.is_up:
            return PrefillRefused("busy", "there is no engine, or the server ends")
        is_fit = (request.model, request.page_size) == (self._model, ready.page_size)
        if not is_fit or ready.kv_tiers != "disk":
            return PrefillRefused("misfit", "another model, another page size, or no files of KV")
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        is_full = self.num_prefills >= MAX_PREFILLS
        if is_full or (self.num_prefills and self.num_tokens + num_tokens > MAX_PREFILL_TOKENS):
            return PrefillRefused("busy", f"{self.num_prefills} prompts wait or are computed")
        return None

    async def _compute(self, request: PrefillRequest, running: _Running) -> News:
        loop = asyncio.get_running_loop()
        news: News = PrefillRefused("failed", "a bug")
        begun_s = loop.time()
        try:
            async with self._places:
                news = await self._run(request, running)
        except SessionServerError as error:
            news = PrefillRefused("failed", error.message)
        except Exception as error:  # noqa: BLE001 - whoever asked computes it
            log_bug("a prompt of another replica", error)
        if isinstance(news, PrefillWritten):
            self.counts.done += 1
            self.counts.done_tokens += news.num_tokens
            self.counts.done_s += loop.time() - begun_s
            self.counts.done_bytes += sum(num_bytes for _, num_bytes in news.files)
        else:
            self.counts.failed += 1
        return news

    async def _run(self, request: PrefillRequest, running: _Running) -> News:
        """Compute a prompt and write it. Raises EngineUnavailable."""
        turn_id, session_id, is_written = new_turn_id(), running.session_id, False
        tokens = np.frombuffer(request.tokens, "<i4").tolist()
        owner = Owner(request.owner_id)
        tenant = self._salts.tag_of(owner)
        self._running[turn_id] = running
        try:
            self._link.send(
                OpenSession(
                    session_id=session_id,
                    tenant_salt=self._salts.salt_of(owner, request.session),
                    tenant=tenant,
                    tenant_weight=request.weight,
                )
            )
            self._link.send(
                SubmitTurn(
                    session_id=session_id,
                    turn_id=turn_id,
                    base_len=0,
                    tokens=tuple(tokens),
                    sampling=SamplingParams(max_tokens=0, temperature=0.0, seed=0),
                    tenant=tenant,
                )
            )
            if (why := await running.ended) is not None:
                return PrefillRefused("failed", why)
            written = await self._link.write_kv(session_id, cut=request.cut)
            is_written = written.num_tokens > 0
            if not is_written:
                return PrefillRefused("failed", "the disk took no file")
            return PrefillWritten(written.num_tokens, written.files)
        finally:
            del self._running[turn_id]
            if running.ended.cancelled():  # nobody waits any more
                self._link.send_or_queue(CancelTurn(turn_id=turn_id, num_outputs=None))
            # What nobody waits for any more is removed, unless other sessions have it too.
            close = CloseSession(session_id=session_id, is_deleted=not is_written)
            self._link.send_or_queue(close)
