"""Build a session from a client's request, before it is registered."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from session_server.core.errors import SessionClosing, SessionExists, UnsupportedOperation
from session_server.core.owner import Owner
from session_server.sessions.journal import Journal
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.replay import Replay
from session_server.sessions.session import Session, SessionConfig, SessionLife
from session_server.sessions.transcript import Transcript
from session_server.sessions.turn import digest_of
from session_server.sessions.views import HistoryMode, HistoryModes, OpenRequest
from session_server.text.model_text import ModelText


def new_session(
    owner: Owner,
    request: OpenRequest,
    text: ModelText,
    *,
    limits: SessionLimits,
    replay: Replay,
    clock: Callable[[], float],
) -> Session:
    """Build a session that is neither registered nor counted.

    Raises:
        UnsupportedOperation: messages without a chat template, `history` "append" with a template
            that rewrites its history, or a pinned session where no memory is kept for any.
    """
    if request.pinned:
        check_can_pin(limits)
    if text.chat is None and request.messages:
        raise UnsupportedOperation("this model has no chat template", param="messages")
    modes = history_modes(request.history, text)
    session = Session(
        owner=owner,
        session_id="",
        settings=SessionConfig(
            ttl_s=limits.default_ttl_s if request.ttl_s is None else request.ttl_s,
            metadata=dict(request.metadata),
            is_pinned=request.pinned,
            is_single_turn=request.single_turn,
            created_s=time.time(),
            request_digest=b"" if request.idempotency_key is None else fingerprint(request),
        ),
        journal=Journal(limits.journal, replay=replay, clock=clock),
        transcript=Transcript(modes, request.messages, now=datetime.now().astimezone()),
        life=SessionLife(clock()),
    )
    session.session_id = request.session_id or session.copy.session_id
    return session


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
