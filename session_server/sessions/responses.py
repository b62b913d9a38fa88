"""Keep the responses of OpenAI's clients: what was asked, what was answered, in which session.

They are bounded in bytes, of each owner and in all, and count as bytes of conversations. The one
unused for longest goes first. A response that is not stored is known to one connection alone, and
never on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from session_server.core.errors import ResponseNotFound, SessionMoved
from session_server.core.owner import Owner
from session_server.core.session_events import Message
from session_server.sessions.backlog import Backlog
from session_server.sessions.footprint import message_bytes, text_bytes
from session_server.sessions.kept import KeptRecords
from session_server.sessions.quotas import Quotas
from session_server.sessions.record_log import RecordLog
from session_server.sessions.restoring import reading
from session_server.sessions.store.records import RESPONSES, Damaged, PartCodec, Parts

RESPONSE_BYTES: Final = 1536
"""Host memory of one response without its texts, its places in the tables included."""

ResponseState = Literal["running", "said", "lost"]
"""`said`: another response may go on from it; `lost`: it left nothing in its session."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Hold what a response was asked: the messages and tools that every context of its call begins
    with, and the new messages. `open_calls`: those that no output answers, behind all of it."""

    opening: tuple[Message, ...]
    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    open_calls: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return the host memory of the texts."""
        messages = sum(map(message_bytes, (*self.opening, *self.messages)))
        return messages + sum(map(text_bytes, (*self.tools, *self.open_calls)))


@dataclass(frozen=True, slots=True)
class SaidIn:
    """Name the session in which something was said. `number`: `SessionLife.order`, which no other
    session has. `epoch`: of the journal that has the events; "" once it is gone."""

    session_id: str = ""
    number: int = 0
    epoch: str = ""


@dataclass(frozen=True, slots=True)
class ResponseContent:
    """Hold a response as its client sees it. `body`: as JSON. `ended_s`: wall-clock seconds, 0
    before. `answer`: None where nothing was said. `running_in`: the replica of a shared store that
    runs it while its lease goes on; 0 once it has ended."""

    body: bytes
    state: ResponseState = "running"
    ended_s: int = 0
    answer: Message | None = None
    running_in: int = 0


@dataclass(slots=True, eq=False)
class StoredResponse:
    """Hold one response.

    `previous`: the id of the one it goes on from. `scope`: the connection that alone knows it; None
    for one that is stored. `runs_at`: where the other replica is reached that runs it; None if none
    does.
    """

    response_id: str
    owner: Owner
    place: SaidIn
    asked: Asked
    previous: str | None
    scope: object | None
    content: ResponseContent
    runs_at: str | None = None

    def check_here(self) -> None:
        """Raise SessionMoved if another replica runs it: its events are there, and its end."""
        if self.runs_at is not None:
            where = f" at {self.runs_at}: ask there" if self.runs_at else ""
            raise SessionMoved(f"the response runs in another replica{where}, or once it has ended")

    @property
    def key(self) -> str:
        """Return its id."""
        return self.response_id

    @property
    def made_in(self) -> str:
        """Return the session that it was made in."""
        return self.place.session_id

    @property
    def num_bytes(self) -> int:
        """Return the host memory of all of it."""
        answer = 0 if self.content.answer is None else message_bytes(self.content.answer)
        return RESPONSE_BYTES + self.asked.num_bytes + answer + len(self.content.body)

    @property
    def open_calls(self) -> tuple[str, ...]:
        """Return the ids of the calls that the next response must answer."""
        answer = () if self.content.answer is None else self.content.answer.tool_calls
        return (*self.asked.open_calls, *(call.id for call in answer))


class _Written(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Hold what the store has of a response that has ended, or failed if the process ended now."""

    session_id: str
    session_number: int
    opening: tuple[Message, ...]
    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    open_calls: tuple[str, ...]
    previous: str | None
    body: bytes
    state: ResponseState
    ended_s: int
    answer: Message | None
    running_in: int = 0


_written: Final = PartCodec(_Written, "a response")


class ResponseForm:
    """Say how responses are written: each in one part."""

    noun = RESPONSES
    may_change = False

    def parts(self, record: StoredResponse) -> Parts:
        """Return its one part."""
        place, asked, content = record.place, record.asked, record.content
        written = _Written(
            session_id=place.session_id,
            session_number=place.number,
            opening=asked.opening,
            messages=asked.messages,
            tools=asked.tools,
            open_calls=asked.open_calls,
            previous=record.previous,
            body=content.body,
            state=content.state,
            ended_s=content.ended_s,
            answer=content.answer,
            running_in=content.running_in,
        )
        return [(0, _written.encode(written))]

    def read(self, owner: Owner, key: str, parts: Parts) -> StoredResponse:
        """Return a response. Raises Damaged."""
        if len(parts) != 1:
            raise Damaged(f"it has {len(parts)} parts")
        found = _written.decode(parts[0][1])
        said = found.body, found.state, found.ended_s, found.answer, found.running_in
        return StoredResponse(
            response_id=key,
            owner=owner,
            place=SaidIn(found.session_id, found.session_number),
            asked=Asked(found.opening, found.messages, found.tools, found.open_calls),
            previous=found.previous,
            scope=None,
            content=ResponseContent(*said),
        )

    def read_on(self, record: StoredResponse, parts: Parts) -> None:
        """Raise Damaged: a response has no further parts."""
        raise Damaged(f"it has {len(parts)} parts too many")


class ResponseStore:
    """Hold responses by owner and id."""

    def __init__(self, quotas: Quotas, log: RecordLog, backlog: Backlog) -> None:
        self.records = KeptRecords[StoredResponse](quotas, ResponseForm(), log, backlog)
        self._log = log

    async def load(self, owner: Owner, response_id: str) -> None:
        """Bring a response into memory, before `find` is asked for it, and find out whether another
        replica runs it. Raises ServerBusy, InternalInconsistency."""
        await self.records.load(owner, response_id)
        found = self.records.get(owner, response_id)
        if found is None or not found.content.running_in or not self._log.is_shared:
            return
        with reading(self._log.store):
            found.runs_at = await self._log.address_of(found.content.running_in)
        state: ResponseState = "lost" if found.runs_at is None else "running"
        found.content = replace(found.content, state=state)
        # A replica writes the end of a response before it leaves.
        await self.records.load(owner, response_id)

    def find(self, owner: Owner, response_id: str, *, scope: object | None) -> StoredResponse:
        """Return a response that is stored, or that this connection knows, as one in use.

        Raises:
            ResponseNotFound: there is none, or it is another owner's or connection's.
            InternalInconsistency, ServerBusy: it is on disk, and cannot be read.
        """
        found = self.records.get(owner, response_id)
        if found is None or (found.scope is not None and found.scope is not scope):
            raise ResponseNotFound(f"Response with id '{response_id}' not found.", param="id")
        return found
