"""`EngineCopies`: what the engine holds of a session's history before something is built on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Final

import numpy as np

from session_server.core.commands import CloseSession, ForgetKV, OpenSession
from session_server.core.errors import EngineUnavailable
from session_server.core.events import KVForgotten
from session_server.core.ids import SessionId
from session_server.core.owner import Owner
from session_server.sessions.engine_link import EngineLink
from session_server.sessions.prompt import Prompt
from session_server.sessions.roles.asking import AskedPrompt, Prefills
from session_server.sessions.salts import TenantSalts
from session_server.sessions.session import Session
from session_server.sessions.store.records import SessionRow
from session_server.sessions.turn import SessionTurn, SubmittedTurn
from session_server.sessions.turn_names import TurnNames

KV_WAIT_S: Final = 3.0
"""For how long a session that another server asks for waits for its KV to be written, where an
engine does not answer in time that should."""


class EngineCopies:
    """Compare histories with what the engine holds of them, and open sessions there. `names`: of
    what was built on them last."""

    def __init__(self, link: EngineLink, salts: TenantSalts) -> None:
        self._link, self._salts = link, salts
        self.names = TurnNames()
        self._erasing: dict[int, Callable[[], object]] = {}
        """What is done once KV is gone from disk; an engine that ends answers nothing."""

        self._generation = 0
        self._moving: dict[SessionId, asyncio.Event] = {}
        """Sessions whose KV the engine writes for another server."""
        self.prefills: Prefills | None = None
        """Has other replicas compute long prompts."""

    def tag_of(self, session: Session) -> str:
        """Return the tenant of a session, as the engine knows it."""
        return self._salts.tag_of(session.owner)

    def base_len(self, session: Session, prompt: Prompt) -> int:
        """Return how many tokens of a prompt's context the engine holds of this session, or would
        hold as its history if it were opened; always fewer than all."""
        common = session.transcript.common_len(prompt)
        known = session.copy.known_len(self._link.generation)
        # A forward needs at least one query, so the last token of the context is always sent.
        return min(common if known is None else min(known, common), prompt.context_len - 1)

    def open(self, session: Session, base_len: int) -> None:
        """Let the engine know the session; a new one gets the first `base_len` tokens of the
        history. Raises EngineUnavailable."""
        copy = session.copy
        if copy.known_len(self._link.generation) is not None:
            return
        ready = self._link.ready
        is_shorter = ready is not None and base_len + ready.page_size <= len(session.transcript)
        if is_shorter and self.must_drop_end(session):
            self.drop_end(session, session.transcript.tokens(), base_len)
        self._link.send(self._opening(session, base_len))
        copy.set_held_len(base_len, self._link.generation)

    def _opening(self, session: Session, base_len: int) -> OpenSession:
        return OpenSession(
            session_id=session.copy.session_id,
            tenant_salt=self._salts.salt_of(session.owner, session.session_id),
            tenant=self.tag_of(session),
            tenant_weight=max(1, round(session.owner.share * 1000)),
            tokens=session.transcript.tokens(0, base_len),
            pinned=session.settings.is_pinned,
        )

    def prefill(
        self, session: Session, turn: SessionTurn, prompt: Prompt
    ) -> Coroutine[None, None, Prompt] | None:
        """Return what has another replica compute a prompt ahead of its turn, and returns it; None
        where it is computed here in any case."""
        # Logprobs of a prompt need the logits of it, which are nowhere kept.
        if self.prefills is None or turn.request.sampling.prompt_logprobs_from is not None:
            return None
        base_len = self.base_len(session, prompt)
        held_len = base_len if session.copy.state == "resident" else 0
        if not self.prefills.may_help(prompt.context_len - held_len):
            return None
        asked = AskedPrompt(
            opening=self._opening(session, base_len),
            owner_id=session.owner.owner_id,
            name=session.session_id,
            tokens=session.transcript.context(prompt, 0),
            is_known=session.copy.known_len(self._link.generation) is not None,
        )
        return self.prefills.run(asked, prompt)

    def note_turn(self, session: Session, turn: SubmittedTurn, known_len: int | None) -> None:
        """Note what the engine knows of a session behind a turn. One that never began there has cut
        off nothing: the engine holds what it held."""
        session.copy.set_known_len(known_len, self._link.generation)
        if turn.is_started:
            session.copy.held_len = known_len or 0

    def note_kept(self, session: Session, same_len: int) -> None:
        """Note that the history and what the engine holds of it are equal up to here at most."""
        known_len = session.copy.known_len(self._link.generation)
        if known_len is not None:
            session.copy.set_known_len(min(known_len, same_len), self._link.generation)

    def close(self, session: Session) -> bool:
        """Let the engine forget a session. One that does not come back leaves no KV anywhere. One
        that outlives the process stays: as it ends, the engine writes what is worth it, what was
        used last first.

        Returns:
            Whether the KV that one that is deleted may have left is erased (`forget`) before its
            log.
        """
        log, is_known = session.life.log, session.copy.known_len(self._link.generation) is not None
        comes_back = log is not None and session.closing in (None, "draining", "moved")
        if comes_back and session.closing == "draining" and not self._has_cut_off(session):
            return False
        if is_known:
            self.send_close(session, comes_back=comes_back)
            self._note_moving(session)
        # One that has run no turn has computed nothing: what it has of another one is that one's.
        if comes_back or not len(session.ended):
            return False
        if is_known:
            # It may end before it has dropped the files, and the next engine does not know it.
            return log is not None and self._keeps_files
        if not self.may_leave_kv(session.life.last_active_s):
            return False
        if log is None:
            self.drop_end(session, session.transcript.tokens(), 0)
        return log is not None

    def send_close(self, session: Session, *, comes_back: bool) -> None:
        """Have the engine forget a session that it knows. Of one that `comes_back` it keeps the KV,
        unless it has more than the history: nobody would know the tokens by which that is found."""
        is_deleted = not comes_back or self._has_cut_off(session)
        close = CloseSession(
            session_id=session.copy.session_id,
            is_deleted=is_deleted,
            is_moving=session.closing == "moved",
        )
        self._link.send_or_queue(close)

    def _note_moving(self, session: Session) -> None:
        if session.closing == "moved" and self._keeps_files and self._link.is_up:
            self._moving[session.copy.session_id] = asyncio.Event()

    async def written(self, session: Session) -> None:
        """Wait until the KV of a session that moves is where another server looks for it, or for
        `KV_WAIT_S`: it is a copy of what follows from the tokens."""
        written = self._moving.get(session.copy.session_id)
        if written is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KV_WAIT_S):
                    await written.wait()
            del self._moving[session.copy.session_id]

    def on_written(self, session_id: SessionId) -> None:
        """Note that the engine has written a session, or does not go on with that."""
        if session_id in self._moving:
            self._moving[session_id].set()

    def _has_cut_off(self, session: Session) -> bool:
        """Return whether the engine may keep pages of a session that it knows, outside of the
        pools, which were cut off the history since its last turn."""
        known_len, ready = session.copy.known_len(self._link.generation), self._link.ready
        if known_len is None or ready is None or ready.kv_tiers == "none":
            return False
        return session.copy.held_len // ready.page_size > known_len // ready.page_size

    def may_leave_kv(self, used_s: float) -> bool:
        """Return whether KV may be kept outside of the pools of a session that the engine does not
        know, and that was used last at `used_s`, in monotonic seconds."""
        ready = self._link.ready
        if ready is None or ready.kv_tiers == "none":
            return False
        return self._keeps_files or used_s >= self._link.ready_s

    @property
    def _keeps_files(self) -> bool:
        return self._link.ready is not None and self._link.ready.kv_tiers == "disk"

    def must_drop_end(self, session: Session) -> bool:
        """Return whether the engine has to be told of what is cut off a history, whose KV may be
        outside of the pools. Of a session that it knows it finds that itself."""
        is_known = session.copy.known_len(self._link.generation) is not None
        return not is_known and self.may_leave_kv(session.life.last_active_s)

    def drop_end(self, session: Session, tokens: Sequence[int], num_kept: int) -> None:
        """Have the engine drop the KV of a history behind its first tokens, which are what is left
        of it. Only where `must_drop_end` says so."""
        with contextlib.suppress(EngineUnavailable):  # then it ages out
            self.forget(session.owner, session.session_id, tokens, num_kept=num_kept)

    def forget(
        self,
        owner: Owner,
        session_id: str,
        tokens: Sequence[int],
        *,
        num_kept: int = 0,
        number: int | None = None,
    ) -> None:
        """Have the engine drop the KV that only a session has which it does not know, behind its
        first tokens, and answer if there is a `number`. Raises EngineUnavailable."""
        self._link.send(
            ForgetKV(
                tenant_salt=self._salts.salt_of(owner, session_id),
                tenant=self._salts.tag_of(owner),
                tokens=np.asarray(tokens, "<i4").tobytes(),
                num_kept=num_kept,
                number=number,
            )
        )

    @property
    def erasing(self) -> Collection[int]:
        """Return the numbers of the sessions whose KV is being erased."""
        if self._generation != self._link.generation:
            self._erasing.clear()
            self._generation = self._link.generation
        return self._erasing.keys()

    def erase(self, row: SessionRow, tokens: Sequence[int], then: Callable[[], object]) -> None:
        """Have the engine drop the KV of a session, and call `then` once that is gone for good. Not
        where some is left, or the engine ends before. Raises EngineUnavailable."""
        assert row.number not in self.erasing, "it is asked once"
        self.forget(Owner(row.owner_id), row.name, tokens, number=row.number)
        self._erasing[row.number] = then

    def on_forgotten(self, event: KVForgotten) -> None:
        """Go on with a session whose KV is gone, or is not: then it is asked again."""
        then = self._erasing.pop(event.number, None)
        if then is not None and event.is_gone:
            then()
