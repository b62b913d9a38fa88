"""What must be true of drafts: each is answered once, or something has come in its place.

A draft changes nothing that a turn could see. It is computed as far as there was room for, and
never further; a session that was told to drop its draft has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.types import SessionId, TurnId
from session_server.core.commands import DraftInput
from session_server.core.events import InputDrafted, TurnStarted
from tests.sim.echo import EchoModel, Truth
from tests.sim.failure import Broken, Layer

if TYPE_CHECKING:
    from tests.sim.history import EngineSession


@dataclass(frozen=True, slots=True, eq=False)
class EngineDraft:
    """One draft as the engine was told it. `is_refused`: it makes no sense, and is answered at
    once."""

    command: DraftInput
    session: EngineSession | None
    truth: Truth
    is_refused: bool

    @property
    def total_len(self) -> int:
        """Tokens of its context."""
        return self.command.base_len + len(self.command.tokens)


class EngineDrafts:
    """Follows the drafts of all sessions.

    `owed`: of each session, the newest, until it is answered or replaced. `reach`: of each session
    that may have a tail, how far the drafts since its last turn were said to be computed.
    `dropped`: sessions that were told to drop theirs in this step.
    """

    def __init__(self, model: EchoModel, reached: Counter[str]) -> None:
        self._model = model
        self._by_id: dict[TurnId, EngineDraft] = {}
        self._replaced: set[TurnId] = set()
        self._not_opened: set[SessionId] = set()
        self._has_results = False
        self.owed: dict[SessionId, EngineDraft] = {}
        self.reach: dict[SessionId, int] = {}
        self.dropped: set[SessionId] = set()
        self.reached = reached

    def __contains__(self, draft_id: object) -> bool:
        return draft_id in self._by_id

    def truth_of(self, draft_id: TurnId) -> Truth:
        """What a draft's cells hold."""
        return self._by_id[draft_id].truth

    def salt_of(self, draft_id: TurnId) -> str:
        """The namespace of a draft."""
        session = self._by_id[draft_id].session
        assert session is not None, "a draft without a session is not computed"
        return session.salt

    # Commands

    def begin_step(self, *, has_results: bool) -> None:
        """The engine is about to take in results, if any, and then commands."""
        self.dropped.clear()
        self._has_results = has_results
        self._replaced.clear()
        self._not_opened.clear()

    def submit(
        self, command: DraftInput, session: EngineSession | None, *, is_refused: bool
    ) -> None:
        """The engine is about to take a draft in place of the one before it."""
        session_id, tokens = command.session_id, list(command.tokens)
        known: list[int] = []
        if session is not None:
            tokens = [*session.held[: command.base_len], *tokens]
            known = session.tags[: command.base_len]
        root = session.root if session is not None else 0
        truth = Truth(self._model, root, tokens, seed=0, known=known)
        draft = EngineDraft(command, session, truth, is_refused)
        self._by_id[command.draft_id] = draft
        if is_refused or session is None:
            return
        self.reached["draft"] += 1
        self.reached["draft replaced before it was computed"] += session_id in self.owed
        self.reached["draft goes on from the one before"] += session_id in self.reach
        self.replace(session_id)
        self.owed[session_id] = draft
        self.reach.setdefault(session_id, 0)
        self.dropped.discard(session_id)

    def drop(self, session_id: SessionId) -> None:
        """The engine is about to drop a draft and all that was computed for it."""
        self.reached["draft abandoned"] += session_id in self.reach
        self.forget(session_id)
        self.dropped.add(session_id)

    def replace(self, session_id: SessionId) -> None:
        """Something is about to come in the place of a session's draft. Results of this step, which
        are taken in before, may still answer it."""
        draft = self.owed.pop(session_id, None)
        if draft is not None and self._has_results:
            self._replaced.add(draft.command.draft_id)

    def refuse_all(self, session_id: SessionId) -> None:
        """The engine does not open a session: it knows none of its drafts."""
        self._not_opened.add(session_id)
        self.owed.pop(session_id, None)
        self.reach.pop(session_id, None)

    def forget(self, session_id: SessionId) -> None:
        """The engine is about to drop what it has of a session's drafts."""
        self.replace(session_id)
        self.reach.pop(session_id, None)

    # Events

    def on_drafted(self, event: InputDrafted) -> None:
        """The engine answers a draft."""
        draft = self._by_id.get(event.draft_id)
        if draft is None or draft.command.session_id != event.session_id:
            raise Broken(Layer.PROTOCOL, f"{event} of a draft that is unknown")
        if not 0 <= event.kept <= event.processed <= event.total == draft.total_len:
            raise Broken(Layer.SHADOW, f"{event}: the draft has {draft.total_len} tokens")
        if draft.is_refused or event.session_id in self._not_opened:
            if event.processed:
                raise Broken(Layer.PROTOCOL, f"{event}, it had to be refused")
            self.reached["draft refused"] += 1
            return
        if event.draft_id in self._replaced:
            return
        if self.owed.get(event.session_id) is not draft:
            raise Broken(Layer.PROTOCOL, f"{event}, and something has come in its place")
        del self.owed[event.session_id]
        self.reach[event.session_id] = event.processed
        self.reached["draft kept from the one before"] += event.kept > draft.command.base_len
        how_far = {0: "not at all", event.total: "in full"}.get(event.processed, "in part")
        self.reached[f"draft computed {how_far}"] += 1

    def on_started(self, event: TurnStarted, session_id: SessionId) -> None:
        """A turn has started, and has taken what it could use of its session's drafts."""
        self.replace(session_id)
        reach = self.reach.pop(session_id, None)
        if not 0 <= event.drafted_tokens <= event.cached_tokens or (
            event.drafted_tokens and reach is None
        ):
            raise Broken(Layer.SHADOW, f"{event}, and drafts reached {reach}")
        if not reach:
            return
        if not event.drafted_tokens:
            self.reached["draft taken by a turn: nothing of it"] += 1
        elif event.cached_tokens >= min(reach, event.prompt_tokens - 1):
            self.reached["draft taken by a turn: all of it"] += 1
        else:
            self.reached["draft taken by a turn: a part of it"] += 1

    def check_tails(self, with_tail: Set[SessionId]) -> None:
        """These sessions have a tail: none whose draft was abandoned, and none that never had
        one."""
        if unasked := with_tail - self.reach.keys():
            raise Broken(Layer.SHADOW, f"a tail, and no draft: {sorted(unasked)}")
