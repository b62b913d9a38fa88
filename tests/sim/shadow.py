"""A session as a sequential model: what its journal may say, entry by entry.

The shadow reads the journal as it is written and knows what the client asked for. It keeps the
history that the client must believe in, and what every entry said, so that a client's frames can
be held against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from session_server.core.session_events import (
    ConversationItem,
    ItemEdited,
    SessionClosed,
    SessionEntry,
    SessionForked,
    SessionRewound,
    SessionStateChanged,
    TurnCancelled,
    TurnCompleted,
    TurnCreated,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
    TurnProgress,
)
from session_server.sessions.journal import JournalEntry
from tests.sim.conversation import Conversation, Prepared
from tests.sim.echo import EchoModel, Truth
from tests.sim.failure import Broken, Layer


@dataclass(frozen=True, slots=True)
class SimText:
    """Text of the simulated vocabulary: what a token adds to an answer, how a prompt is encoded."""

    pieces: Mapping[int, str]
    encode: Callable[[str], list[int]]


@dataclass(slots=True)
class AskedTurn:
    """A turn the client asked for, and what was told of it.

    `num_sent`: how often it was sent, word for word; `num_repeats`: how often it was answered as a
    turn that was there. `is_cancelled`: the client asked for its end.
    """

    frame: Mapping[str, Any]
    num_sent: int = 0
    num_repeats: int = 0
    is_cancelled: bool = False
    outputs: list[int] = field(default_factory=list)
    text: str = ""
    created_seq: int | None = None
    end: TurnEnd | None = None

    def sampling(self, name: str, default: Any) -> Any:
        """One sampling option as the client sent it."""
        return self.frame["sampling"].get(name, default)


@dataclass(frozen=True, slots=True)
class World:
    """What a shadow must know of the server. `allowed`: codes by which a turn may fail, which grow
    with the faults that were injected."""

    model: EchoModel
    text: SimText
    max_turn_len: int
    allowed: set[str]
    reached: Counter[str]


class SessionShadow:
    """Reads one session's journal. Every check raises `Broken`.

    `said`: the conversation as the client was told it. `log`: what was told, by sequence number.
    `order`, `ended`: turns as they were accepted, and as they ended.
    """

    def __init__(self, world: World, root: int, said: Conversation | None = None) -> None:
        self._world = world
        self._root = root
        self.said = said or Conversation(world.text.encode)
        self._edits: list[str] = []
        self.asked: dict[str, AskedTurn] = {}
        self.order: list[str] = []
        self.ended: list[str] = []
        self.log: dict[int, SessionEntry] = {}
        self.seq = 0
        self.closed_by: str | None = None
        self.is_close_asked = False
        self._num_done = 0

    @property
    def tokens(self) -> list[int]:
        """The history as the client was told it."""
        return self.said.tokens

    @property
    def num_unended(self) -> int:
        """How many turns `live` has."""
        return len(self.order) - len(self.ended)

    @property
    def live(self) -> list[str]:
        """Turns that were accepted and have not ended, oldest first."""
        return [turn_id for turn_id in self.order if self.asked[turn_id].end is None]

    @property
    def may_run(self) -> bool:
        """Whether a turn was asked for that has not ended; it may have been lost on its way."""
        return any(turn.end is None for turn in self.asked.values())

    def ask(self, turn_id: str, frame: Mapping[str, Any]) -> None:
        """The client sends a turn; it may be accepted, refused, or lost on the way."""
        turn = self.asked.setdefault(turn_id, AskedTurn(frame))
        turn.num_sent += turn.frame == frame

    def learn_items(self, items: Sequence[ConversationItem]) -> None:
        """What the server says of the conversation is what it must hold. An item keeps its place
        for as long as it is there."""
        self.said.place_of.update((item.id, index) for index, item in enumerate(items))
        held = [(item.role, item.content) for item in self.said.items]
        if [(item.role, item.content) for item in items] != held:
            raise Broken(Layer.SHADOW, f"{items} are held, and not {held}")

    def edit(self, content: str) -> None:
        """The client has given an item another content; the journal tells which."""
        self._edits.append(content)

    def cancel(self, turn_id: str | None) -> None:
        """The client asks for a turn's end (None: whichever runs when it is heard)."""
        for name, turn in self.asked.items():
            turn.is_cancelled |= turn.end is None and turn_id in (None, name)

    def read(self, found: JournalEntry) -> None:
        """The next entry of the journal."""
        if found.seq != self.seq + 1:
            raise Broken(Layer.PROTOCOL, f"entry {found.seq} follows entry {self.seq}")
        if self.closed_by is not None:
            raise Broken(Layer.PROTOCOL, f"{found.entry} after the end of the session")
        self.seq = found.seq
        self.log[found.seq] = found.entry
        match found.entry:
            case TurnCreated():
                self._created(found.entry)
            case TurnProgress(turn_id=turn_id, processed=processed, cached=cached, total=total):
                self._running(turn_id, found.entry)
                # Less may be there than before: a retracted turn computes its prompt again.
                if not 0 <= max(cached, processed) <= total:
                    raise Broken(Layer.PROTOCOL, f"{found.entry}")
            case TurnDelta(turn_id=turn_id, text=text, token_ids=token_ids):
                turn = self._running(turn_id, found.entry)
                turn.text += text
                turn.outputs.extend(token_ids)
            case TurnCompleted() | TurnCancelled() | TurnFailedEntry():
                self._ended(self._unfinished(found.entry.turn_id, found.entry), found.entry)
            case SessionRewound():
                self._rewound(found.entry)
            case ItemEdited(item_id=item_id):
                self.said.edit(self.said.place_of[item_id], self._edits.pop(0))
                self._check_cut(found.entry)
            case SessionForked() if self.live:
                raise Broken(Layer.PROTOCOL, f"{found.entry} while {self.live} run")
            case SessionStateChanged(state=state, reason=reason):
                self._world.reached[f"session {state}: {reason}"] += 1
            case SessionClosed(reason=reason):
                self._closed(reason)
            case _:
                pass

    def _created(self, entry: TurnCreated) -> None:
        turn = self.asked.get(entry.turn_id)
        if turn is not None and isinstance(turn.end, TurnFailedEntry) and turn.end.retryable:
            self._runs_again(entry.turn_id, turn)
        if turn is None or turn.created_seq is not None:
            raise Broken(Layer.PROTOCOL, f"{entry}: nobody asked, or it was created before")
        if entry.position != self.num_unended:
            raise Broken(Layer.PROTOCOL, f"{entry} behind {self.live}")
        turn.created_seq = self.seq
        self.order.append(entry.turn_id)
        self._world.reached["turn accepted"] += 1
        self._world.reached["turn waited behind another"] += entry.position > 0

    def _runs_again(self, turn_id: str, turn: AskedTurn) -> None:
        """It failed by no fault of its client, and was sent again."""
        self._world.reached["turn runs again"] += 1
        self.order.remove(turn_id)
        self.ended.remove(turn_id)
        self._num_done = 0
        turn.num_sent -= 1
        turn.created_seq, turn.end, turn.text = None, None, ""
        turn.outputs.clear()

    def _rewound(self, entry: SessionRewound) -> None:
        """Somebody went back; or the turn that runs is a whole conversation, and ends next."""
        to_item = entry.to_item
        index = -1 if to_item is None else self.said.place_of.get(to_item)
        if self.live:
            prepared = self._prepared(self.asked[self.live[0]])
            is_right = prepared.keep_len == entry.tokens and index in (None, prepared.num_kept - 1)
            if not is_right or prepared.num_kept == len(self.said.items):
                raise Broken(Layer.SHADOW, f"{entry}, where {prepared} stays")
            return
        if index is None:
            raise Broken(Layer.PROTOCOL, f"nobody has gone back to {to_item}")
        self.said.cut(index + 1)
        last = "the beginning" if index < 0 else self.said.items[index].role
        self._world.reached[f"rewound to {last}"] += 1
        self._check_cut(entry)

    def _check_cut(self, entry: SessionRewound | ItemEdited) -> None:
        if self.live or not entry.kept_tokens <= entry.tokens == len(self.tokens):
            what = f"{len(self.tokens)} tokens stay, and {self.live} run"
            raise Broken(Layer.SHADOW, f"{entry}: {what}")

    def _unfinished(self, turn_id: str, entry: SessionEntry) -> AskedTurn:
        turn = self.asked.get(turn_id)
        if turn is None or turn.created_seq is None or turn.end is not None:
            raise Broken(Layer.PROTOCOL, f"{entry} of a turn that does not run")
        return turn

    def _running(self, turn_id: str, entry: SessionEntry) -> AskedTurn:
        """Turns run in the order in which they were accepted."""
        turn = self._unfinished(turn_id, entry)
        while self.asked[self.order[self._num_done]].end is not None:
            self._num_done += 1
        if self.order[self._num_done] != turn_id:
            raise Broken(Layer.PROTOCOL, f"{entry} before {self.order[self._num_done]} has ended")
        return turn

    def _closed(self, reason: str) -> None:
        self.closed_by = reason
        self._world.reached[f"session closed: {reason}"] += 1
        if self.live:
            raise Broken(Layer.PROTOCOL, f"the session closed, {self.live} never ended")

    def _ended(self, turn: AskedTurn, end: TurnEnd) -> None:
        turn.end = end
        self.ended.append(end.turn_id)
        outcome, reached = end.outcome, self._world.reached
        is_kept = isinstance(end, TurnCompleted) or (
            isinstance(end, TurnCancelled) and end.kept_partial
        )
        match end:
            case TurnCompleted(reason=reason, matched=matched):
                kind = "stop string" if isinstance(matched, str) else reason
                reached[f"turn completed: {kind}"] += 1
            case TurnCancelled(reason=reason):
                verb = "keeps" if is_kept and outcome.token_ids else "keeps nothing"
                reached[f"turn cancelled by {reason}, {verb}"] += 1
                self._check_cancelled(turn, end)
            case TurnFailedEntry(code=code):
                reached[f"turn failed: {code}"] += 1
                is_empty = code == "invalid_request" and turn.frame.get("input") == []
                if code not in self._world.allowed and not (is_empty and not self.said.waits):
                    raise Broken(Layer.SHADOW, f"{end.turn_id} failed: {code}: {end.message}")
            case _:
                assert_never(end)
        if not is_kept:
            if outcome.token_ids or outcome.text or outcome.usage.output_tokens:
                raise Broken(Layer.SHADOW, f"a turn that leaves nothing left {outcome}")
            return
        if list(outcome.token_ids) != turn.outputs or outcome.text != turn.text:
            raise Broken(Layer.SHADOW, f"{outcome} is not what was told: {turn.outputs}")
        self._commit(turn, end)

    def _check_cancelled(self, turn: AskedTurn, end: TurnCancelled) -> None:
        """Somebody wanted it."""
        is_wanted = {
            "client_cancelled": turn.is_cancelled,
            "disconnected": turn.frame["on_disconnect"] == "cancel",
            "session_closed": self.is_close_asked,
        }
        if not is_wanted.get(end.reason, True):
            raise Broken(Layer.PROTOCOL, f"{end}, and nobody asked for it")

    def _commit(self, turn: AskedTurn, end: TurnEnd) -> None:
        """Ask the model what it says to this history, and take the answer into it."""
        prepared = self._prepared(turn)
        context = prepared.context
        outcome, outputs = end.outcome, turn.outputs
        usage = outcome.usage
        if isinstance(end, TurnCancelled) and usage.input_tokens == 0:
            return  # it never ran
        if usage.input_tokens != len(context) or usage.output_tokens != len(outputs):
            raise Broken(Layer.SHADOW, f"{usage}: {len(context)} in, {len(outputs)} out")
        if not 0 <= usage.cached_tokens < len(context):
            raise Broken(Layer.SHADOW, f"{usage}: a forward needs a query")
        truth = Truth(self._world.model, self._root, context, seed=turn.sampling("seed", 0))
        said = truth.context(len(context) + len(outputs))[len(context) :]
        if said != outputs:
            raise Broken(Layer.SHADOW, f"{end.turn_id} said {outputs}, the history gives {said}")
        if isinstance(end, TurnCompleted):
            self._check_completed(turn, end, len(context))
        num_held = len(self.said.items)
        self.said.commit(prepared, end.turn_id, outputs=outputs, text=outcome.text)
        if not prepared.is_raw:
            self._world.reached["messages answered" if prepared.generates else "messages read"] += 1
        if prepared.num_kept < num_held:
            self._world.reached["whole conversation goes another way"] += 1
        elif "messages" in turn.frame and prepared.keep_len:
            self._world.reached["whole conversation goes on"] += 1

    def _prepared(self, turn: AskedTurn) -> Prepared:
        return self.said.prepare(turn.frame)

    def _check_completed(self, turn: AskedTurn, end: TurnCompleted, context_len: int) -> None:
        """It ended where it had to."""
        outputs, pieces = turn.outputs, self._world.text.pieces
        num_wanted = turn.sampling("max_tokens", 0) if turn.frame.get("generate", True) else 0
        max_tokens = min(num_wanted, self._world.max_turn_len - context_len)
        ends = set(turn.sampling("stop_token_ids", ()))
        ends |= set() if turn.sampling("ignore_eos", None) else set(self._world.model.alphabet[:1])
        stops, min_tokens = (
            turn.sampling("stop", ()),
            min(turn.sampling("min_tokens", 0), max_tokens),
        )
        text, found, is_end = "", list[str](), False
        for count, token in enumerate(outputs, 1):
            if found or is_end:
                raise Broken(Layer.SHADOW, f"{end} went on past {found or 'its end'}")
            is_end = token in ends and count >= min_tokens
            text += "" if is_end else pieces.get(token, "")
            found = [stop for stop in stops if stop in text]
        if found:
            is_right = end.reason == "stop" and end.matched in found
        elif is_end:
            is_right = (end.reason, end.matched) == ("stop", outputs[-1])
        else:
            is_right = (end.reason, end.matched) == ("length", None) and len(outputs) == max_tokens
            is_right &= text == turn.text
        if not is_right:
            raise Broken(Layer.SHADOW, f"{end} after {text!r}, {max_tokens} tokens were wanted")
