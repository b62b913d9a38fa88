"""Find the session of a conversation that its client does not name, by what was said in it.

A client that sends the whole conversation with every call, and no name for it, would otherwise
compute all of it again. Only sessions opened here are found, and only as long as nobody else has
used them: a session that somebody knows by its id is never changed by a call that did not name it.
While a call uses one nobody else finds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from session_server.core.errors import SessionBusy, SessionClosing, SessionNotFound
from session_server.core.owner import Owner
from session_server.core.session_events import ChatInput, TurnCompleted, TurnEnd
from session_server.sessions.agreement import digests_of, next_digest
from session_server.sessions.items import message_of_answer
from session_server.sessions.manager import SessionManager
from session_server.sessions.resting import CountReaders, idle_view
from session_server.sessions.views import OpenRequest, SessionView

MAX_UNNAMED: Final = 64
"""Sessions of unnamed conversations that one owner keeps at rest; the oldest closes."""

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class Claim:
    """Hold the session of an unnamed conversation while one call uses it.

    `said`: digest of the conversation that is to be answered. `answered`: of that which the session
    held before, None for a new session. `num_uses`: of the session, before the call's own.
    """

    owner: Owner
    session_id: str
    hint: str
    said: bytes
    answered: bytes | None
    num_uses: int


@dataclass(frozen=True, slots=True)
class _Resting:
    """Hold a session at rest, and how to tell that somebody else has used it since."""

    owner: Owner
    session_id: str
    hint: str
    digest: bytes
    epoch: str
    num_uses: int


@dataclass(slots=True)
class _AtRest:
    """Hold sessions at rest, oldest first, and find them by owner and by what was said."""

    sessions: dict[tuple[Owner, str], _Resting] = field(default_factory=dict)
    by_owner: dict[Owner, dict[str, None]] = field(default_factory=dict)
    by_digest: dict[tuple[Owner, bytes], dict[str, None]] = field(default_factory=dict)

    def add(self, resting: _Resting) -> None:
        owner, session_id = resting.owner, resting.session_id
        self.sessions[owner, session_id] = resting
        self.by_owner.setdefault(owner, {})[session_id] = None
        self.by_digest.setdefault((owner, resting.digest), {})[session_id] = None

    def pop(self, owner: Owner, session_id: str) -> _Resting:
        resting = self.sessions.pop((owner, session_id))
        _discard(self.by_owner, owner, session_id)
        _discard(self.by_digest, (owner, resting.digest), session_id)
        return resting


class UnnamedConversations:
    """Find or open the session of each call without a name, and keep it at rest between calls.

    Those at rest close when the server or their owner has no room for another session or turn.
    """

    def __init__(self, manager: SessionManager, *, count_readers: CountReaders) -> None:
        self._manager = manager
        self._count_readers = count_readers
        self._at_rest = _AtRest()
        manager.on_no_room(self._make_room)

    def claim(self, owner: Owner, chat: ChatInput, *, hint: str) -> Claim:
        """Return the session that holds the longest beginning of a conversation up to an answer and
        nothing else, or a new one. Conversations of different hints or tools are different. Raises
        what `SessionManager.open` raises."""
        digests = digests_of(chat.messages, chat.tools, hint=hint)
        session_id, num_held = self._find(owner, chat, digests, hint=hint)
        if session_id is None:
            session_id = self._manager.open(owner, OpenRequest()).session_id
        return Claim(
            owner,
            session_id,
            hint,
            said=digests[-1],
            answered=digests[num_held - 1] if num_held else None,
            num_uses=self._manager.get(owner, session_id).num_uses,
        )

    def release(self, claim: Claim, end: TurnEnd | None) -> None:
        """Leave a session to the next call, after its turn's end; None: the turn was refused."""
        digest = claim.answered
        if isinstance(end, TurnCompleted):
            digest = next_digest(claim.said, message_of_answer(end.outcome))
        view = idle_view(self._manager, claim.owner, claim.session_id)
        if view is None or view.num_uses > claim.num_uses + 1:
            return  # it is theirs who have used it meanwhile
        if digest is None:
            if self._count_readers(claim.owner, claim.session_id) <= 1:  # the call itself
                self._manager.close(claim.owner, claim.session_id)
            return
        self._rest(view, claim.owner, claim.hint, digest)
        if self.num_at_rest(claim.owner) > MAX_UNNAMED:
            self._close_oldest(claim.owner)

    def num_at_rest(self, owner: Owner) -> int:
        """Return how many sessions an owner keeps here."""
        return len(self._at_rest.by_owner.get(owner, ()))

    def _find(
        self, owner: Owner, chat: ChatInput, digests: list[bytes], *, hint: str
    ) -> tuple[str | None, int]:
        """Return the session that holds the longest beginning of a conversation up to an answer,
        and the number of messages in it: a session that holds nothing else, or a fork of one."""
        branch: tuple[int, str, str | None] | None = None
        # The last message is new, even where it is an answer that the client wrote.
        for length in range(len(chat.messages) - 1, 0, -1):
            if chat.messages[length - 1].role != "assistant":
                continue
            session_id = self._take(owner, digests[length - 1])
            if session_id is not None:
                return session_id, length
            branch = branch or self._longest_branch(owner, chat, hint)
            if branch[0] >= length:
                with contextlib.suppress(SessionNotFound, SessionClosing, SessionBusy):
                    return self._fork(owner, *branch[1:]), branch[0]
        return None, 0

    def _longest_branch(
        self, owner: Owner, chat: ChatInput, hint: str
    ) -> tuple[int, str, str | None]:
        """Return how many messages the session at rest that goes on otherwise behind the longest
        beginning holds of it, its id, and that of the last item there. One that somebody has used
        by its id is theirs, and `_take` may forget it meanwhile."""
        longest: tuple[int, str, str | None] = 0, "", None
        for session_id in self._at_rest.by_owner.get(owner, ()):
            resting = self._at_rest.sessions[owner, session_id]
            if resting.hint != hint or not self._is_unused(resting):
                continue
            with contextlib.suppress(SessionNotFound):
                num_agreed, item_id = self._manager.edits.last_agreed(owner, session_id, chat)
                if num_agreed > longest[0]:
                    longest = num_agreed, session_id, item_id
        return longest

    def _fork(self, owner: Owner, source: str, at_item: str | None) -> str:
        """Fork a session at rest, which rests on."""
        resting = self._at_rest.pop(owner, source)  # so that nothing spares it for its own fork
        try:
            return self._manager.edits.fork(owner, source, at_item=at_item).session_id
        finally:
            view = self._manager.get(owner, source)
            self._rest(view, owner, resting.hint, resting.digest)

    def _rest(self, view: SessionView, owner: Owner, hint: str, digest: bytes) -> None:
        left = (view.epoch, view.num_uses)
        self._at_rest.add(_Resting(owner, view.session_id, hint, digest, *left))

    def _take(self, owner: Owner, digest: bytes) -> str | None:
        """Take out a session in which this was said, the newest."""
        same = self._at_rest.by_digest.get((owner, digest), {})
        return self._pop_unused(owner, reversed(list(same)))

    def _make_room(self, owner: Owner, *, of_others: bool) -> bool:
        """Close a session at rest, of this owner or else of another; return whether there was
        one."""
        others = self._at_rest.by_owner if of_others else ()
        return any(map(self._close_oldest, [owner, *others]))

    def _close_oldest(self, owner: Owner) -> bool:
        session_id = self._pop_unused(owner, list(self._at_rest.by_owner.get(owner, ())))
        if session_id is not None:
            self._manager.close(owner, session_id)
        return session_id is not None

    def _pop_unused(self, owner: Owner, session_ids: Iterable[str]) -> str | None:
        """Take out the first session that is as it was left and that nobody reads; forget those
        that somebody has used."""
        for session_id in session_ids:
            if not self._is_unused(self._at_rest.sessions[owner, session_id]):
                self._at_rest.pop(owner, session_id)
            elif not self._count_readers(owner, session_id):
                self._at_rest.pop(owner, session_id)
                return session_id
        return None

    def _is_unused(self, resting: _Resting) -> bool:
        view = idle_view(self._manager, resting.owner, resting.session_id)
        left = (resting.epoch, resting.num_uses)
        return view is not None and (view.epoch, view.num_uses) == left


def _discard(found: dict[_Key, dict[str, None]], key: _Key, session_id: str) -> None:
    """Remove a session under a key, and the key with the last."""
    del found[key][session_id]
    if not found[key]:
        del found[key]
