"""What the server asks of the engine: a closed union of frozen values.

They cross a process boundary as msgpack, so they are `msgspec` structs with tags. The engine
drains them at the top of a step, never in its middle.

Who knows what: the server owns the token history of a session; the engine holds a copy of a
prefix of it. Every `SubmitTurn` names the length of that copy it builds on (`base_len`), which is
also how a session is rewound: the engine drops what lies beyond.
"""

from __future__ import annotations

import msgspec

from session_server.core.ids import SessionId, TurnId
from session_server.core.sampling import SamplingParams


class Command(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Root of the union."""


class OpenSession(Command, frozen=True, tag=True, kw_only=True):
    """Make a cold slot holding `tokens`. `pinned` asks for PINNED retention (quota permitting).

    Opening a known id is an error of the server's and fails the session with `SessionRefused`.
    """

    session_id: SessionId
    tenant_salt: str
    tokens: tuple[int, ...] = ()
    pinned: bool = False


class SubmitTurn(Command, frozen=True, tag=True, kw_only=True):
    """Run one turn: context = the slot's first `base_len` tokens + `tokens`.

    The server submits one turn per session at a time. `sampling.max_tokens` 0 computes the
    prompt and generates nothing. `sampling.seed` is always set here. `priority`: higher goes
    first among waiting turns; equal ones go in order of arrival.
    """

    session_id: SessionId
    turn_id: TurnId
    base_len: int
    tokens: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0


class StopTurn(Command, frozen=True, tag=True, kw_only=True):
    """The server found a stop string: end the turn after `num_outputs` output tokens.

    Ignored for a turn that has already ended.
    """

    turn_id: TurnId
    num_outputs: int


class CancelTurn(Command, frozen=True, tag=True, kw_only=True):
    """End the turn early. `num_outputs` output tokens and the input stay in the history;

    with None nothing stays, and the session is as it was before the turn. Ignored for a turn
    that has already ended.
    """

    turn_id: TurnId
    num_outputs: int | None


class CloseSession(Command, frozen=True, tag=True, kw_only=True):
    """Forget the session. A running turn is cancelled first; closing twice is closing once."""

    session_id: SessionId


class FlushCache(Command, frozen=True, tag=True, kw_only=True):
    """When no turn is live: cool every session and empty the tree. Answered by `CacheFlushed`."""

    request_id: int


class ReportMemory(Command, frozen=True, tag=True, kw_only=True):
    """Ask for a `MemoryReported`; `full` runs the level-2 audit between two steps, `trace` adds
    the steps before the first violation."""

    request_id: int
    full: bool = False
    trace: bool = False


class Shutdown(Command, frozen=True, tag=True, kw_only=True):
    """Finish the step in flight and leave."""


EngineCommand = (
    OpenSession
    | SubmitTurn
    | StopTurn
    | CancelTurn
    | CloseSession
    | FlushCache
    | ReportMemory
    | Shutdown
)
