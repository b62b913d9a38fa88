"""What happens in a session as its readers see it: the entries of the journal.

`sessions` writes them, `protocol` turns them into frames of each dialect. A turn's entries are
`TurnCreated`, any number of `TurnProgress` and `TurnDelta`, then exactly one of `TurnCompleted`,
`TurnCancelled`, `TurnFailedEntry`. `turn_id` here is the *client's* id of the turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from session_server.core.events import TurnTimings
from session_server.core.sampling import SamplingParams, TokenLogprob

Role = Literal["system", "developer", "user", "assistant", "tool"]
"""Roles a client may use. Templates write the role beside control tokens (`<|` + role + `|>`), so
any other string could spell one."""

SessionState = Literal["resident", "cold", "closing"]
StateReason = Literal["turn", "pressure", "flush", "engine_restart"]
CancelReason = Literal["client_cancelled", "disconnected", "session_closed", "draining"]
CloseReason = Literal["client", "expired", "draining"]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is a `Role`, which is checked where messages come in."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatInput:
    """New messages, rendered by the model's chat template and appended token-exactly."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TextInput:
    """Raw text, encoded as it is (no template); a leading BOS is dropped on appended turns."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenInput:
    """Token ids, appended as they are; a leading BOS is dropped on appended turns."""

    token_ids: tuple[int, ...]


TurnInput = ChatInput | TextInput | TokenInput


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text. `stop` strings end the turn; they are cut unless `keep_stop`.

    The history keeps the tokens up to the one that completed the stop string.
    """

    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn as a client asked for it. Equal requests with one `turn_id` are one turn.

    `queue` False refuses (SessionBusy) instead of waiting behind a running turn.
    `on_disconnect`: what `web` does when the last reader goes; no part of what is asked for.
    """

    turn_id: str
    input: TurnInput
    sampling: SamplingParams
    text: TextOptions = TextOptions()
    priority: int = 0
    queue: bool = True
    on_disconnect: Literal["detach", "cancel"] = "detach"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of a turn. `input_tokens` is the whole context; `cached_tokens` of them were
    not recomputed, `cache_write_tokens` were."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def cache_write_tokens(self) -> int:
        """Input positions computed by this turn."""
        return self.input_tokens - self.cached_tokens

    @property
    def total_tokens(self) -> int:
        """Context length at the end of the turn."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class TurnCreated:
    """The turn was accepted; `position` turns of the session run before it."""

    turn_id: str
    position: int


@dataclass(frozen=True, slots=True)
class TurnProgress:
    """Prefill: `processed` of `total` context tokens are there, `cached` of them from before."""

    turn_id: str
    processed: int
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """New text and the tokens behind it. Text may lag tokens (partial UTF-8, stop strings)."""

    turn_id: str
    item_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What every terminal entry of a turn carries. `text` is the whole answer that stays."""

    item_id: str
    text: str
    token_ids: tuple[int, ...]
    usage: TokenUsage
    timings: TurnTimings | None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnCompleted:
    """The turn ended well; `matched` is the stop token id or stop string that ended it."""

    turn_id: str
    reason: Literal["stop", "length"]
    matched: int | str | None
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class TurnCancelled:
    """Cancelled; with `kept_partial` False the history is what it was before the turn."""

    turn_id: str
    kept_partial: bool
    reason: CancelReason
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class TurnFailedEntry:
    """A fault ended the turn; the history is what it was before it. `code`: a wire code."""

    turn_id: str
    code: str
    message: str
    retryable: bool
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class SessionStateChanged:
    """KV moved: resident, or cold because of pressure, a flush or an engine restart."""

    state: Literal["resident", "cold"]
    reason: StateReason


@dataclass(frozen=True, slots=True)
class SessionUpdated:
    """Session settings changed; the effective ones."""

    ttl_s: float
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionDraining:
    """The server shuts down; running turns have `deadline_s` left."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The last entry of a journal."""

    reason: CloseReason


TurnEnd = TurnCompleted | TurnCancelled | TurnFailedEntry
SessionEntry = (
    TurnCreated
    | TurnProgress
    | TurnDelta
    | TurnCompleted
    | TurnCancelled
    | TurnFailedEntry
    | SessionStateChanged
    | SessionUpdated
    | SessionDraining
    | SessionClosed
)
