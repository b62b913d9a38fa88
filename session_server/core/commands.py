"""What the server asks of the engine: a closed union of frozen values.

They cross a process boundary as msgpack, so they are tagged `msgspec` structs. The engine handles
them at the top of a step, never in its middle.

The server owns the token history of a session; the engine holds a copy of a prefix of it. Every
`SubmitTurn` names the length of the part that it builds on (`base_len`). This also rewinds a
session: the engine drops what lies beyond.
"""

from __future__ import annotations

from typing import Final

import msgspec

from session_server.core.ids import SessionId, TurnId
from session_server.core.sampling import SamplingParams

MAX_REPORTED_SESSIONS: Final = 1_000
"""Sessions that one memory report lists, so that its step does not grow with all of them."""

MAX_REPORTED_STEPS: Final = 128
"""Steps that one memory report tells of."""

MAX_REPORTED_ROWS: Final = 1_024
"""Rows of all steps that one memory report tells of."""


class Command(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all commands."""


class OpenSession(Command, frozen=True, tag=True, kw_only=True):
    """Make a cold slot holding `tokens`. `pinned` asks for PINNED retention, within a quota.

    Opening a known id is a bug of the server. The answer is `SessionRefused`; the session stays.
    `tenant`: whose it is, a short id that names nobody. Tenants share forwards, and memory by
    `tenant_weight`: 1000 for one that may have everything.
    """

    session_id: SessionId
    tenant_salt: str
    tenant: str = ""
    tenant_weight: int = 1000
    tokens: tuple[int, ...] = ()
    pinned: bool = False


class SubmitTurn(Command, frozen=True, tag=True, kw_only=True):
    """Run one turn over the slot's first `base_len` tokens followed by `tokens`.

    The server submits one turn per session at a time. `sampling.max_tokens` 0 computes the prompt
    and generates nothing. `sampling.seed` is always set here. `priority`: higher is admitted
    earlier; equal ones in order of arrival. `tenant`: that of the session.
    """

    session_id: SessionId
    turn_id: TurnId
    base_len: int
    tokens: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    tenant: str = ""


class DraftInput(Command, frozen=True, tag=True, kw_only=True):
    """Compute, while no turn needs the forward, what the session's next turn may be: the slot's
    first `base_len` tokens followed by `tokens`.

    Takes the place of the session's draft before; what both have in common stays computed. The next
    `SubmitTurn` of the session ends it and keeps what it has in common with it. Answered by one
    `InputDrafted`, unless another draft, a turn or the end of the session comes first.
    """

    session_id: SessionId
    draft_id: TurnId
    base_len: int
    tokens: tuple[int, ...]


class DropDraft(Command, frozen=True, tag=True, kw_only=True):
    """Drop a session's draft and all that was computed for it. Ignored where there is none."""

    session_id: SessionId


class StopTurn(Command, frozen=True, tag=True, kw_only=True):
    """End a turn after `num_outputs` output tokens, where the server found a stop string.

    Ignored for a turn that has ended.
    """

    turn_id: TurnId
    num_outputs: int


class CancelTurn(Command, frozen=True, tag=True, kw_only=True):
    """End a turn early; its input and `num_outputs` output tokens stay in the history.

    With None nothing stays, and the session is as it was before the turn. Ignored for a turn that
    has ended.
    """

    turn_id: TurnId
    num_outputs: int | None


class CloseSession(Command, frozen=True, tag=True, kw_only=True):
    """Drop the session. A running turn is cancelled first. An unknown id is ignored.

    `is_deleted`: nothing of it is kept outside of the pools that no other session has. Else a copy
    of its KV is made where such are kept, because it comes back. `is_moving`: to another server,
    which looks for its KV where several share files; answered by `SessionWritten`.
    """

    session_id: SessionId
    is_deleted: bool = True
    is_moving: bool = False


class WarmSession(Command, frozen=True, tag=True, kw_only=True):
    """Bring what is kept of a cold session at rest outside of the pools back into the tree, if
    there is room. Computes nothing, is never answered, and the session stays cold."""

    session_id: SessionId


class CoolSession(Command, frozen=True, tag=True, kw_only=True):
    """Leave the KV of a session at rest to the tree, where pressure takes it first, with a copy in
    host memory where that is kept. Answered by `SessionCooled`, unless a turn has come.

    `is_ahead_of_turn`: a turn follows at once, which is to restore KV from files that go on where
    the session ends. Nothing is copied then, and nothing is answered: the session is not at rest.
    """

    session_id: SessionId
    is_ahead_of_turn: bool = False


class MeasureKV(Command, frozen=True, tag=True, kw_only=True):
    """Ask how much of a context needs no computing here. Answered by `KVMeasured`.

    `session_id`: the session whose turn it is, open or not. `tokens`: the context, int32 [n],
    little-endian; its first `base_len` are the session's history. `tenant_salt`, `tenant`: see
    `OpenSession`.
    """

    request_id: int
    session_id: SessionId
    tenant_salt: str
    tenant: str
    tokens: bytes
    base_len: int


class WriteKV(Command, frozen=True, tag=True, kw_only=True):
    """Write what a session at rest has published to disk, and answer with `KVWritten` once it is
    there, or cannot be. No file goes past `cut` tokens that has any before: whoever reads them has
    others up to there."""

    request_id: int
    session_id: SessionId
    cut: int = 0


class ExpectKV(Command, frozen=True, tag=True, kw_only=True):
    """Take note of files that another engine has written to the directory of this one: the id and
    the bytes of each, as `KVWritten` has them. Turns restore from them as from any other."""

    files: tuple[tuple[bytes, int], ...]


class ForgetKV(Command, frozen=True, tag=True, kw_only=True):
    """Keep nothing outside of the pools of a session that is not open, behind its first `num_kept`
    tokens, but what others have: it was deleted, or cut. Ignored where nothing is kept.

    `tokens`: its history, int32 [n], little-endian. `tenant_salt`, `tenant`: see `OpenSession`.
    With a `number` it is answered by `KVForgotten`.
    """

    tenant_salt: str
    tenant: str
    tokens: bytes
    num_kept: int = 0
    number: int | None = None


class FlushCache(Command, frozen=True, tag=True, kw_only=True):
    """Cool every session and empty the tree if no turn is live. Answered by `CacheFlushed`."""

    request_id: int


class ReportMemory(Command, frozen=True, tag=True, kw_only=True):
    """Ask for a `MemoryReported`.

    `full` recounts all memory first, between two steps; `trace` adds the steps before the first
    violation. The first `max_sessions` sessions are listed, in the order in which they were opened;
    with `session_ids` those of them that are open. `steps_after`: tell of the newest steps after
    this one, within `MAX_REPORTED_STEPS` and `MAX_REPORTED_ROWS`. `EngineStats` follow.
    """

    request_id: int
    full: bool = False
    trace: bool = False
    max_sessions: int = MAX_REPORTED_SESSIONS
    session_ids: tuple[SessionId, ...] | None = None
    steps_after: int | None = None


class Shutdown(Command, frozen=True, tag=True, kw_only=True):
    """Finish the forwards in flight, and end the engine. Where KV is kept on disk, that of the
    sessions at rest is written first, within `TierPolicy.drain_s`."""


EngineCommand = (
    OpenSession
    | SubmitTurn
    | DraftInput
    | DropDraft
    | StopTurn
    | CancelTurn
    | CloseSession
    | WarmSession
    | CoolSession
    | MeasureKV
    | WriteKV
    | ExpectKV
    | ForgetKV
    | FlushCache
    | ReportMemory
    | Shutdown
)
