"""Find the session of a conversation that its client does not name, by what was said in it.

A client that sends the whole conversation with every call, and no name for it, would otherwise
compute all of it again. Only sessions opened here are found, so that such a call never changes a
session which somebody knows by name. While a call uses one nobody else finds it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from session_server.core.errors import QuotaExceeded, ServerBusy, SessionServerError
from session_server.core.owner import Owner
from session_server.core.session_events import Message, TurnCompleted, TurnEnd
from session_server.sessions.manager import SessionManager
from session_server.sessions.views import OpenRequest

MAX_UNNAMED: Final = 64
"""Sessions of unnamed conversations that one owner keeps at rest; the oldest closes."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Hold the session of an unnamed conversation while one call uses it.

    `said`: digest of the conversation that is to be answered. `answered`: of that which the session
    held before, None for a new session.
    """

    owner: Owner
    session_id: str
    said: bytes
    answered: bytes | None


@dataclass(slots=True)
class _AtRest:
    """Hold one owner's sessions at rest, oldest first, and find them by what was said in them."""

    digests: dict[str, bytes] = field(default_factory=dict)
    by_digest: dict[bytes, list[str]] = field(default_factory=dict)

    def add(self, session_id: str, digest: bytes) -> None:
        self.digests[session_id] = digest
        self.by_digest.setdefault(digest, []).append(session_id)

    def pop(self, session_id: str) -> None:
        digest = self.digests.pop(session_id)
        same = self.by_digest[digest]
        same.remove(session_id)
        if not same:
            del self.by_digest[digest]


class UnnamedConversations:
    """Lend sessions to calls without a name, and take them back when their turn has ended."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._at_rest: dict[Owner, _AtRest] = {}

    def borrow(self, owner: Owner, messages: Sequence[Message]) -> Borrowed:
        """Return the session that holds the longest beginning of a conversation up to an answer, or
        a new one. Raises what `SessionManager.open` raises."""
        digests = _digests_of(messages)
        # The last message is new, even where it is an answer that the client wrote.
        answers = [
            digest
            for digest, message in zip(digests[:-1], messages[:-1], strict=True)
            if message.role == "assistant"
        ]
        for digest in reversed(answers):
            session_id = self._take(owner, digest)
            if session_id is not None:
                return Borrowed(owner, session_id, digests[-1], digest)
        return Borrowed(owner, self._open(owner), digests[-1], None)

    def give_back(self, borrowed: Borrowed, end: TurnEnd | None) -> None:
        """Take a session back after its turn's end; None: the turn was refused."""
        digest = borrowed.answered
        if isinstance(end, TurnCompleted):
            digest = _next_digest(borrowed.said, Message("assistant", end.outcome.text))
        if digest is None:
            self._close(borrowed.owner, borrowed.session_id)
            return
        at_rest = self._at_rest.setdefault(borrowed.owner, _AtRest())
        at_rest.add(borrowed.session_id, digest)
        if len(at_rest.digests) > MAX_UNNAMED:
            self._close_oldest(borrowed.owner)

    def num_at_rest(self, owner: Owner) -> int:
        """Return how many sessions an owner keeps here."""
        at_rest = self._at_rest.get(owner)
        return 0 if at_rest is None else len(at_rest.digests)

    def _take(self, owner: Owner, digest: bytes) -> str | None:
        """Take out an open session in which this was said; forget those that have closed."""
        at_rest = self._at_rest.get(owner)
        while at_rest is not None and digest in at_rest.by_digest:
            session_id = at_rest.by_digest[digest][-1]
            self._forget(owner, session_id)
            with contextlib.suppress(SessionServerError):
                if self._manager.get(owner, session_id).state != "closing":
                    return session_id
        return None

    def _open(self, owner: Owner) -> str:
        """Open a session; if there are too many, in place of one at rest."""
        while True:
            try:
                return self._manager.open(owner, OpenRequest()).session_id
            except (QuotaExceeded, ServerBusy):
                if not self.num_at_rest(owner):
                    raise
                self._close_oldest(owner)

    def _close_oldest(self, owner: Owner) -> None:
        session_id = next(iter(self._at_rest[owner].digests))
        self._forget(owner, session_id)
        self._close(owner, session_id)

    def _forget(self, owner: Owner, session_id: str) -> None:
        at_rest = self._at_rest[owner]
        at_rest.pop(session_id)
        if not at_rest.digests:
            del self._at_rest[owner]

    def _close(self, owner: Owner, session_id: str) -> None:
        with contextlib.suppress(SessionServerError):  # it may have closed by itself
            self._manager.close(owner, session_id)


def _digests_of(messages: Sequence[Message]) -> list[bytes]:
    """Return, for each message, a digest of the conversation up to it."""
    digest, digests = b"", []
    for message in messages:
        digest = _next_digest(digest, message)
        digests.append(digest)
    return digests


def _next_digest(digest: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message."""
    content = message.content.encode("utf-8", "surrogatepass")
    state = hashlib.blake2b(digest + message.role.encode() + b"\0", digest_size=16)
    state.update(content)
    return state.digest()
