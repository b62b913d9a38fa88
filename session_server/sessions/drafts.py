"""`SessionDrafts`: hand what clients have typed so far to the engine, which computes it ahead.

A draft is rendered and tokenized as the turn that it would be if it were sent now, end of turn
included: a turn that says the same finds all but its last token computed. The engine compares
tokens: whatever a longer text changes, the turn that comes keeps what is equal, and nothing else.
No entry of a journal and no token of a history comes from a draft.

A session has one draft, the newest. While a turn of the session runs or waits, the draft is held;
it starts when the last of them has ended. A turn that comes takes the draft's place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from cache.types import Tokens
from session_server.core.commands import DraftInput, DropDraft
from session_server.core.errors import (
    EngineRestarting,
    EngineUnavailable,
    InternalInconsistency,
    SessionServerError,
)
from session_server.core.events import InputDrafted
from session_server.core.ids import TurnId, new_turn_id
from session_server.core.owner import Owner
from session_server.core.session_events import ChatInput, TurnRequest
from session_server.sessions.backlog import Backlog
from session_server.sessions.bugs import BUG_MESSAGE, contained, log_bug
from session_server.sessions.engine_copies import EngineCopies
from session_server.sessions.footprint import request_bytes
from session_server.sessions.parts import SessionParts
from session_server.sessions.prompt import Prompt, check_num_ids, fit_sampling
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.session import Session
from session_server.sessions.tokenizing import PromptOutcome
from session_server.sessions.turn_names import TurnName
from session_server.sessions.validation import check_turn
from session_server.sessions.views import DraftView
from session_server.text.model_text import ModelText

Answer = Callable[[DraftView | SessionServerError], None]
"""Called once: with how far a draft was computed, or with why it was not."""


@dataclass(slots=True, eq=False)
class _Draft:
    """Hold one draft. `engine_id` is the id that the engine uses. `Quotas` counts `held_bytes`."""

    request: TurnRequest
    answer: Answer
    held_bytes: int
    engine_id: TurnId = field(default_factory=new_turn_id)
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class SessionDrafts:
    """Run the drafts of a manager's sessions.

    `_newest`: of each session, the draft that is to be answered. `_building`: the one that is
    being tokenized; a newer one waits for it, so that fast typing starves nothing. `_sent`: the
    tokens that the engine got last, until a turn comes or the draft is abandoned.
    """

    parts: SessionParts
    copies: EngineCopies
    text: ModelText
    limits: SessionLimits
    clock: Callable[[], float]
    _newest: dict[Session, _Draft] = field(default_factory=dict)
    _building: dict[Session, _Draft] = field(default_factory=dict)
    _sent: dict[Session, Tokens] = field(default_factory=dict)

    def submit(self, owner: Owner, session_id: str, request: TurnRequest, answer: Answer) -> None:
        """Take what a turn would be if it were sent now; its `turn_id` is the id of the draft.

        `answer` is called when it is computed as far as it can be; when another draft or a turn
        takes its place, with nothing processed; or with why it cannot be computed. It may be called
        before this returns.

        Raises:
            SessionNotFound, SessionClosing: no session to draft in.
            InvalidRequest, ContextTooLong: the input is at fault.
            QuotaExceeded, ServerBusy, EngineUnavailable
        """
        session = self.parts.sessions.use(owner, session_id)
        session.check_not_closing()
        ready = self.parts.link.ready
        if ready is None or not self.parts.link.is_up:
            raise EngineUnavailable("there is no engine at the moment")
        check_num_ids(request.input, ready.max_turn_len)
        check_turn(request, self.limits, ready.vocab_size)
        num_bytes = request_bytes(request)
        self.parts.quotas.turn_bytes.take(owner, num_bytes)
        self._replace(session)
        self._newest[session] = _Draft(request, answer, num_bytes)
        session.life.last_active_s = self.clock()
        self.parts.sessions.deadlines.watch(session)
        self.start(session)

    def is_drafting(self, session: Session) -> bool:
        """Return whether a draft of the session is to be answered, or is being tokenized."""
        return session in self._newest or session in self._building

    def num_held(self, owner: Owner, session_id: str, chat: ChatInput) -> int:
        """Return how many messages of a whole conversation need not be drafted again: those that
        are all that the history holds, up to its last answer; else 0. Raises SessionNotFound."""
        transcript = self.parts.sessions.get(owner, session_id).transcript
        num_agreed, _ = transcript.num_agreed(chat)
        return num_agreed if num_agreed == transcript.num_items else 0

    async def compute(self, owner: Owner, session_id: str, request: TurnRequest) -> DraftView:
        """Submit a draft and wait for its answer. Canceling the caller does not drop it. Raises
        what `submit` does, and why it could not be computed."""
        answered: asyncio.Future[DraftView | SessionServerError]
        answered = asyncio.get_running_loop().create_future()

        def answer(result: DraftView | SessionServerError) -> None:
            if not answered.done():
                answered.set_result(result)

        self.submit(owner, session_id, request, answer)
        result = await answered
        if isinstance(result, SessionServerError):
            raise result
        return result

    def abandon(self, owner: Owner, session_id: str) -> None:
        """Drop the session's draft and all that was computed for it. Raises SessionNotFound."""
        session = self.parts.sessions.use(owner, session_id)
        was_sent = session in self._sent
        self.stop(session)
        if was_sent:  # so that no more of these can wait for the engine than it took drafts
            self.parts.link.send_or_queue(DropDraft(session_id=session.copy.session_id))

    def start(self, session: Session) -> None:
        """Start the draft of a session at rest, unless an earlier one is being tokenized."""
        draft, ready = self._newest.get(session), self.parts.link.ready
        if draft is None or draft.is_sent or session in self._building or not _is_at_rest(session):
            return
        assert ready is not None, "a draft before the engine was ever ready"
        self._building[session] = draft
        on_built = partial(self._on_built, session, draft, session.journal.last_seq)
        outcome: PromptOutcome | None
        try:
            state = session.transcript.state(draft.request.input)
            outcome = self.parts.prompts.build(
                session.owner, state, draft, on_built, max_len=ready.max_turn_len
            )
        except Exception as error:  # noqa: BLE001 - whoever drafts is told, and may draft again
            log_bug("a draft failed", error)
            outcome = InternalInconsistency(BUG_MESSAGE)
        if outcome is not None:
            on_built(outcome)

    def stop(self, session: Session) -> None:
        """End the draft of a session, because a turn takes its place or the session closes. The
        engine keeps what it has computed for the turn."""
        self._replace(session)
        if session in self._building:
            self.parts.prompts.cancel(self._building[session])
        self._keep_sent(session, None)

    def on_drafted(self, event: InputDrafted) -> None:
        """Answer the newest draft of a session."""
        session = self.parts.sessions.find_by_engine_id(event.session_id)
        draft = self._newest.get(session) if session is not None else None
        if session is not None and draft is not None and draft.engine_id == event.draft_id:
            draft_id = draft.request.turn_id
            self._finish(session, DraftView(draft_id, event.kept, event.processed, event.total))

    def on_engine_lost(self, backlog: Backlog) -> None:
        """Fail the drafts that a dead engine had, in slices."""
        sent = [(session, draft) for session, draft in self._newest.items() if draft.is_sent]
        backlog.run(partial(self._fail_lost, *each) for each in sent)

    def _fail_lost(self, session: Session, draft: _Draft) -> None:
        if self._newest.get(session) is draft:
            told = "the engine restarts; the session is intact: send the draft again"
            self._finish(session, EngineRestarting(told))

    def _on_built(self, session: Session, draft: _Draft, seq: int, outcome: PromptOutcome) -> None:
        del self._building[session]
        is_newest = self._newest.get(session) is draft
        if not is_newest:
            self._release(session, draft)
        if session not in self._newest or not _is_at_rest(session):
            return  # a turn has come, or the end of the session
        # The history may have been edited meanwhile: then the newest draft is built again.
        if session.journal.last_seq == seq:
            try:
                self._send(session, draft, outcome)
            except SessionServerError as error:
                if is_newest:
                    self._finish(session, error)
            except Exception as error:  # noqa: BLE001 - as in `start`
                log_bug("a draft failed", error)
                self._finish(session, InternalInconsistency(BUG_MESSAGE))
        self.start(session)

    def _send(self, session: Session, draft: _Draft, outcome: PromptOutcome) -> None:
        """Hand a draft to the engine, also one that is the beginning of a newer one."""
        if isinstance(outcome, SessionServerError):
            raise outcome
        link, prompt = self.parts.link, outcome
        assert link.ready is not None
        fit_sampling(draft.request.sampling, prompt, link.ready.max_turn_len)
        base_len = self.copies.base_len(session, prompt)
        context = session.transcript.context(prompt, base_len)
        # What the template writes behind the message is computed with each key, and charged never.
        said = context[: max(1, len(context) - self._closing_len(prompt))]
        tokens = np.array(said, dtype=np.int32)
        num_new = max(1, len(tokens) - _common_len(tokens, self._sent.get(session)))
        self.parts.quotas.input_rate.charge(session.owner, num_new, now_s=self.clock())
        self.copies.open(session, base_len)
        link.send(
            DraftInput(
                session_id=session.copy.session_id,
                draft_id=draft.engine_id,
                base_len=base_len,
                tokens=context,
            )
        )
        draft.is_sent = True
        name = TurnName(session.copy.session_id, draft.request.turn_id, is_draft=True)
        self.copies.names.add(draft.engine_id, name)
        session.copy.set_known_len(base_len, link.generation)
        self._keep_sent(session, tokens)

    def _closing_len(self, prompt: Prompt) -> int:
        """Return how many tokens at the end are not the user's, and move with each key."""
        is_users = bool(prompt.messages) and prompt.messages[-1].role == "user"
        return self.text.chat.closing_len if is_users and self.text.chat is not None else 0

    def _finish(self, session: Session, answer: DraftView | SessionServerError) -> None:
        draft = self._newest.pop(session)
        self._release(session, draft)
        _tell(draft, answer)

    def _replace(self, session: Session) -> None:
        """Answer a session's newest draft, if there is one, that something has come instead."""
        draft = self._newest.pop(session, None)
        if draft is None:
            return
        if self._building.get(session) is not draft:
            self._release(session, draft)
        _tell(draft, DraftView(draft.request.turn_id, 0, 0, 0))

    def _release(self, session: Session, draft: _Draft) -> None:
        self.parts.quotas.turn_bytes.add(session.owner, -draft.held_bytes)

    def _keep_sent(self, session: Session, tokens: Tokens | None) -> None:
        """Replace the tokens that are kept to charge no token twice, and count their bytes."""
        before = self._sent.pop(session, None)
        num_bytes = -before.nbytes if before is not None else 0
        if tokens is not None:
            self._sent[session] = tokens
            num_bytes += tokens.nbytes
        self.parts.quotas.turn_bytes.add(session.owner, num_bytes)


def _tell(draft: _Draft, answer: DraftView | SessionServerError) -> None:
    with contained("a draft was not answered"):
        draft.answer(answer)


def _is_at_rest(session: Session) -> bool:
    return session.is_idle and session.closing is None


def _common_len(tokens: Tokens, before: Tokens | None) -> int:
    if before is None:
        return 0
    length = min(len(tokens), len(before))
    differs = np.flatnonzero(tokens[:length] != before[:length])
    return int(differs[0]) if len(differs) else length
