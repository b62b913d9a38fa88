"""Build a session from a client's request, or from what is on disk, before it is registered."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from session_server.core.errors import SessionClosing, SessionExists, UnsupportedOperation
from session_server.core.ids import SESSION_PREFIX
from session_server.core.owner import Owner
from session_server.core.session_events import Message
from session_server.sessions.journal import Journal
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.replay import Replay
from session_server.sessions.session import Session, SessionConfig, SessionLife
from session_server.sessions.transcript import Transcript
from session_server.sessions.turn import digest_of
from session_server.sessions.views import HistoryMode, HistoryModes, OpenRequest
from session_server.text.model_text import ModelText


@dataclass(frozen=True, slots=True)
class SessionMaker:
    """Build sessions that are neither registered nor counted. `replay` bounds their journals
    together; `clock` returns monotonic seconds."""

    text: ModelText
    limits: SessionLimits
    replay: Replay
    clock: Callable[[], float]

    def new(self, owner: Owner, request: OpenRequest) -> Session:
        """Build a session from a client's request.

        Raises:
            UnsupportedOperation: messages without a chat template, `history` "append" with a
                template that rewrites its history, or a pinned session where no memory is kept for
                any.
        """
        if request.pinned:
            check_can_pin(self.limits)
        if self.text.chat is None and request.messages:
            raise UnsupportedOperation("this model has no chat template", param="messages")
        ttl_s, key = request.ttl_s, request.idempotency_key
        settings = SessionConfig(
            ttl_s=self.limits.ttl_s(is_stored=request.is_stored) if ttl_s is None else ttl_s,
            metadata=dict(request.metadata),
            is_pinned=request.pinned,
            is_single_turn=request.single_turn,
            created_s=time.time(),
            request_digest=b"" if key is None else fingerprint(request),
            asked_history=request.history,
        )
        session = self._with(owner, settings, SessionLife(self.clock()), said=request.messages)
        session.session_id = request.session_id or self._named(session)
        return session

    def _named(self, session: Session) -> str:
        """Return the id that the server gives to a session: the engine's, with the replica's tag in
        place of the beginning of its random part."""
        made, tag = session.copy.session_id, self.limits.replica_tag
        return f"{SESSION_PREFIX}{tag}{made[len(SESSION_PREFIX) + len(tag) :]}"

    def again(self, owner: Owner, settings: SessionConfig, life: SessionLife) -> Session:
        """Build a session that was open before, without its conversation. Its journal is new, and
        has no number of an earlier one: a reader of that which names no epoch is not told what
        comes next as if it had missed nothing.

        Raises:
            UnsupportedOperation: it asked for a `history` that this model's template cannot write.
        """
        microseconds = int(time.time() * 1e6)  # nobody has written as many entries
        return self._with(owner, settings, life, last_seq=microseconds)

    def _with(
        self,
        owner: Owner,
        settings: SessionConfig,
        life: SessionLife,
        *,
        said: tuple[Message, ...] = (),
        last_seq: int = 0,
    ) -> Session:
        modes = history_modes(settings.asked_history, self.text)
        opened = datetime.fromtimestamp(settings.created_s).astimezone()
        return Session(
            owner=owner,
            session_id="",
            settings=settings,
            journal=Journal(
                self.limits.journal, replay=self.replay, clock=self.clock, last_seq=last_seq
            ),
            transcript=Transcript(modes, said, now=opened),
            life=life,
        )


def check_can_pin(limits: SessionLimits) -> None:
    """Reject a pinned session where no memory is kept for any. Raises UnsupportedOperation."""
    if not limits.allows_pinned:
        raise UnsupportedOperation(
            "this server keeps no KV memory for pinned sessions: start it with --pinned-fraction",
            param="pinned",
        )


def fingerprint(request: OpenRequest) -> bytes:
    """Return a digest that is equal for requests that open the same session."""
    metadata = dict(sorted(request.metadata.items()))
    return digest_of(replace(request, session_id=None, metadata=metadata))


def check_repeated(session: Session, request: OpenRequest) -> None:
    """Reject a request with the idempotency key of an open session, unless it is the same again.

    Raises:
        SessionExists: it is another request.
        SessionClosing: the session takes no turns any more; its key opens none before it is gone.
    """
    if session.closing is not None:
        message = "the session of this key is closing: send the request again when it has closed"
        raise SessionClosing(message, param="idempotency-key")
    if session.settings.request_digest != fingerprint(request):
        raise SessionExists("the key was used with another request", param="idempotency-key")


def history_modes(asked: HistoryMode | None, text: ModelText) -> HistoryModes:
    """Return how a session renders its history. Raises UnsupportedOperation."""
    if text.chat is None:
        mode = asked or "append"
        return HistoryModes(mode, mode)
    traits = text.chat.traits
    if asked == "append" and not traits.can_append:
        raise UnsupportedOperation(
            "this model's chat template rewrites its history: use template", param="history"
        )
    if asked == "template":
        return HistoryModes("template", "template")
    return HistoryModes(
        "append" if traits.can_append else "template",
        "append" if traits.can_append_tools else "template",
    )
