"""Clients of the simulated server: each talks in one session at a time, over a socket that breaks.

A client believes what its frames say. Every frame with a sequence number is held against what the
session's journal says at that number, so nothing may be missing, doubled or out of order, however
often the client came back.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgspec

from session_server.core.session_events import (
    ItemEdited,
    SessionClosed,
    SessionDraining,
    SessionEntry,
    SessionForked,
    SessionRewound,
    SessionStateChanged,
    SessionUpdated,
    TurnCancelled,
    TurnCompleted,
    TurnCreated,
    TurnDelta,
    TurnFailedEntry,
    TurnProgress,
)
from tests.sim.client_drafts import ClientDrafts
from tests.sim.failure import Broken, Layer
from tests.sim.network import Socket
from tests.sim.shadow import SessionShadow

Frame = dict[str, Any]

_KINDS: Final[dict[type[SessionEntry], str]] = {
    TurnCreated: "turn.created",
    TurnProgress: "turn.progress",
    TurnDelta: "turn.delta",
    TurnCompleted: "turn.completed",
    TurnCancelled: "turn.cancelled",
    TurnFailedEntry: "turn.failed",
    SessionStateChanged: "session.state",
    SessionUpdated: "session.updated",
    SessionRewound: "session.rewound",
    SessionForked: "session.forked",
    ItemEdited: "item.edited",
    SessionDraining: "session.draining",
    SessionClosed: "session.closed",
}
REFUSALS: Final = frozenset(
    {
        "context_too_long",
        "engine_unavailable",
        "invalid_request",
        "item_not_found",
        "server_draining",
        "session_busy",
        "session_closing",
        "session_not_found",
        "tokenize_failed",
        "turn_conflict",
        "turn_not_active",
        "turn_not_found",
    }
)
"""Codes with which a client may be refused at any time."""
_TOKENIZER_IS_BUSY: Final = "too many inputs wait to be tokenized"
"""The one `server_busy` that an input may meet: the clock leaped while it waited for its slot."""
_CLOSES: Final = frozenset({None, 1012, 1013, 4409, 4410})
"""What may end a connection here: a restart, a reader too slow, a newer one, the session's end."""

_NOT_FOUND: Final = 404
_DENIALS: Final = frozenset({None, _NOT_FOUND, 503})
"""Why a connection may be refused: its session is gone, the server shuts down."""


