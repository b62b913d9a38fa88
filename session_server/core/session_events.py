"""What happens in a session as its readers see it: the entries of the journal.

`sessions` writes them, `protocol` turns them into frames of each dialect. The entries of a turn are
`TurnCreated`, any number of `TurnProgress` and `TurnDelta`, then exactly one of `TurnCompleted`,
`TurnCancelled`, `TurnFailedEntry`. `turn_id` is the client's id of the turn.

Journals keep hundreds of thousands of entries, and a collection of the cyclic garbage collector
walks every object that it tracks. Entries refer to no cycle, so they are structs that it does not
track (`gc=False`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec

from session_server.core.events import TurnTimings
from session_server.core.sampling import SamplingParams, TokenLogprob

Role = Literal["system", "developer", "user", "assistant", "tool"]
"""Roles a client may use. Templates write the role beside control tokens (`<|` + role + `|>`), so
any other string could spell one."""

SessionState = Literal["resident", "cold", "closing"]
StateReason = Literal["turn", "pressure", "flush", "engine_restart", "client"]
CancelReason = Literal["client_cancelled", "disconnected", "session_closed", "draining"]
CloseReason = Literal["client", "expired", "revoked", "draining"]
CheckOutcome = Literal["passed", "refused"]


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """Hold one call of a function that an answer asks for. `arguments` is JSON text, as said."""

    id: str
    name: str
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Hold a piece of one call of an answer: number `index`. The first piece of a call has its `id`
    and `name`; `arguments` is the text that this piece adds."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


class Message(msgspec.Struct, frozen=True, gc=False):
    """Hold one chat message; `role` is a `Role`, checked where messages come in.

    An assistant's has `tool_calls`, and in `reasoning` what it thought before; a tool's says in
    `tool_call_id` which call it answers.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""

    @property
    def num_chars(self) -> int:
        """Return the characters of all its texts."""
        num_chars = len(self.content) + len(self.reasoning) + len(self.tool_call_id)
        calls = self.tool_calls
        return num_chars + sum(len(c.id) + len(c.name) + len(c.arguments) for c in calls)


