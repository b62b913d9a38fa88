"""Run one session over one WebSocket, which is replaced and resumed when it is lost."""

from __future__ import annotations

import asyncio
import enum
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_socket
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.typing import Subprotocol

from session_server.client.address import key_header, socket_address
from session_server.client.bodies import input_fields, thought_and_calls
from session_server.client.errors import ClientError, ConnectionLost
from session_server.client.refusals import (
    RETRYABLE_CLOSE_CODES,
    SESSION_MOVED,
    asked_s,
    final_error,
    refusal_in,
)
from session_server.client.turn import (
    DraftProgress,
    TurnHandle,
    TurnPrefill,
    TurnReplaced,
    TurnResult,
    TurnText,
    WireFailure,
)
from session_server.core.events import TurnTimings
from session_server.core.session_events import (
    TokenUsage,
    ToolCallDelta,
    TurnInput,
)

SUBPROTOCOL: Final = Subprotocol("kvsession.v1")
_CLOSE: Final = b'{"type":"session.close"}'


class ConnectionState(enum.Enum):
    """Define what `ClientOptions.on_connection` reports about the connection of an open session."""

    LOST = "lost"
    """The connection ended, and the client connects again."""
    BACK = "back"
    """The connection is back, and nothing was missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Configure how a client connects. Delays double from the first to the longest, in seconds.
    A server that refuses a connection and says when to try again (`Retry-After`) is left alone for
    as long, and given up if that is longer than `longest_wait_s`.

    `trust` says whose certificates to believe; None: those of this machine. `first_attempts` are
    for a server that was never reached, `max_attempts` for one that was lost.
    `on_connection` is called on the event loop's thread when an open session's connection is lost
    and when it is back.
    """

    token: str | None = None
    trust: ssl.SSLContext | None = None
    connect_timeout_s: float = 10.0
    first_attempts: int = 3
    max_attempts: int = 10
    first_delay_s: float = 0.05
    longest_delay_s: float = 2.0
    longest_wait_s: float = 60.0
    max_message_bytes: int = 16 << 20
    on_connection: Callable[[ConnectionState], None] | None = None


@dataclass(slots=True)
class _LiveTurn:
    """Hold what must be sent again if the server may not have received it. `is_resent`: it was,
    and what the journal still tells may be older than that."""

    handle: TurnHandle
    create: bytes
    cancel: bytes | None = None
    is_resent: bool = False


class _Intent(enum.Enum):
    """Define what the client intends for its session: stay in it, close it, leave it open."""

    STAY = enum.auto()
    CLOSE = enum.auto()
    LEAVE = enum.auto()


@dataclass(slots=True)
class _Heard:
    """Hold what is waited for: a connection, the end of the session, the newest draft's answer.

    `draft_id`: the newest draft; `drafted`: the one that was answered last, and how.
    """

    connected: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    has_drafted: asyncio.Event = field(default_factory=asyncio.Event)
    draft_id: str = ""
    drafted: tuple[str, DraftProgress | WireFailure] | None = None


