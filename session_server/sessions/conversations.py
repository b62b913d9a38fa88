"""Find the session of a conversation that its client does not name, by what was said in it.

A client that sends the whole conversation with every call, and no name for it, would otherwise
compute all of it again. Only sessions opened here are found, and only as long as nobody else has
used them: a session that somebody knows by its id is never changed by a call that did not name it.
While a call uses one nobody else finds it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from session_server.core.errors import SessionBusy, SessionClosing, SessionNotFound
from session_server.core.owner import Owner
from session_server.core.session_events import ChatInput, TurnCompleted, TurnEnd
from session_server.sessions.agreement import DIGEST_BYTES, digests_of, next_digest, num_common
from session_server.sessions.items import message_of_answer
from session_server.sessions.manager import SessionManager
from session_server.sessions.resting import CountReaders, RestingSessions, idle_view
from session_server.sessions.views import OpenRequest


@dataclass(frozen=True, slots=True)
class Claim:
    """Hold the session of an unnamed conversation while one call uses it.

    `said`: digests of the conversation that is to be answered. `num_held`: messages of it that the
    session held before. `num_uses`: of the session, before the call's own.
    """

    owner: Owner
    session_id: str
    said: bytes
    num_held: int
    num_uses: int


class UnnamedConversations:
    """Find or open the session of each call without a name, and keep it at rest between calls.

    Those at rest close when the server or their owner has no room for another session or turn.
    """

    def __init__(self, manager: SessionManager, *, count_readers: CountReaders) -> None:
        self._manager = manager
        self.resting = RestingSessions(manager, count_readers, self._forget)
        self._said: dict[tuple[Owner, str], bytes] = {}
        """Of each session at rest, the digests of what was said in it."""

        self._by_digest: dict[tuple[Owner, bytes], dict[str, None]] = {}

    def claim(self, owner: Owner, chat: ChatInput, *, hint: str) -> Claim:
        """Return the session that holds the longest beginning of a conversation up to an answer and
        nothing else, or a new one. Conversations of different hints or tools are different. Raises
        what `SessionManager.open` raises."""
        digests = digests_of(chat.messages, chat.tools, hint=hint)
        session_id, num_held = self._find(owner, chat, digests)
        if session_id is None:
            session_id = self._manager.open(owner, OpenRequest()).session_id
        return Claim(
            owner,
            session_id,
            said=digests,
            num_held=num_held,
            num_uses=self._manager.get(owner, session_id).num_uses,
        )

    def release(self, claim: Claim, end: TurnEnd | None) -> None:
        """Leave a session to the next call, after its turn's end; None: the turn was refused."""
        owner, session_id, num_uses = claim.owner, claim.session_id, claim.num_uses + 1
        said = _first(claim.said, claim.num_held)
        if isinstance(end, TurnCompleted):
            last = claim.said[-DIGEST_BYTES:]
            said = claim.said + next_digest(last, message_of_answer(end.outcome))
        if said:
            self._rest(owner, session_id, said, num_uses=num_uses)
            return
        view = idle_view(self._manager, owner, session_id)
        num_readers = self.resting.count_readers(owner, session_id)  # the call itself is one
        if view is not None and view.num_uses <= num_uses and num_readers <= 1:
            self._manager.close(owner, session_id)

    def _find(self, owner: Owner, chat: ChatInput, digests: bytes) -> tuple[str | None, int]:
        """Return the session that holds the longest beginning of a conversation up to an answer,
        and the number of messages in it: a session that holds nothing else, or a fork of one."""
        branch: tuple[int, str, str | None] | None = None
        # The last message is new, even where it is an answer that the client wrote.
        for length in range(len(chat.messages) - 1, 0, -1):
            if chat.messages[length - 1].role != "assistant":
                continue
            digest = _first(digests, length)[-DIGEST_BYTES:]
            same = self._by_digest.get((owner, digest), {})
            session_id = self.resting.take_unused(owner, reversed(list(same)))
            if session_id is not None:
                return session_id, length
            branch = branch or self._longest_branch(owner, digests)
            if branch[0] >= length:
                with contextlib.suppress(SessionNotFound, SessionClosing, SessionBusy):
                    return self._fork(owner, *branch[1:]), branch[0]
        return None, 0

    def _longest_branch(self, owner: Owner, digests: bytes) -> tuple[int, str, str | None]:
        """Return how many messages the session at rest that goes on otherwise behind the longest
        beginning holds of it, its id, and that of the last item there. One that somebody has used
        by its id is theirs, and it may be forgotten meanwhile."""
        longest: tuple[int, str, str | None] = 0, "", None
        num_messages = len(digests) // DIGEST_BYTES
        for session_id in self.resting.of(owner):
            if not self.resting.is_unused(owner, session_id):
                continue
            num_equal = num_common(self._said[owner, session_id], digests)
            num_equal = min(num_equal, num_messages - 1)  # the last message is new
            with contextlib.suppress(SessionNotFound):
                num_agreed, item_id = self._manager.edits.last_answer(owner, session_id, num_equal)
                if num_agreed > longest[0]:
                    longest = num_agreed, session_id, item_id
        return longest

    def _fork(self, owner: Owner, source: str, at_item: str | None) -> str:
        """Fork a session at rest, which rests on."""
        said = self._said[owner, source]
        self.resting.take(owner, source)  # so that nothing spares it for its own fork
        try:
            return self._manager.edits.fork(owner, source, at_item=at_item).session_id
        finally:
            num_uses = self._manager.get(owner, source).num_uses
            self._rest(owner, source, said, num_uses=num_uses)

    def _rest(self, owner: Owner, session_id: str, said: bytes, *, num_uses: int) -> None:
        self._said[owner, session_id] = said
        self._by_digest.setdefault((owner, said[-DIGEST_BYTES:]), {})[session_id] = None
        if self.resting.leave(owner, session_id, num_uses=num_uses):
            with contextlib.suppress(SessionNotFound):  # it may have closed to make room
                self._manager.set_attached_bytes(owner, session_id, len(said))
        else:
            self._forget(owner, session_id)

    def _forget(self, owner: Owner, session_id: str) -> None:
        digest = self._said.pop((owner, session_id))[-DIGEST_BYTES:]
        same = self._by_digest[owner, digest]
        del same[session_id]
        if not same:
            del self._by_digest[owner, digest]


def _first(digests: bytes, num_messages: int) -> bytes:
    return digests[: num_messages * DIGEST_BYTES]
