"""Keep the responses of OpenAI's clients: what was asked, what was answered, in which session.

They are bounded in bytes, of each owner and in all, and count as bytes of conversations. The one
unused for longest goes first. A response that is not stored is known to one connection alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal

from session_server.core.errors import ResponseNotFound, SessionServerError
from session_server.core.owner import Owner
from session_server.core.session_events import Message
from session_server.sessions.footprint import message_bytes, text_bytes
from session_server.sessions.kept import KeptRecords
from session_server.sessions.quotas import Quotas

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


@dataclass(slots=True, eq=False)
class StoredResponse:
    """Hold one response.

    `previous`: the id of the one it goes on from. `scope`: the connection that alone knows it; None
    for one that is stored. `body`: as JSON, as of now. `ended_s`: wall-clock seconds, 0 before.
    `answer`: None where nothing was said.
    """

    response_id: str
    owner: Owner
    session_id: str
    epoch: str
    asked: Asked
    previous: str | None
    scope: object | None
    body: bytes = b""
    ended_s: int = 0
    answer: Message | None = None
    state: ResponseState = "running"
    counted_bytes: int = 0

    @property
    def key(self) -> str:
        """Return its id."""
        return self.response_id

    @property
    def num_bytes(self) -> int:
        """Return the host memory of all of it."""
        answer = 0 if self.answer is None else message_bytes(self.answer)
        return RESPONSE_BYTES + self.asked.num_bytes + answer + len(self.body)

    @property
    def open_calls(self) -> tuple[str, ...]:
        """Return the ids of the calls that the next response must answer."""
        answer = () if self.answer is None else self.answer.tool_calls
        return (*self.asked.open_calls, *(call.id for call in answer))


class ResponseStore:
    """Hold responses by owner and id, and count those of each session."""

    def __init__(self, quotas: Quotas) -> None:
        self.records = KeptRecords[StoredResponse](quotas, "responses", on_dropped=self._on_dropped)
        self._num_in_session: Counter[tuple[Owner, str]] = Counter()

    def find(self, owner: Owner, response_id: str, *, scope: object | None) -> StoredResponse:
        """Return a response that is stored, or that this connection knows, as one in use.

        Raises:
            ResponseNotFound: there is none, or it is another owner's or connection's.
        """
        found = self.records.get(owner, response_id)
        if found is None or (found.scope is not None and found.scope is not scope):
            raise ResponseNotFound(f"Response with id '{response_id}' not found.", param="id")
        return found

    def add(self, response: StoredResponse) -> None:
        """Keep a response. Raises what `KeptRecords.add` raises."""
        self._num_in_session[response.owner, response.session_id] += 1
        try:
            self.records.add(response)
        except SessionServerError:
            self._on_dropped(response)
            raise

    def num_in(self, owner: Owner, session_id: str) -> int:
        """Return how many responses are kept that were made in a session."""
        return self._num_in_session.get((owner, session_id), 0)

    def _on_dropped(self, response: StoredResponse) -> None:
        session = response.owner, response.session_id
        self._num_in_session[session] -= 1
        if not self._num_in_session[session]:
            del self._num_in_session[session]