class Client:
    """One client. `session_id` is empty while it has no session; `num_heard` counts frames."""

    def __init__(self, name: str, key: str, reached: Counter[str]) -> None:
        self.name = name
        self.key = key
        self.reached = reached
        self.session_id = ""
        self.epoch = ""
        self.last_seq: int | None = None
        self.num_heard = 0
        self.is_stalled = False
        self._has_lost = False
        self.socket: Socket | None = None
        self.shadow: SessionShadow | None = None
        self.drafts = ClientDrafts(reached)

    @property
    def is_free(self) -> bool:
        """Whether it has no session."""
        return self.shadow is None or self.shadow.closed_by is not None

    @property
    def is_current(self) -> bool:
        """Whether it has heard all that its session's journal says."""
        return self.shadow is None or self.last_seq == self.shadow.seq

    def begin(self, session_id: str, shadow: SessionShadow) -> None:
        """A new session; the place in an old one is forgotten."""
        self.session_id, self.shadow = session_id, shadow
        self.epoch, self.last_seq = "", None
        self.drafts.forget()

    def resume_point(self) -> dict[str, str]:
        """Where it wants to go on, as a query."""
        if self.last_seq is None:
            return {}
        return {"after": str(self.last_seq), "epoch": self.epoch}

    def forget(self, num_entries: int) -> None:
        """Not to have heard the newest entries."""
        if self.last_seq is not None:
            self.last_seq = max(0, self.last_seq - num_entries)

    def attach(self, socket: Socket) -> None:
        """Speak through this connection from now on."""
        self.socket, self.is_stalled, self._has_lost = socket, False, False

    def send(self, frame: Frame | str) -> bool:
        """Send one frame; False without a connection."""
        if self.socket is None or self.socket.has_ended:
            return False
        text = frame if isinstance(frame, str) else msgspec.json.encode(frame).decode()
        self.socket.put(text)
        return True

    def drop(self) -> None:
        """Lose the connection."""
        if self.socket is not None:
            self.socket.drop()
            self.socket = None

    def read(self) -> None:
        """Take everything that has arrived, and notice the end of a connection."""
        socket = self.socket
        if socket is None or self.is_stalled:
            return
        while (text := socket.take()) is not None:
            self._hear(msgspec.json.decode(text))
        if socket.has_ended:
            self._disconnected(socket)

    def _disconnected(self, socket: Socket) -> None:
        self.socket = None
        self.reached[f"connection ended: {socket.denied or socket.close_code}"] += 1
        if socket.denied not in _DENIALS or socket.close_code not in _CLOSES:
            raise Broken(
                Layer.PROTOCOL, f"{self.name}: {socket.denied} or closed {socket.close_code}"
            )
        is_gone = self.shadow is not None and self.shadow.closed_by is not None
        if socket.denied == _NOT_FOUND and not is_gone:
            raise Broken(Layer.PROTOCOL, f"{self.name}: its session is not found")

    def _hear(self, frame: Frame) -> None:
        self.num_heard += 1
        match frame["type"]:
            case "session.opened":
                self._opened(frame)
            case "session.resume_failed":
                self.reached[f"resume failed: {frame['reason']}"] += 1
                self._has_lost = True
            case "session.snapshot":
                self._snapshot(frame)
            case "error":
                self._refused(frame["error"])
            case "turn.drafted":
                assert self.shadow is not None, "a client with a connection has a session"
                self.drafts.hear(frame, self.shadow)
            case "pong":
                self.reached["pong"] += 1
            case _ if "seq" in frame:
                self._told(frame)
            case _:
                self._repeated(frame)

    def _opened(self, frame: Frame) -> None:
        if frame["session_id"] != self.session_id:
            raise Broken(Layer.PROTOCOL, f"{self.name} was given {frame['session_id']}")
        if frame["resumed"]:
            self.reached["resumed"] += 1
            if frame["seq"] != self.last_seq or frame["epoch"] != self.epoch:
                raise Broken(Layer.PROTOCOL, f"resumed at {frame['seq']}, was {self.last_seq}")
        self.epoch, self.last_seq = frame["epoch"], frame["seq"]

    def _snapshot(self, frame: Frame) -> None:
        assert self.shadow is not None, "a client with a connection has a session"
        self.reached["snapshot"] += 1
        self.last_seq, self._has_lost = frame["seq"], False
        if frame["seq"] == self.shadow.seq and frame["tokens"] != len(self.shadow.tokens):
            raise Broken(
                Layer.SHADOW, f"a snapshot of {frame['tokens']}, not {len(self.shadow.tokens)}"
            )

    def _refused(self, error: Frame) -> None:
        code = error["code"]
        if error.get("turn_id") in self.drafts:
            self.reached[f"draft refused: {code}"] += 1
            if code == "engine_restarting":
                return
        else:
            self.reached[f"refused: {code}"] += 1
        if code not in REFUSALS and error["message"] != _TOKENIZER_IS_BUSY:
            raise Broken(Layer.PROTOCOL, f"{self.name} was refused: {error}")

    def _told(self, frame: Frame) -> None:
        """A frame of the journal: the next entry, or a run of deltas."""
        assert self.shadow is not None, "a client with a connection has a session"
        assert self.last_seq is not None, "the hello comes first"
        if self._has_lost:
            self._told_the_end(frame)
        log = self.shadow.log
        entries = [log.get(seq) for seq in range(self.last_seq + 1, frame["seq"] + 1)]
        if not entries or None in entries or any(_kind(e) != frame["type"] for e in entries):
            raise Broken(Layer.PROTOCOL, f"{frame} after {self.last_seq}, where {entries} stand")
        self.last_seq = frame["seq"]
        if frame["type"] == "turn.delta":
            self.reached["deltas merged"] += len(entries) > 1
            _check_deltas(frame, [e for e in entries if isinstance(e, TurnDelta)])
        elif len(entries) != 1 or entries[0] is None:
            raise Broken(Layer.PROTOCOL, f"{frame} skips entries: {entries}")
        else:
            _check_entry(frame, entries[0])

    def _told_the_end(self, frame: Frame) -> None:
        """There was no state to take the place of what was lost: its session has closed."""
        if frame["type"] != "session.closed":
            raise Broken(Layer.PROTOCOL, f"{frame} takes the place of what was lost")
        self.reached["the end in place of what was lost"] += 1
        self.last_seq, self._has_lost = frame["seq"] - 1, False

    def _repeated(self, frame: Frame) -> None:
        """The answer to a turn that was sent twice."""
        assert self.shadow is not None, "a client with a connection has a session"
        turn = self.shadow.asked.get(frame["turn_id"])
        self.reached["turn repeated"] += 1
        if turn is None or turn.created_seq is None:
            raise Broken(Layer.PROTOCOL, f"{frame} of a turn that never was")
        turn.num_repeats += 1
        if turn.num_repeats >= turn.num_sent:
            raise Broken(Layer.PROTOCOL, f"{frame} answers another request")
        if turn.end is not None and frame["type"] != "turn.created":
            is_gone = not self.shadow.said.holds_answer(frame["turn_id"])
            self.reached["turn repeated whose answer is gone"] += is_gone
            _check_entry(frame, turn.end, is_gone=is_gone)


def _kind(entry: SessionEntry | None) -> str:
    return _KINDS[type(entry)] if entry is not None else ""


def _check_deltas(frame: Frame, deltas: list[TurnDelta]) -> None:
    said = (deltas[0].turn_id, "".join(delta.text for delta in deltas))
    num_tokens = sum(len(delta.token_ids) for delta in deltas)
    if said != (frame["turn_id"], frame["text"]) or num_tokens != frame["n"]:
        raise Broken(Layer.PROTOCOL, f"{frame} tells {deltas}")


def _check_entry(frame: Frame, entry: SessionEntry, *, is_gone: bool = False) -> None:
    """Compare a frame with what happened. `is_gone`: the answer was cut off or edited since."""
    told: tuple[object, ...]
    true: tuple[object, ...]
    match entry:
        case TurnCompleted(outcome=outcome) | TurnCancelled(outcome=outcome):
            told = (frame["turn_id"], tuple(frame["item"]["token_ids"]), frame["item"]["content"])
            # Once the journal has dropped an end, a record without ids and timings answers.
            is_kept = outcome.timings is None or frame["timings"] is not None
            is_short = is_gone and not is_kept and not frame["item"]["content"]
            text = "" if is_short else outcome.text
            true = (entry.turn_id, outcome.token_ids if is_kept else (), text)
        case TurnFailedEntry(turn_id=turn_id, code=code):
            told, true = (frame["turn_id"], frame["error"]["code"]), (turn_id, code)
        case TurnCreated(turn_id=turn_id) | TurnProgress(turn_id=turn_id):
            told, true = (frame["turn_id"],), (turn_id,)
        case _:
            return
    if told != true:
        raise Broken(Layer.PROTOCOL, f"{frame} tells {entry}")
