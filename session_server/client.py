"""A client of `kvsession.v1`: one session over one WebSocket that heals itself.

    async with await connect("http://127.0.0.1:30000") as session:
        turn = await session.start("My name is Ada.")
        async for event in turn:
            ...
        result = await turn.result()

A turn's life is its journal's on the server, not the socket's. When the socket is lost the client
connects again with the last sequence number it saw, and the server replays what it missed; turns
whose acceptance was not seen are sent again under the same id, which is an idempotency key. What
was lost for good ends the turn with an error; nothing is skipped silently.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_socket
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.typing import Subprotocol

from session_server.core.session_events import Message

SUBPROTOCOL: Final = Subprotocol("kvsession.v1")
RETRYABLE_CLOSE_CODES: Final = frozenset({1001, 1005, 1006, 1011, 1012, 1013, 4408})
"""Closes after which connecting again may help; 4408 is a reader that fell behind."""

MAX_BUFFERED_EVENTS: Final = 65_536
"""Events of one turn waiting for its reader; beyond it, texts are merged into the last one."""


class ClientError(Exception):
    """Root of what this module raises."""


class ConnectionLost(ClientError):
    """The server cannot be reached, or closed the socket for good; `code` is the close code."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class Refused(ClientError):
    """The server answered with an error of its table; `code` names it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client connects. Delays double from the first to the longest, in seconds."""

    token: str | None = None
    connect_timeout_s: float = 10.0
    max_attempts: int = 10
    first_delay_s: float = 0.05
    longest_delay_s: float = 2.0
    max_message_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True)
class TurnText:
    """A piece of the answer, the number of tokens behind it, and when it came (loop time, s)."""

    text: str
    num_tokens: int
    received_s: float


@dataclass(frozen=True, slots=True)
class TurnPrefill:
    """`processed` of `total` context tokens are computed, `cached` of them were before."""

    processed: int
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class TurnReplaced:
    """The journal no longer reached back: `text` replaces everything received so far."""

    text: str


TurnEvent = TurnText | TurnPrefill | TurnReplaced


class Usage(msgspec.Struct, frozen=True):
    """Token counts; `input_tokens` is the whole context, `cached_tokens` of it came for free."""

    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0


class Timings(msgspec.Struct, frozen=True):
    """Durations as the engine saw them, milliseconds; see `core.events.TurnTimings`."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    forward_ms: float = 0.0
    num_steps: int = 0


class WireFailure(msgspec.Struct, frozen=True):
    """The `error` object of a frame."""

    code: str
    message: str = ""
    type: str = ""
    retryable: bool = False
    param: str | None = None
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class TurnResult:
    """How a turn ended. `text` is what stays in the session's history."""

    turn_id: str
    status: Literal["completed", "cancelled", "failed"]
    text: str
    finish_reason: str | None
    usage: Usage
    timings: Timings
    error: WireFailure | None = None


class TurnHandle:
    """One turn as its reader sees it: iterate over its events once, then await `result`."""

    def __init__(self, session: SessionClient, turn_id: str) -> None:
        self.turn_id = turn_id
        self._session = session
        self._events: deque[TurnEvent] = deque()
        self._pieces: list[str] = []
        self._wake = asyncio.Event()
        self._end: TurnResult | ClientError | None = None

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
        """Ask for an early end; the result then says `cancelled`, or how the turn had ended."""
        await self._session.cancel(self.turn_id, keep_partial=keep_partial)

    @property
    def text(self) -> str:
        """The answer received so far."""
        return "".join(self._pieces)

    def add(self, event: TurnEvent) -> None:
        """For `SessionClient`: one more event."""
        if isinstance(event, TurnText):
            self._pieces.append(event.text)
        elif isinstance(event, TurnReplaced):
            self._pieces = [event.text]
        last = self._events[-1] if self._events else None
        if len(self._events) < MAX_BUFFERED_EVENTS:
            self._events.append(event)
        elif isinstance(event, TurnText) and isinstance(last, TurnText):
            self._events[-1] = TurnText(
                last.text + event.text, last.num_tokens + event.num_tokens, event.received_s
            )
        elif isinstance(event, TurnReplaced):
            self._events.clear()
            self._events.append(event)
        self._wake.set()

    def end(self, outcome: TurnResult | ClientError) -> None:
        """For `SessionClient`: the last word on the turn; later ones are ignored."""
        if self._end is None:
            self._end = outcome
        self._wake.set()