class SessionClient:
    """Use one session. Created by `connect`; as a context manager it closes the session at the end.

    `session_id` names the session, `opened` is the server's latest hello (its limits among them),
    `num_reconnects` counts the times the socket was replaced.
    """

    def __init__(self, urls: Sequence[str], session_id: str, options: ClientOptions) -> None:
        self.session_id = session_id
        self.opened: Mapping[str, Any] = {}
        self.num_reconnects = 0
        self._bases = deque(map(socket_address, urls))
        self._options = options
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[ClientError | None] | None = None
        self._last_seq = 0
        self._turns: dict[str, _LiveTurn] = {}
        self._intent = _Intent.STAY
        self._heard = _Heard()

    @property
    def is_over(self) -> bool:
        """Return whether nothing can be sent any more: the session is gone, or the server is
        unreachable."""
        return self._heard.closed.is_set()

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
        """Connect and start reading; called once, by `connect`.

        Raises:
            ConnectionLost: nothing answered in time.
            Refused: the server answered with an error (no such session, unauthorized, limits).
        """
        assert self._reader is None, "attached twice"
        self._socket = await self._open_socket()
        self._heard.connected.set()
        self._reader = asyncio.create_task(self._read(), name=f"read {self.session_id}")

    async def start(
        self,
        content: str | TurnInput,
        *,
        sampling: Mapping[str, object] | None = None,
        turn_id: str | None = None,
        generate: bool = True,
    ) -> TurnHandle:
        """Start a turn. A `content` that is a string is one message of the user.

        `turn_id` is an idempotency key; `generate` False computes the input and answers nothing.
        """
        turn_id = turn_id or f"t_{secrets.token_hex(8)}"
        frame: dict[str, object] = {"type": "turn.create", "turn_id": turn_id}
        frame |= input_fields(content)
        frame |= {"sampling": dict(sampling or {}), "generate": generate}
        handle = TurnHandle(
            turn_id, send_cancel=lambda keep: self._cancel(turn_id, keep_partial=keep)
        )
        turn = _LiveTurn(handle, msgspec.json.encode(frame))
        self._turns[turn_id] = turn
        await self._send(turn.create)
        return turn.handle

    async def ask(
        self, content: str | TurnInput, *, sampling: Mapping[str, object] | None = None
    ) -> TurnResult:
        """Run one turn to its end."""
        return await (await self.start(content, sampling=sampling)).result()

    async def draft(self, content: str | TurnInput | None, *, draft_id: str | None = None) -> str:
        """Say what the next turn would be if it were sent now, and return the id of the draft.

        Sends and does not wait: call it with every key. The server computes it ahead, and the turn
        that follows computes what differs; None drops it. See `drafted`.
        """
        draft_id = draft_id or f"d_{secrets.token_hex(8)}"
        frame: dict[str, object] = {"type": "turn.draft", "draft_id": draft_id}
        frame |= {"draft_id": None} if content is None else input_fields(content)
        self._heard.draft_id = draft_id
        await self._send(msgspec.json.encode(frame))
        return draft_id

    async def drafted(self, draft_id: str) -> DraftProgress:
        """Wait until the server has computed a draft, the newest.

        Raises:
            Refused: the server did not accept the draft.
            ClientError: the connection was given up first.
        """
        while self._heard.drafted is None or self._heard.drafted[0] != draft_id:
            if self.is_over:
                raise self._end()
            self._heard.has_drafted.clear()
            await self._heard.has_drafted.wait()
        _, answer = self._heard.drafted
        if isinstance(answer, WireFailure):
            raise answer.refusal()
        return answer

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """Close the session on the server and the connection here; idempotent."""
        if self._reader is None or self._intent is not _Intent.STAY:
            return
        self._intent = _Intent.CLOSE
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(_CLOSE)
                await self._heard.closed.wait()
        except (TimeoutError, ClientError):
            self._fail_turns(ConnectionLost("the server did not confirm the close"))
        await self.leave()

    async def leave(self) -> None:
        """Drop the connection and keep the session; `connect` with its id returns to it."""
        self._intent = _Intent.LEAVE
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._socket is not None:
            await self._socket.close()
        self._fail_turns(ConnectionLost("the client left"))

    def abort_connection(self) -> None:
        """Drop the connection without a handshake, as a cut cable would, to test resuming."""
        if self._socket is not None:
            self._socket.transport.abort()

    async def _cancel(self, turn_id: str, *, keep_partial: bool) -> None:
        frame = {"type": "turn.cancel", "turn_id": turn_id, "keep_partial": keep_partial}
        payload = msgspec.json.encode(frame)
        turn = self._turns.get(turn_id)
        if turn is None:
            return  # it has ended
        turn.cancel = payload
        await self._send(payload)

    async def _send(self, payload: bytes) -> None:
        """Send on the present socket, or on the next one if there is none."""
        while True:
            await self._heard.connected.wait()
            if self._socket is None or self._intent is _Intent.LEAVE or self._heard.closed.is_set():
                raise self._end()
            socket = self._socket
            try:
                await socket.send(payload, text=True)
            except ConnectionClosed:
                if self._socket is socket:
                    self._heard.connected.clear()  # `_read` sees the loss too, and reconnects
            else:
                return

    def _end(self) -> ClientError:
        """Return why nothing more can be sent."""
        reader = self._reader
        error = reader.result() if reader and reader.done() and not reader.cancelled() else None
        return error or ConnectionLost("the session's connection is closed")

    async def _read(self) -> ClientError | None:
        """Receive until the session is over, replacing the socket when it is lost.

        Returns:
            Why the connection was given up; None if the session was closed or left.
        """
        try:
            while True:
                assert self._socket is not None
                await self._receive_all(self._socket)
                if self._intent is _Intent.LEAVE or self._heard.closed.is_set():
                    return None
                code, reason = self._socket.close_code, self._socket.close_reason
                if code is not None and code not in RETRYABLE_CLOSE_CODES:
                    raise ConnectionLost(f"closed by the server: {code} {reason}", code=code)
                self._heard.connected.clear()
                self._notify_connection(ConnectionState.LOST)
                self._socket = await self._open_socket()
                self.num_reconnects += 1
                await self._resend_unconfirmed()
                self._heard.connected.set()
                self._notify_connection(ConnectionState.BACK)
        except ClientError as error:
            self._socket = None
            self._fail_turns(error)
            return error
        finally:
            self._heard.closed.set()
            self._heard.connected.set()
            self._heard.has_drafted.set()

    def _notify_connection(self, state: ConnectionState) -> None:
        if self._options.on_connection is not None:
            self._options.on_connection(state)

    async def _receive_all(self, socket: ClientConnection) -> None:
        try:
            async for payload in socket:
                for turn in self._receive(payload):
                    await socket.send(turn.create, text=True)
        except ConnectionClosed:
            return  # `_read` looks at the socket's close code

    async def _resend_unconfirmed(self) -> None:
        """Send again what a lost socket may have dropped; turn ids make repeating harmless."""
        assert self._socket is not None
        resumed = self.opened.get("resumed")
        try:
            for turn in list(self._turns.values()):
                if not (resumed and turn.handle.is_accepted):
                    turn.is_resent = True
                    await self._socket.send(turn.create, text=True)
                if turn.cancel is not None:
                    await self._socket.send(turn.cancel, text=True)
            if self._intent is _Intent.CLOSE:
                await self._socket.send(_CLOSE, text=True)
        except ConnectionClosed:
            return  # lost again: `_read` reconnects and repeats this

    async def _open_socket(self) -> ClientConnection:
        options, delay_s = self._options, self._options.first_delay_s
        problem: ClientError = ConnectionLost("no attempt was made")
        attempts = options.max_attempts if self.opened else options.first_attempts
        for number in range(1, attempts + 1):
            try:
                async with asyncio.timeout(options.connect_timeout_s):
                    return await self._handshake()
            except (OSError, TimeoutError, ConnectionClosed, InvalidHandshake) as error:
                final = final_error(error)
                if final is not None:
                    raise final from error
                why = str(error) or type(error).__name__
                lost = ConnectionLost(f"no connection after {number} attempts: {why}")
                problem, wait_s = refusal_in(error) or lost, asked_s(error)
                self._bases.rotate(-1)  # another replica may take the session
            if number == attempts or wait_s > options.longest_wait_s:
                break
            await asyncio.sleep(max(delay_s, wait_s))
            delay_s = min(2 * delay_s, options.longest_delay_s)
        raise problem

    async def _handshake(self) -> ClientConnection:
        """Open one connection, up to and including the server's hello."""
        base, path = self._bases[0], f"/v1/sessions/{self.session_id}/ws"
        if self.opened:
            path += f"?after={self._last_seq}&epoch={self.opened['epoch']}"
        headers = key_header(self._options.token)
        socket = await open_socket(
            base + path,
            subprotocols=[SUBPROTOCOL],
            additional_headers=headers,
            compression=None,
            max_size=self._options.max_message_bytes,
            open_timeout=self._options.connect_timeout_s,
            proxy=None,
            ssl=(self._options.trust or True) if base.startswith("wss:") else None,
        )
        try:
            hello = msgspec.json.decode(await socket.recv(), type=dict[str, Any])
        except BaseException:
            socket.transport.abort()
            raise
        if hello["type"] != "session.opened":
            await socket.close()
            raise msgspec.convert(hello.get("error", {"code": "no_hello"}), WireFailure).refusal()
        self.session_id, self.opened = hello["session_id"], hello
        if not hello["resumed"]:
            # Nothing is replayed: entries continue after the hello's `seq`.
            self._last_seq = hello["seq"]
        return socket

    def _receive(self, payload: str | bytes) -> Sequence[_LiveTurn]:
        """Process one frame; return the turns that must be sent again."""
        frame = msgspec.json.decode(payload, type=dict[str, Any])
        if frame["type"] == "session.snapshot":
            return self._receive_snapshot(frame)
        if (seq := frame.get("seq")) is not None:
            if seq <= self._last_seq:
                return ()  # a replay may overlap what is known
            self._last_seq = seq
        turn = self._turns.get(frame.get("turn_id", ""))
        if turn is not None and turn.is_resent and frame.get("retryable"):
            # It failed before it was sent again, and runs again; or else shall.
            turn.is_resent = False
            return (turn,)
        self._receive_entry(frame)
        return ()

    def _receive_entry(self, frame: Mapping[str, Any]) -> None:
        match frame["type"]:
            case "turn.created" | "turn.delta" | "turn.progress":
                self._receive_step(frame)
            case "turn.completed" | "turn.cancelled" | "turn.failed":
                self._receive_end(frame)
            case "turn.drafted":
                self._receive_drafted(frame["draft_id"], msgspec.convert(frame, DraftProgress))
            case "error":
                self._receive_refusal(frame)
            case "session.closed":
                self._heard.closed.set()
                self._fail_turns(ConnectionLost(f"the session is closed: {frame.get('reason')}"))
            case _:
                return  # pong, state, settings: nothing that a turn waits for

    def _receive_step(self, frame: Mapping[str, Any]) -> None:
        turn = self._turns.get(frame["turn_id"])
        if turn is None:
            return  # another connection's turn
        turn.handle.is_accepted = True
        if frame["type"] == "turn.created" and "seq" in frame:
            turn.handle.begin()
        elif frame["type"] == "turn.delta":
            now_s = asyncio.get_running_loop().time()
            pieces = msgspec.convert(frame.get("tool_calls", ()), tuple[ToolCallDelta, ...])
            thought = frame.get("reasoning", "")
            turn.handle.add(TurnText(frame["text"], frame["n"], now_s, thought, pieces))
        elif frame["type"] == "turn.progress":
            progress = TurnPrefill(frame["processed"], frame["cached"], frame["total"])
            turn.handle.add(progress)

    def _receive_drafted(self, draft_id: str, answer: DraftProgress | WireFailure) -> None:
        self._heard.drafted = draft_id, answer
        self._heard.has_drafted.set()

    def _receive_refusal(self, frame: Mapping[str, Any]) -> None:
        failure = msgspec.convert(frame["error"], WireFailure)
        turn = self._turns.get(failure.turn_id or "")
        if failure.code == SESSION_MOVED and turn is not None:
            return  # it is sent again on the next socket: this one closes
        if turn is None and failure.turn_id == self._heard.draft_id:
            self._receive_drafted(failure.turn_id, failure)
        if turn is None or turn.handle.is_accepted:
            return  # a cancel that came too late, or a frame without a turn
        self._turns.pop(turn.handle.turn_id)
        turn.handle.end(failure.refusal())

    def _receive_snapshot(self, frame: Mapping[str, Any]) -> Sequence[_LiveTurn]:
        """Restart the running turn from the text in the snapshot, because the journal did not reach
        back. Return the turns that neither run nor wait: they may have ended, and how is not known
        here."""
        self._last_seq = frame["seq"]
        running = frame.get("turn") or {}
        turn = self._turns.get(running.get("turn_id", ""))
        if turn is not None:
            turn.handle.add(TurnReplaced(running["text"], *thought_and_calls(running)))
        live = {running.get("turn_id"), *frame.get("queued", ())}
        return [turn for turn_id, turn in self._turns.items() if turn_id not in live]

    def _receive_end(self, frame: Mapping[str, Any]) -> None:
        if frame.get("error", {}).get("code") == SESSION_MOVED:
            if (moved := self._turns.get(frame["turn_id"])) is not None:
                moved.handle.is_accepted = False  # it is sent again to whoever has the session now
            return
        turn = self._turns.pop(frame["turn_id"], None)
        if turn is None:
            return
        status: Literal["completed", "cancelled", "failed"] = frame["type"].removeprefix("turn.")
        failure = frame.get("error")
        item = frame.get("item", {})
        reasoning, calls = thought_and_calls(item)
        timings = dict.fromkeys(TurnTimings.__struct_fields__, 0) | (frame.get("timings") or {})
        turn.handle.end(
            TurnResult(
                turn_id=turn.handle.turn_id,
                status=status,
                text=item.get("content", ""),
                finish_reason=frame.get("finish_reason"),
                usage=msgspec.convert(frame["usage"], TokenUsage),
                timings=msgspec.convert(timings, TurnTimings),
                error=None if failure is None else msgspec.convert(failure, WireFailure),
                reasoning=reasoning,
                tool_calls=calls,
                is_durable=frame.get("durable"),
            )
        )

    def _fail_turns(self, error: ClientError) -> None:
        for turn in self._turns.values():
            turn.handle.end(error)
        self._turns.clear()


async def connect(
    url: str | Sequence[str],
    *,
    session_id: str | None = None,
    options: ClientOptions = ClientOptions(),
) -> SessionClient:
    """Open a new session, or return to a known one.

    Args:
        url: of the server, http(s) or ws(s); a trailing `/v1` is removed. Of several replicas that
            share a store any may be asked for a session: the next one is, where one does not answer
            or has given the session up.
        session_id: of an open session; None opens a new one.
        options: credentials, timeouts, attempts.

    Raises:
        BadAddress: `url` is not the address of a server.
        ConnectionLost: no server answered, or it closed the socket for good.
        Refused: the server answered with an error.
    """
    urls = (url,) if isinstance(url, str) else tuple(url)
    client = SessionClient(urls, session_id or "new", options)
    await client.attach()
    return client
