"""Stream a journal as server-sent events: replay, then live, with `id:` lines to resume from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from session_server.core.session_events import SessionEntry
from session_server.protocol.errors import ErrorBody, ErrorResponse
from session_server.protocol.frames import coalesce
from session_server.sessions.journal import Journal
from session_server.web.refusals import HttpRefusal

T = TypeVar("T")

EVENT_STREAM: Final = "text/event-stream"
HEARTBEAT = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
"""The last event where events have no names."""


class EventStream(Response):
    """Send chunks as they come, until they or the client end."""

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(media_type=EVENT_STREAM, headers=headers)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the chunks or the client end; the generator is closed in both cases."""
        # A client that disconnected is not a server error.
        with contextlib.suppress(HttpRefusal, OSError):
            await until_disconnect(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._chunks) as chunks:
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                del chunk
                # Only what was written counts as unread: encode nothing more before it is read.
                await send({"type": "http.response.body", "body": b"", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Run `work` for a request and return its result; cancel it when the client disconnects.

    Raises:
        HttpRefusal: the client disconnected first.
    """
    worker = asyncio.create_task(work)
    listener = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((worker, listener), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise HttpRefusal(499, "The client disconnected.")
        return worker.result()
    finally:
        for task in (worker, listener):
            task.cancel()
        await asyncio.gather(worker, listener, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def data_event(body: Any) -> bytes:
    """Encode an event without a name, as OpenAI's clients and SGLang's expect it."""
    return b"".join((b"data: ", msgspec.json.encode(body), b"\n\n"))


def error_event(body: ErrorBody) -> bytes:
    """Encode an error as such an event."""
    return data_event(ErrorResponse(error=body))


def event_chunk(frame: msgspec.Struct, *, seq: int | None) -> bytes:
    """Encode one event: its frame as data, its type as name, its sequence number as id."""
    payload = msgspec.json.encode(frame)
    name = str(type(frame).__struct_config__.tag)
    head = f"event: {name}\n" if seq is None else f"id: {seq}\nevent: {name}\n"
    return b"".join((head.encode(), b"data: ", payload, b"\n\n"))


Merge = Callable[[Iterable[tuple[int, SessionEntry]]], Iterable[tuple[int, SessionEntry]]]
"""How entries that are read together become those that a reader gets."""


def each_entry(entries: Iterable[tuple[int, SessionEntry]]) -> Iterable[tuple[int, SessionEntry]]:
    """Merge nothing."""
    return entries


async def read_batches(
    journal: Journal, after_seq: int, *, heartbeat_s: float, merge: Merge = coalesce
) -> AsyncGenerator[list[tuple[int, SessionEntry]], None]:
    """Yield entries after `after_seq` as they come, adjacent deltas merged unless `merge` says
    otherwise; [] after each heartbeat interval without any.

    Raises:
        OffsetLost: the journal no longer reaches back so far.
    """
    position = after_seq
    while True:
        entries = journal.read(position)
        if entries:
            position = entries[-1].seq
            yield list(merge((item.seq, item.entry) for item in entries))
            continue
        try:
            async with asyncio.timeout(heartbeat_s):
                has_more = await journal.wait(position)
        except TimeoutError:
            yield []
            continue
        if not has_more:
            return