class SessionClient:
    """One session. Made by `connect`; as a context manager it closes the session at the end.

    `session_id` names the session, `opened` is the server's latest hello (its limits among them),
    `num_reconnects` counts the times the socket was replaced.
    """

    def __init__(self, url: str, session_id: str, options: ClientOptions) -> None:
        self.session_id = session_id
        self.opened: Mapping[str, Any] = {}
        self.num_reconnects = 0
        self._base = _socket_base(url)
        self._options = options
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._last_seq = 0
        self._turns: dict[str, tuple[TurnHandle, bytes]] = {}
        self._leaving = False
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def attach(self) -> None:
        """Connect and begin to read; called once, by `connect`.

        Raises:
            ConnectionLost: nothing answered in time.
            Refused: the server answered with an error (no such session, unauthorized, limits).
        """
        assert self._reader is None, "attached twice"
        self._socket = await self._open_socket()
        self._reader = asyncio.create_task(self._read(), name=f"read {self.session_id}")

    async def start(
        self,
        content: str | Sequence[Message],
        *,
        sampling: Mapping[str, object] | None = None,
        turn_id: str | None = None,
        generate: bool = True,
    ) -> TurnHandle:
        """Begin a turn. `content` is a user's text, or messages with roles.

        `turn_id` is an idempotency key; `generate` False computes the input and answers nothing.
        """
        messages = [Message("user", content)] if isinstance(content, str) else content
        turn_id = turn_id or f"t_{secrets.token_hex(8)}"
        frame = {
            "type": "turn.create",
            "turn_id": turn_id,
            "input": [{"role": m.role, "content": m.content} for m in messages],
            "sampling": dict(sampling or {}),
            "generate": generate,
        }
        handle = TurnHandle(self, turn_id)
        payload = msgspec.json.encode(frame)
        self._turns[turn_id] = (handle, payload)
        await self._send(payload)
        return handle

    async def ask(
        self, content: str | Sequence[Message], *, sampling: Mapping[str, object] | None = None
    ) -> TurnResult:
        """Run one turn to its end."""
        return await (await self.start(content, sampling=sampling)).result()

    async def cancel(self, turn_id: str, *, keep_partial: bool = True) -> None:
        """Cancel one turn; does nothing on the server when it has ended."""
        frame = {"type": "turn.cancel", "turn_id": turn_id, "keep_partial": keep_partial}
        await self._send(msgspec.json.encode(frame))

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """End the session on the server and the connection here; idempotent."""
        if self._reader is None or self._leaving:
            return
        await self._send(b'{"type":"session.close"}')
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        except TimeoutError:
            self._fail_turns(ConnectionLost("the server did not confirm the close"))
        await self.leave()

    async def leave(self) -> None:
        """Drop the connection and keep the session; `connect` with its id comes back to it."""
        self._leaving = True
        if self._socket is not None:
            await self._socket.close()
        if self._reader is not None:
            await self._reader
        self._fail_turns(ConnectionLost("the client left"))

    def cut(self) -> None:
        """Lose the connection as a cable would, for tests of resuming: no handshake, no warning."""
        if self._socket is not None:
            self._socket.transport.abort()

    async def _send(self, payload: bytes) -> None:
        if self._leaving or self._closed.is_set():
            raise ConnectionLost("the session's connection is closed")
        socket = self._socket
        if socket is None:
            return  # between two sockets: turns are sent again after the next hello
        try:
            await socket.send(payload, text=True)
        except ConnectionClosed:
            return  # the reader sees it too and connects again

    async def _read(self) -> None:
        """Receive until the session is over, replacing the socket when it is lost."""
        try:
            while True:
                assert self._socket is not None
                try:
                    async for payload in self._socket:
                        self._receive(payload)
                except ConnectionClosed:
                    pass  # the close code, read below, says what happened
                code, reason = self._socket.close_code, self._socket.close_reason
                if self._leaving or self._closed.is_set():
                    return
                if code is not None and code not in RETRYABLE_CLOSE_CODES | {1000}:
                    raise ConnectionLost(f"closed by the server: {code} {reason}", code=code)
                self._socket = None
                self._socket = await self._open_socket()
                self.num_reconnects += 1
                await self._send_unseen()
        except ClientError as error:
            self._fail_turns(error)
        finally:
            self._closed.set()

    async def _send_unseen(self) -> None:
        for _, payload in list(self._turns.values()):
            await self._send(payload)

    async def _open_socket(self) -> ClientConnection:
        options, delay_s = self._options, self._options.first_delay_s
        problem = "no attempt was made"
        for _ in range(options.max_attempts):
            try:
                async with asyncio.timeout(options.connect_timeout_s):
                    return await self._handshake()
            except (OSError, TimeoutError, ConnectionClosed, InvalidHandshake) as error:
                if _is_final(error):
                    raise ConnectionLost(f"refused: {error}", code=_close_code(error)) from error
                problem = str(error) or type(error).__name__
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, options.longest_delay_s)
        raise ConnectionLost(f"no connection after {options.max_attempts} attempts: {problem}")

    async def _handshake(self) -> ClientConnection:
        """One connection, up to and including the server's hello."""
        path = f"/v1/sessions/{self.session_id}/ws"
        if self.opened:
            path += f"?after={self._last_seq}&epoch={self.opened['epoch']}"
        headers = {"Authorization": f"Bearer {self._options.token}"} if self._options.token else {}
        socket = await open_socket(
            self._base + path,
            subprotocols=[SUBPROTOCOL],
            additional_headers=headers,
            compression=None,
            max_size=self._options.max_message_bytes,
            open_timeout=self._options.connect_timeout_s,
            proxy=None,
        )
        hello = msgspec.json.decode(await socket.recv(), type=dict[str, Any])
        if hello["type"] == "error":
            await socket.close()
            failure = msgspec.convert(hello["error"], WireFailure)
            raise Refused(failure.code, failure.message)
        if hello["type"] != "session.opened":
            raise ConnectionLost(f"expected a hello, got a frame of type {hello['type']!r}")
        self.session_id, self.opened = hello["session_id"], hello
        if not hello.get("resumed"):
            self._last_seq = max(self._last_seq, hello.get("seq", 0))
        return socket

    def _receive(self, payload: str | bytes) -> None:
        frame = msgspec.json.decode(payload, type=dict[str, Any])
        seq = frame.get("seq")
        if seq is not None:
            if seq <= self._last_seq:
                return  # a replay overlapped what we had
            self._last_seq = seq
        match frame["type"]:
            case "turn.delta" | "turn.progress" | "turn.completed" | "turn.cancelled":
                self._receive_turn(frame)
            case "turn.failed" | "error":
                self._receive_failure(frame)
            case "session.snapshot":
                self._receive_snapshot(frame)
            case "session.closed":
                self._closed.set()
                self._fail_turns(ConnectionLost(f"the session is closed: {frame.get('reason')}"))
            case _:
                return  # hello, pong, state: nothing a turn waits for

    def _receive_turn(self, frame: Mapping[str, Any]) -> None:
        entry = self._turns.get(frame["turn_id"])
        if entry is None:
            return  # another connection's turn
        handle, _ = entry
        if frame["type"] == "turn.delta":
            now_s = asyncio.get_running_loop().time()
            handle.add(TurnText(frame["text"], frame.get("n", 0), now_s))
        elif frame["type"] == "turn.progress":
            handle.add(TurnPrefill(frame["processed"], frame["cached"], frame["total"]))
        else:
            self._end_turn(handle, frame, None)

    def _receive_failure(self, frame: Mapping[str, Any]) -> None:
        failure = msgspec.convert(frame["error"], WireFailure)
        entry = self._turns.get(frame.get("turn_id") or failure.turn_id or "")
        if entry is None:
            return  # about a frame of ours that belongs to no live turn
        handle, _ = entry
        if frame["type"] == "turn.failed":
            self._end_turn(handle, frame, failure)
        elif failure.code != "turn_not_active":
            self._turns.pop(handle.turn_id)
            handle.end(Refused(failure.code, failure.message))

    def _receive_snapshot(self, frame: Mapping[str, Any]) -> None:
        """The journal did not reach back: take the running turn's text, give up ended turns."""
        running = frame.get("turn") or {}
        for turn_id, (handle, _) in list(self._turns.items()):
            if turn_id == running.get("turn_id"):
                handle.add(TurnReplaced(running.get("text", "")))

    def _end_turn(
        self, handle: TurnHandle, frame: Mapping[str, Any], failure: WireFailure | None
    ) -> None:
        self._turns.pop(handle.turn_id)
        status: Literal["completed", "cancelled", "failed"] = frame["type"].removeprefix("turn.")
        item = frame.get("item") or {}
        handle.end(
            TurnResult(
                turn_id=handle.turn_id,
                status=status,
                text=item.get("content", handle.text),
                finish_reason=frame.get("finish_reason"),
                usage=msgspec.convert(frame.get("usage") or {}, Usage),
                timings=msgspec.convert(frame.get("timings") or {}, Timings),
                error=failure,
            )
        )

    def _fail_turns(self, error: ClientError) -> None:
        for handle, _ in self._turns.values():
            handle.end(error)
        self._turns.clear()


async def connect(
    url: str, *, session_id: str | None = None, options: ClientOptions = ClientOptions()
) -> SessionClient:
    """Open a new session, or come back to a known one.

    Args:
        url: of the server, http(s) or ws(s), without a path.
        session_id: of an open session; None makes a new one.
        options: credentials, timeouts, attempts.

    Raises:
        ConnectionLost: nothing answered, or the server closed the socket for good.
        Refused: the server answered with an error.
    """
    client = SessionClient(url, session_id or "new", options)
    await client.attach()
    return client


def _socket_base(url: str) -> str:
    scheme, _, rest = url.rstrip("/").partition("://")
    return {"http": "ws", "https": "wss"}.get(scheme, scheme) + "://" + rest


def _is_final(error: Exception) -> bool:
    """Whether connecting again cannot help."""
    if isinstance(error, ConnectionClosed):
        code = _close_code(error)
        return code is not None and code not in RETRYABLE_CLOSE_CODES
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is not None and 400 <= status < 500 and status != 429


def _close_code(error: Exception) -> int | None:
    received = getattr(error, "rcvd", None)
    return None if received is None else received.code
