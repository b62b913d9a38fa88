"""Define one turn as a client sees it: its events while it runs, and how it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from session_server.client.errors import ClientError, Refused
from session_server.core.events import TurnTimings
from session_server.core.session_events import TokenUsage, ToolCall, ToolCallDelta

MAX_BUFFERED_EVENTS: Final = 65_536
"""Events of one turn waiting for its reader; beyond it, texts are merged into the last one."""


@dataclass(frozen=True, slots=True)
class TurnText:
    """Hold a piece of the answer, its number of tokens, and when it arrived (loop time,
    seconds).

    `reasoning` is what was thought, `tool_calls` are pieces of calls.
    """

    text: str
    num_tokens: int
    received_s: float
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnPrefill:
    """Report that `processed` of `total` context tokens are computed, `cached` of them before."""

    processed: int
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class TurnReplaced:
    """Replace all that was received so far, because the journal no longer reached back; by nothing
    where the server has lost the answer, which begins anew."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftProgress:
    """Say how far the newest draft was computed: `processed` of the `total` tokens of its context,
    `kept` of which were before."""

    draft_id: str
    processed: int
    kept: int
    total: int


TurnEvent = TurnText | TurnPrefill | TurnReplaced


class WireFailure(msgspec.Struct, frozen=True):
    """Hold the `error` object of a frame. `retry_after_s`, of `quota_exceeded`: the seconds after
    which the same can succeed."""

    code: str
    message: str = ""
    type: str = ""
    retryable: bool = False
    param: str | None = None
    turn_id: str | None = None
    retry_after_s: int | None = None

    def refusal(self) -> Refused:
        """Return it as an error to raise."""
        return Refused(self.code, self.message, retry_after_s=self.retry_after_s)


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Describe how a turn ended. `text`, `reasoning` and `tool_calls` are what stays in the
    session's history. `is_durable`: whether the turn is on disk; None by a server that keeps no
    session there."""

    turn_id: str
    status: Literal["completed", "cancelled", "failed"]
    text: str
    finish_reason: str | None
    usage: TokenUsage
    timings: TurnTimings
    error: WireFailure | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    is_durable: bool | None = None


class TurnHandle:
    """Follow one turn: iterate over its events once, then await `result`.

    `is_accepted`: whether the server has confirmed the turn.
    """

    def __init__(self, turn_id: str, *, send_cancel: Callable[[bool], Awaitable[None]]) -> None:
        self.turn_id = turn_id
        self._send_cancel = send_cancel
        self._events: deque[TurnEvent] = deque()
        self._pieces: list[str] = []
        self._wake = asyncio.Event()
        self._end: TurnResult | ClientError | None = None
        self.is_accepted = False

    async def __aiter__(self) -> AsyncIterator[TurnEvent]:
        while True:
            while self._events:
                yield self._events.popleft()
            if self._end is not None:
                return
            self._wake.clear()
            await self._wake.wait()

    async def result(self) -> TurnResult:
        """Wait for the end of the turn, whether or not its events were read.

        Raises:
            Refused: the server did not accept the turn.
            ConnectionLost: the connection went for good before the end was seen.
        """
        while self._end is None:
            self._wake.clear()
            await self._wake.wait()
        if isinstance(self._end, ClientError):
            raise self._end
        return self._end

    async def cancel(self, *, keep_partial: bool = True) -> None:
        """Request an early end; the result then is `cancelled`, or how the turn had ended
        before."""
        await self._send_cancel(keep_partial)

    @property
    def text(self) -> str:
        """Return the answer received so far."""
        return "".join(self._pieces)

    def begin(self) -> None:
        """Begin the answer, anew if some of it was received; called by `SessionClient`."""
        if self._pieces:
            self.add(TurnReplaced(""))

    def add(self, event: TurnEvent) -> None:
        """Add one event; called by `SessionClient`."""
        if isinstance(event, TurnText):
            self._pieces.append(event.text)
        elif isinstance(event, TurnReplaced):
            self._pieces = [event.text]
        last = self._events[-1] if self._events else None
        if len(self._events) < MAX_BUFFERED_EVENTS:
            self._events.append(event)
        # The buffer is full: merge the text into the last event.
        elif isinstance(event, TurnText) and isinstance(last, TurnText):
            self._events[-1] = TurnText(
                last.text + event.text,
                last.num_tokens + event.num_tokens,
                event.received_s,
                last.reasoning + event.reasoning,
                last.tool_calls + event.tool_calls,
            )
        elif isinstance(event, TurnReplaced):
            self._events.clear()
            self._events.append(event)
        self._wake.set()

    def end(self, outcome: TurnResult | ClientError) -> None:
        """Set how the turn ended; called by `SessionClient`, and ignored after the first call."""
        if self._end is None:
            self._end = outcome
        self._wake.set()