class ConversationItem(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One item of a conversation; `end_len` is the history's length in tokens at its end."""

    id: str
    turn_id: str
    role: str
    """Of a message; "raw" for raw text and token ids, the latter without a `content`."""
    content: str
    end_len: int
    """All inputs of one turn have that of the last of them."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Append messages, rendered by the model's chat template, token-exactly.

    `is_whole`: the messages are the whole conversation. What the history holds up to the last
    answer that they agree with stays, token for token; the rest of them replaces what follows.
    `tools`: functions that the answer may call, each as the JSON text that chat templates take.
    """

    messages: tuple[Message, ...]
    is_whole: bool = False
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextInput:
    """Append raw text, encoded without a template; a leading BOS of a later turn is dropped."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenInput:
    """Append token ids as they are; a leading BOS of a later turn is dropped."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContinueInput:
    """Append nothing: go on from the last answer as if it had not ended."""


RawInput = TextInput | TokenInput
TurnInput = ChatInput | TextInput | TokenInput | ContinueInput


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Configure how tokens become text.

    `stop` strings end the turn; they are cut unless `keep_stop` is set. The history keeps the
    tokens up to the one that completed the stop string. Answers to messages are parted into text,
    reasoning and calls; stop strings are those of the text. Without `may_call` calls are text;
    with `is_one_call` the turn ends where a second call begins, which is dropped. `must_call`: the
    name of the tool that the answer must call, "" where any will do, None where it need not.
    """

    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True
    may_call: bool = True
    is_one_call: bool = False
    must_call: str | None = None


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Describe one turn as a client asked for it. Equal requests with one `turn_id` are one turn.

    `queue` False refuses the turn with `SessionBusy` instead of queueing it behind a running one.
    `on_disconnect`: what `web` does when the last reader leaves; not part of the comparison.
    """

    turn_id: str
    input: TurnInput
    sampling: SamplingParams
    text: TextOptions = TextOptions()
    priority: int = 0
    queue: bool = True
    on_disconnect: Literal["detach", "cancel"] = "detach"


class TokenUsage(msgspec.Struct, frozen=True, gc=False):
    """Count the tokens of a turn.

    `input_tokens`: the whole context, of which `cached_tokens` were not computed again and
    `cache_write_tokens` were. A draft of the input had computed `drafted_tokens` of those cached.
    `reasoning_tokens`: of the output.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def cache_write_tokens(self) -> int:
        """Return the input positions that this turn computed."""
        return self.input_tokens - self.cached_tokens

    @property
    def total_tokens(self) -> int:
        """Return the context length at the end of the turn."""
        return self.input_tokens + self.output_tokens


class TurnCreated(msgspec.Struct, frozen=True, gc=False):
    """Record that a turn was accepted; `position` turns of the session run before it."""

    turn_id: str
    position: int


class TurnProgress(msgspec.Struct, frozen=True, gc=False):
    """Record prefill: `processed` of `total` context tokens are done, `cached` of them reused."""

    turn_id: str
    processed: int
    cached: int
    total: int


class TurnDelta(msgspec.Struct, frozen=True, gc=False):
    """Record new text and the tokens behind it.

    Text may come later than its tokens: incomplete UTF-8, possible stop strings. `reasoning` and
    `tool_calls` are the parts of an answer to messages that are not its text.
    """

    turn_id: str
    item_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """Hold what every final entry of a turn has. `text` is the whole answer that stays.

    `is_durable`: whether the turn is on disk; None where the server keeps no session.
    """

    item_id: str
    text: str
    token_ids: tuple[int, ...]
    usage: TokenUsage
    timings: TurnTimings | None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    is_durable: bool | None = None


class TurnCompleted(msgspec.Struct, frozen=True, gc=False):
    """Record that a turn ended well. `matched`: the stop token id or stop string, if any."""

    status: ClassVar[Literal["completed"]] = "completed"
    turn_id: str
    reason: Literal["stop", "length"]
    matched: int | str | None
    outcome: Outcome


class TurnCancelled(msgspec.Struct, frozen=True, gc=False):
    """Record a cancel. Unless `kept_partial`, the history is as before the turn."""

    status: ClassVar[Literal["cancelled"]] = "cancelled"
    turn_id: str
    kept_partial: bool
    reason: CancelReason
    outcome: Outcome


class TurnFailedEntry(msgspec.Struct, frozen=True, gc=False):
    """Record that an error ended a turn; the history is as before it. `code`: a wire code.
    `retry_after_s`: when the quota that refused it has room again; None where no rate did."""

    status: ClassVar[Literal["failed"]] = "failed"
    turn_id: str
    code: str
    message: str
    retryable: bool
    outcome: Outcome
    retry_after_s: float | None = None


class SessionStateChanged(msgspec.Struct, frozen=True, gc=False):
    """Record that the session's KV is resident, or is cold and why."""

    state: Literal["resident", "cold"]
    reason: StateReason


class SessionUpdated(msgspec.Struct, frozen=True, gc=False):
    """Record that session settings changed, with the settings that hold now."""

    ttl_s: float
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    pinned: bool = False


class SessionRewound(msgspec.Struct, frozen=True, gc=False):
    """Record that the conversation ends with item `to_item` now, None if it is empty.

    `tokens`: the length of the history; `kept_tokens` of them have their KV.
    """

    to_item: str | None
    tokens: int
    kept_tokens: int


class SessionForked(msgspec.Struct, frozen=True, gc=False):
    """Record that session `session_id` was opened with the first `tokens` of the history."""

    session_id: str
    tokens: int


class ItemEdited(msgspec.Struct, frozen=True, gc=False):
    """Record that an item has another content now, and that those behind it are gone.

    `tokens` and `kept_tokens` as in `SessionRewound`: the item itself is computed with the next
    turn.
    """

    item_id: str
    tokens: int
    kept_tokens: int


class SessionDraining(msgspec.Struct, frozen=True, gc=False):
    """Record that the server shuts down; running turns have `deadline_s` seconds left."""

    deadline_s: float


class SessionClosed(msgspec.Struct, frozen=True, gc=False):
    """Record the end of the session; the last entry of a journal."""

    reason: CloseReason


TurnEnd = TurnCompleted | TurnCancelled | TurnFailedEntry
SessionOnlyEntry = (
    SessionStateChanged
    | SessionUpdated
    | SessionRewound
    | SessionForked
    | ItemEdited
    | SessionDraining
    | SessionClosed
)
"""What is about no turn."""

SessionEntry = TurnCreated | TurnProgress | TurnDelta | TurnEnd | SessionOnlyEntry
