"""Sessions under everything at once, against a shadow that only reads what clients read."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import ClassVar

import hypothesis.strategies as st
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from session_server.core.commands import WarmSession
from session_server.core.errors import (
    ContextTooLong,
    EngineUnavailable,
    InvalidRequest,
    SessionBusy,
    SessionClosing,
    SessionNotFound,
    TurnConflict,
    TurnNotActive,
    TurnNotFound,
    UnsupportedOperation,
)
from session_server.core.session_events import (
    ChatInput,
    Message,
    Outcome,
    SessionClosed,
    TokenInput,
    TurnCancelled,
    TurnCompleted,
    TurnCreated,
    TurnDelta,
    TurnFailedEntry,
    TurnRequest,
)
from session_server.sessions.journal import Journal
from session_server.sessions.quotas import SessionLimits
from tests.depth import at_depth
from tests.sessions.world import OWNER, World, letters, turn

MAX_LEN = 220
REFUSALS = (ContextTooLong, EngineUnavailable, InvalidRequest, SessionBusy)
INDEX = st.integers(0, 2)
KINDS = ["chat"] * 5 + ["tokens"] * 4 + ["long", "huge", "huge"]
WANTED = (
    "completed",
    "stop string",
    "stop string found late",
    "stop token",
    "length",
    "cancel keeps output",
    "cancel keeps input alone",
    "cancel rolls back",
    "cancel of a waiting turn",
    "cancel lost the race",
    "close while running",
    "engine died under a turn",
    "ran when it was asked for again",
    "turn after a restart",
    "numerical error",
    "duplicate id",
    "conflict",
    "busy",
    "expired",
    "too long",
    "too long after waiting",
    "no generation",
    "generation after none",
    "cooled",
    "warmed",
    "waited",
    "rewind assistant",
    "rewind user",
    "rewind raw",
    "begin",
    "edit user",
    "edit assistant",
    "fork",
    "change refused while busy",
    "whole conversation",
    "whole conversation again",
    "whole conversation with another beginning",
)


@dataclass
class Said:
    """One item. An answer and raw input know the history at their end; of an answer the template
    may have replaced the token that ended it."""

    role: str
    content: str
    end: list[int] | None = None
    is_cut: bool = False


@dataclass
class Shadow:
    """A client: its requests, and the history it believes in.

    `is_open`: messages at its end were read and not answered. `pending`: messages behind it that no
    turn has read.
    """

    name: str
    journal: Journal
    tokens: list[int] = field(default_factory=list)
    is_open: bool = False
    is_cut: bool = False
    pending: tuple[Message, ...] = ()
    items: list[Said] = field(default_factory=list)
    requests: dict[str, TurnRequest] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    may_run_again: set[str] = field(default_factory=set)
    seq: int = 0
    is_over: bool = False


class SessionMachine(RuleBasedStateMachine):
    """Rules are what clients, engine and time may do; the shadow checks what is promised."""

    reached: ClassVar[Counter[str]] = Counter()
    is_stored: ClassVar[bool] = False

    @initialize()
    def begin(self) -> None:
        self.world = self.make_world()
        self.shadows: dict[str, Shadow] = {}
        self.num_turns = 0
        self.restarted = False

    def make_world(self) -> World:
        limits = SessionLimits(max_queued_turns=2)
        return World(max_turn_len=MAX_LEN, limits=limits, kv_tiers="host")

    def teardown(self) -> None:
        if hasattr(self, "world"):
            with self.world:
                self._end()

    def _end(self) -> None:
        """Let everything end, then look for what was left."""
        if not self.world.engine.is_alive:
            self.world.engine.come_up()
        self.world.engine.run()
        self.read_all()
        for shadow in self.shadows.values():
            assert shadow.ended == set(shadow.order), "an accepted turn never ended"
            if not shadow.is_over:
                self.world.manager.close(OWNER, shadow.name)
        self.world.engine.run()
        self.read_all()
        assert not self.world.engine.slots, "the engine still holds a session"
        stats = self.world.manager.stats()
        assert (stats.sessions, stats.live_turns, stats.queued_turns) == (0, 0, 0)

    @property
    def names(self) -> list[str]:
        """Sessions whose end no client has read."""
        return [shadow.name for shadow in self.shadows.values() if not shadow.is_over]

    def name(self, index: int) -> str:
        return self.names[index % len(self.names)]

    # -- what clients do

    @precondition(lambda self: len(self.names) < 3)
    @rule(ttl_s=st.sampled_from([20.0, 1000.0]))
    def open(self, ttl_s: float) -> None:
        name = self.world.open(ttl_s=ttl_s, is_stored=self.is_stored)
        self.shadows[name] = Shadow(name, self.world.manager.journal(OWNER, name))

    @precondition(lambda self: self.names)
    @rule(
        index=INDEX,
        kind=st.sampled_from(KINDS),
        max_tokens=st.sampled_from([40, 40, 40, 9, 9, 200, 3, 0]),
        stop=st.sampled_from([(), ("ab",), ("ca", "bcd"), ("da",), ("zz",)]),
        queue=st.sampled_from([True, True, True, False]),
        ignore_eos=st.booleans(),
    )
    def submit(  # noqa: PLR0917 - five things a turn may ask for
        self,
        index: int,
        kind: str,
        max_tokens: int,
        stop: tuple[str, ...],
        queue: bool,
        ignore_eos: bool,
    ) -> None:
        self.num_turns += 1
        turn_id = f"t{self.num_turns}"
        content: str | tuple[int, ...] = f"say {self.num_turns} <|im_end|>"
        if kind == "tokens":
            content = letters(self.world.text, "abcd")[: 1 + self.num_turns % 4]
        if kind in {"long", "huge"}:
            content = letters(self.world.text, "a") * (120 if kind == "long" else MAX_LEN)
        request = turn(
            turn_id, content, max_tokens=max_tokens, stop=stop, queue=queue, ignore_eos=ignore_eos
        )
        self._submit(self.name(index), request)

    @precondition(lambda self: self.names)
    @rule(index=INDEX)
    def answer_later(self, index: int) -> None:
        """Messages are read first and answered later."""
        self.num_turns += 1
        self.submit(index, "chat", 0, (), True, ignore_eos=True)
        self.play(3)
        if not self.names:
            return
        self.num_turns += 1
        self._submit(self.name(index), turn(f"t{self.num_turns}", ChatInput(())))

    @precondition(lambda self: self.names)
    @rule(index=INDEX, times=st.integers(1, 9), keep=st.booleans())
    def change_my_mind(self, index: int, times: int, keep: bool) -> None:
        """A long answer, some of it read, and cancelled."""
        self.submit(index, "chat", 100, (), True, ignore_eos=True)
        self.play(times)
        if self.names:
            self.cancel(index, keep, "live")

    @precondition(lambda self: self.names)
    @rule(index=INDEX, heard=st.integers(0, 2), keep=st.booleans())
    def too_late(self, index: int, heard: int, keep: bool) -> None:
        """The engine has finished when the cancel is accepted, and nobody has heard it."""
        self.submit(index, "chat", 9, (), True, ignore_eos=True)
        self.play(heard)
        self.step(12)
        if self.names:
            self.cancel(index, keep, "live")

    @precondition(lambda self: self.names)
    @rule(index=INDEX, times=st.integers(10, 30))
    def outrun(self, index: int, times: int) -> None:
        """A stop string is likely soon, and the engine is far ahead when it is found."""
        self.submit(index, "chat", 100, ("ab", "bc", "ca", "dd"), True, ignore_eos=True)
        self.step(times)
        self.world.engine.deliver()

    @precondition(lambda self: self.names)
    @rule(index=INDEX, data=st.data(), other_body=st.booleans())
    def submit_again(self, index: int, data: st.DataObject, other_body: bool) -> None:
        name = self.name(index)
        shadow = self.shadows[name]
        recent = shadow.order[-8:]
        if not recent or shadow.is_over:
            return
        self._submit_again(name, data.draw(st.sampled_from(recent)), other_body=other_body)

    @precondition(lambda self: any(self.shadows[name].may_run_again for name in self.names))
    @rule(data=st.data())
    def run_again(self, data: st.DataObject) -> None:
        """What failed by no fault of its client is asked for once there is an engine."""
        self.come_up()
        self.play(1)
        failed = [n for n in self.names if self.shadows[n].may_run_again]
        if failed:
            name = data.draw(st.sampled_from(failed))
            turn_ids = sorted(self.shadows[name].may_run_again)
            self._submit_again(name, data.draw(st.sampled_from(turn_ids)), other_body=False)

    def _submit_again(self, name: str, turn_id: str, *, other_body: bool) -> None:
        shadow = self.shadows[name]
        request = shadow.requests[turn_id]
        if other_body:
            request = TurnRequest(turn_id, ChatInput((Message("user", "no"),)), request.sampling)
        before, runs_again = shadow.journal.last_seq, turn_id in shadow.may_run_again
        try:
            view = self.world.submit(name, request)
        except TurnConflict:
            assert other_body
            self.reached["conflict"] += 1
        except (*REFUSALS, SessionClosing, SessionNotFound):
            assert runs_again
        else:
            assert not other_body
            assert view.turn_id == turn_id
            self.reached["duplicate id"] += not runs_again
        assert runs_again or shadow.journal.last_seq == before

    @precondition(lambda self: self.names)
    @rule(index=INDEX, keep=st.booleans(), which=st.sampled_from(["live", "last", "none"]))
    def cancel(self, index: int, keep: bool, which: str) -> None:
        name = self.name(index)
        shadow = self.shadows[name]
        waiting = [each for each in shadow.order if each not in shadow.ended]
        turn_id = None if which == "none" or not waiting else waiting[0 if which == "live" else -1]
        try:
            view = self.world.manager.cancel(OWNER, name, turn_id, keep_partial=keep)
        except (TurnNotActive, SessionNotFound, TurnNotFound):
            return
        if view.status == "cancelled":
            self.reached["cancel of a waiting turn"] += 1
        elif not self.world.engine.is_busy:
            self.reached["cancel lost the race"] += 1

    @precondition(lambda self: self.names)
    @rule(
        index=INDEX,
        place=st.integers(0, 9),
        change=st.sampled_from(["nothing", "last", "an answer", "a question"]),
        max_tokens=st.sampled_from([9, 9, 3, 0]),
        ignore_eos=st.booleans(),
    )
    def submit_whole(  # noqa: PLR0917 - as `submit`
        self, index: int, place: int, change: str, max_tokens: int, ignore_eos: bool
    ) -> None:
        """All that was said is sent again, with a question behind it, or some of it changed."""
        name = self.name(index)
        if place and self.world.engine.is_alive:
            self.world.engine.run()
        self.read_all()
        if self.shadows[name].is_over:
            return
        said = [item for item in self.shadows[name].items if item.role != "raw"]
        messages = [Message(item.role, item.content) for item in said][-12:]
        if change == "last" and messages and messages[-1].role == "assistant":
            messages.pop()  # its question is answered again
        wanted = {"an answer": "assistant", "a question": "user"}.get(change)
        places = [at for at, message in enumerate(messages) if message.role == wanted]
        if places:
            at = places[place % len(places)]
            messages[at:] = [Message(messages[at].role, f"another {place}")]
        self.num_turns += 1
        if not messages or messages[-1].role == "assistant":
            messages.append(Message("user", f"ask {self.num_turns}"))
        whole = ChatInput(tuple(messages), is_whole=True)
        request = turn(f"t{self.num_turns}", whole, max_tokens=max_tokens, ignore_eos=ignore_eos)
        self._submit(name, request)

    @precondition(lambda self: self.names)
    @rule(
        index=INDEX,
        place=st.integers(0, 9),
        change=st.sampled_from(["rewind", "rewind", "rewind", "begin", "edit", "edit", "fork"]),
        role=st.sampled_from(["assistant", "user", "raw"]),
        is_quiet=st.sampled_from([True, True, True, False]),
    )
    def change_history(  # noqa: PLR0917 - as `submit`
        self, index: int, place: int, change: str, role: str, is_quiet: bool
    ) -> None:
        name = self.name(index)
        if is_quiet and self.world.engine.is_alive:
            if all(item.role != role for item in self.shadows[name].items):
                self.submit(index, "tokens" if role == "raw" else "chat", 9, (), True, False)
            self.world.engine.run()
            self.await_disk()
        self.await_disk()
        self.read_all()
        shadow = self.shadows[name]
        if shadow.is_over or not shadow.items:
            return
        places = [at for at, item in enumerate(shadow.items) if item.role == role]
        places = places or list(range(len(shadow.items)))
        at = places[place % len(places)]
        item = shadow.items[at]
        manager = self.world.manager
        try:
            item_id = manager.snapshot(OWNER, name).items[at].id
            match change:
                case "rewind":
                    manager.edits.rewind(OWNER, name, item_id)
                case "begin":
                    manager.edits.rewind(OWNER, name, None)
                case "edit":
                    manager.edits.edit_item(OWNER, name, item_id, f"edit {place}")
                case _:
                    if len(self.names) >= 3:
                        return
                    fork = manager.edits.fork(OWNER, name, at_item=item_id).session_id
                    self._fork(shadow, fork, at + 1)
                    return
        except SessionBusy:
            self.reached["change refused while busy"] += 1
        except UnsupportedOperation:
            assert (change, item.role) == ("edit", "raw")
        except (SessionClosing, SessionNotFound):
            assert shadow.journal.is_closed or not shadow.is_over
        else:
            self.await_disk()
            self._cut(shadow, {"begin": 0, "rewind": at + 1}.get(change, at))
            if change == "edit":
                shadow.items.append(Said(item.role, f"edit {place}"))
                shadow.pending = (*shadow.pending, Message(item.role, f"edit {place}"))
            self.reached[change if change == "begin" else f"{change} {item.role}"] += 1

    def _fork(self, shadow: Shadow, name: str, num_items: int) -> None:
        journal = self.world.manager.journal(OWNER, name)
        fork = Shadow(name, journal, list(shadow.tokens), shadow.is_open, shadow.is_cut)
        fork.pending, fork.items = shadow.pending, [replace(item) for item in shadow.items]
        if num_items < len(fork.items):
            self._cut(fork, num_items)
        self.await_disk()
        self.shadows[name] = fork
        self.reached["fork"] += 1

    def _cut(self, shadow: Shadow, num_items: int) -> None:
        """Do to the shadow what a rewind does."""
        if num_items == len(shadow.items):
            return
        del shadow.items[num_items:]
        owned = [at for at, item in enumerate(shadow.items) if item.end is not None]
        last = shadow.items[owned[-1]] if owned else Said("", "", [])
        assert last.end is not None
        shadow.tokens, shadow.is_open, shadow.is_cut = list(last.end), False, last.is_cut
        behind = shadow.items[owned[-1] + 1 :] if owned else shadow.items
        shadow.pending = tuple(Message(item.role, item.content) for item in behind)

    @precondition(lambda self: self.names)
    @rule(index=INDEX, chance=st.integers(0, 3))
    def close(self, index: int, chance: int) -> None:
        if chance:
            return
        name = self.name(index)
        try:
            running = self.world.manager.get(OWNER, name).running_turn
            self.world.manager.close(OWNER, name)
        except SessionNotFound:
            assert self.shadows[name].is_over or self.shadows[name].journal.is_closed
            return
        self.reached["close while running"] += running is not None

    @precondition(lambda self: self.names)
    @rule(index=INDEX, is_quiet=st.booleans())
    def warm(self, index: int, is_quiet: bool) -> None:
        """A session is warmed; first it comes to rest and is cooled if all is quiet."""
        name, retention = self.name(index), self.world.manager.edits.retention
        if is_quiet and self.world.engine.is_alive:
            self.world.engine.run()
        with contextlib.suppress(SessionNotFound, SessionClosing):
            if is_quiet:
                with contextlib.suppress(SessionBusy):
                    retention.cool(OWNER, name)
            retention.warm(OWNER, name)
        self.reached["warmed"] += any(
            isinstance(c, WarmSession) for c in self.world.engine.commands
        )

    # -- what the engine and time do

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.engine.step()

    @rule(times=st.integers(6, 30))
    def rush(self, times: int) -> None:
        """The engine runs ahead of what the server has heard."""
        self.step(times)
        self.world.engine.deliver()

    @rule(times=st.integers(1, 12))
    def play(self, times: int) -> None:
        for _ in range(times):
            self.world.engine.step()
            self.world.engine.deliver()

    @rule(limit=st.sampled_from([1, 2, 5, None]))
    def deliver(self, limit: int | None) -> None:
        self.world.engine.deliver(limit)

    @rule(chance=st.integers(0, 2))
    def rest(self, chance: int) -> None:
        if chance == 0 and self.world.engine.is_alive:
            self.world.engine.run()

    @rule(chance=st.integers(0, 4))
    def die(self, chance: int) -> None:
        if chance == 0 and self.world.engine.is_alive:
            self.world.engine.die()
            self.restarted = True

    @precondition(lambda self: self.names)
    @rule(index=INDEX, times=st.integers(1, 4), chance=st.integers(0, 3))
    def die_under_a_turn(self, index: int, times: int, chance: int) -> None:
        """One that would go on for long, and is asked for again once there is an engine."""
        if chance == 0 and self.world.engine.is_alive:
            self.submit(index, "chat", 100, (), True, ignore_eos=True)
            self.play(times)
            self.die(0)

    @rule()
    def come_up(self) -> None:
        if not self.world.engine.is_alive:
            self.world.engine.come_up()

    @rule()
    def fault(self) -> None:
        for session_id, slot in self.world.engine.slots.items():
            if slot.turn is not None and slot.turn.num_outputs:
                self.world.engine.fail(session_id, "numerical_error")
                return

    @rule()
    def cool(self) -> None:
        for session_id, slot in self.world.engine.slots.items():
            if slot.turn is None and slot.kv_len:
                self.world.engine.cool(session_id)
                self.reached["cooled"] += 1

    @rule(seconds=st.sampled_from([1.0, 15.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.world.now_s += seconds
        self.world.manager.tick()

    # -- what is promised

    @invariant()
    def histories_are_what_clients_were_told(self) -> None:
        if not hasattr(self, "world"):
            return
        self.read_all()
        for shadow in self.shadows.values():
            if not shadow.is_over and not self.is_ahead(shadow):
                assert self.world.history(shadow.name) == tuple(shadow.tokens)
                items = self.world.manager.snapshot(OWNER, shadow.name).items
                said = [(item.role, item.content) for item in shadow.items]
                assert [(item.role, item.content) for item in items] == said
                for item, known in zip(items, shadow.items, strict=True):
                    assert known.end is None or item.end_len == len(known.end)

    def await_disk(self) -> None:
        """Wait as clients do that change a history."""

    def is_ahead(self, _shadow: Shadow) -> bool:
        """Whether a conversation has what no client was told of."""
        return False

    def read_all(self) -> None:
        for shadow in self.shadows.values():
            for found in shadow.journal.read(shadow.seq):
                assert found.seq == shadow.seq + 1, "a gap in the journal"
                assert not shadow.is_over, "an entry after the last"
                shadow.seq = found.seq
                self._read(shadow, found.entry)

    def _read(self, shadow: Shadow, entry: object) -> None:
        match entry:
            case TurnCreated(turn_id=turn_id, position=position):
                if turn_id in shadow.may_run_again:
                    self._forget_end(shadow, turn_id)
                assert turn_id not in shadow.order, "a turn created twice"
                shadow.order.append(turn_id)
                self.reached["waited"] += position > 0
            case TurnDelta(turn_id=turn_id, text=text, token_ids=token_ids):
                assert turn_id in shadow.order
                assert turn_id not in shadow.ended, "a delta after the end"
                shadow.texts[turn_id] = shadow.texts.get(turn_id, "") + text
                shadow.outputs.setdefault(turn_id, []).extend(token_ids)
            case TurnCompleted() | TurnCancelled() | TurnFailedEntry():
                assert entry.turn_id in shadow.order, "an end without a beginning"
                assert entry.turn_id not in shadow.ended, "a turn ended twice"
                shadow.ended.add(entry.turn_id)
                self._read_end(shadow, entry)
            case SessionClosed(reason=reason):
                shadow.is_over = True
                assert shadow.ended == set(shadow.order)
                self.reached[reason] += 1
            case _:
                pass

    def _forget_end(self, shadow: Shadow, turn_id: str) -> None:
        """A turn that failed by no fault of its client was asked for again, and runs."""
        shadow.may_run_again.remove(turn_id)
        shadow.ended.remove(turn_id)
        shadow.order.remove(turn_id)
        shadow.texts.pop(turn_id, None)
        shadow.outputs.pop(turn_id, None)
        self.reached["ran when it was asked for again"] += 1

    def _read_end(
        self, shadow: Shadow, end: TurnCompleted | TurnCancelled | TurnFailedEntry
    ) -> None:
        request = shadow.requests[end.turn_id]
        kept = isinstance(end, TurnCompleted) or (
            isinstance(end, TurnCancelled) and end.kept_partial
        )
        self._count(request, end)
        if isinstance(end, TurnFailedEntry) and end.retryable:
            shadow.may_run_again.add(end.turn_id)
        outcome = end.outcome
        if not kept:
            assert (outcome.text, outcome.token_ids) == ("", ())
            assert outcome.usage.output_tokens == 0
            return
        self._append(shadow, request, outcome)
        assert outcome.text == shadow.texts.get(end.turn_id, ""), "deltas are not the answer"
        assert list(outcome.token_ids) == shadow.outputs.get(end.turn_id, [])

    def _append(self, shadow: Shadow, request: TurnRequest, outcome: Outcome) -> None:
        """Do to the shadow what a kept turn does, and ask the model whether it was asked so."""
        is_chat = isinstance(request.input, ChatInput)
        items = list(shadow.items)
        context = self._context(shadow, request)
        assert outcome.usage.input_tokens == len(context)
        assert outcome.usage.cached_tokens <= len(context) - 1
        assert outcome.usage.output_tokens == len(outcome.token_ids)
        generates = request.sampling.max_tokens > 0
        if not is_chat:
            shadow.items.append(Said("raw", "", list(context)))
        for token in outcome.token_ids:
            assert token == self.world.next_token(context), "the engine saw another context"
            context.append(token)
        if is_chat and not generates:
            shadow.is_open = True
            self.reached["no generation"] += 1
        else:
            self.reached["generation after none"] += shadow.is_open
            shadow.is_open = shadow.is_cut = False
        if generates:
            shadow.items.append(Said("assistant", outcome.text, list(context)))
        shadow.tokens, shadow.pending = context, ()
        assert len(context) <= MAX_LEN
        if isinstance(request.input, ChatInput) and request.input.is_whole:
            self.reached["whole conversation"] += 1
            num_same = len(shadow.items) - generates
            self.reached["whole conversation again"] += num_same < len(items)
            is_other = bool(items) and shadow.items[0].content != items[0].content
            self.reached["whole conversation with another beginning"] += is_other

    def _context(self, shadow: Shadow, request: TurnRequest) -> list[int]:
        """ChatML by hand. The shadow's items become those of the context."""
        if isinstance(request.input, TokenInput):
            context = self._rendered(shadow, shadow.pending) if shadow.pending else shadow.tokens
            return [*context, *request.input.token_ids]
        assert isinstance(request.input, ChatInput)
        messages = request.input.messages
        if request.input.is_whole:
            messages = messages[self._keep_agreed(shadow, messages) :]
        shadow.items += [Said(message.role, message.content) for message in messages]
        context = self._rendered(shadow, (*shadow.pending, *messages))
        if request.sampling.max_tokens > 0:
            context += self.world.control("<|im_start|>assistant\n")
        return context

    def _keep_agreed(self, shadow: Shadow, messages: tuple[Message, ...]) -> int:
        """Go back to the last answer that a whole conversation agrees with; how many messages that
        are."""
        num_agreed = 0
        for at, (item, message) in enumerate(zip(shadow.items, messages[:-1], strict=False), 1):
            if (item.role, item.content) != (message.role, message.content):
                break
            if item.role == "assistant" and item.end is not None:
                num_agreed = at
        last = shadow.items[num_agreed - 1] if num_agreed else Said("", "", [])
        assert last.end is not None
        del shadow.items[num_agreed:]
        shadow.tokens, shadow.is_open, shadow.is_cut = list(last.end), False, last.is_cut
        shadow.pending = ()
        return num_agreed

    def _rendered(self, shadow: Shadow, messages: tuple[Message, ...]) -> list[int]:
        """Behind the history, its end of turn and messages; note where an end token goes."""
        control, text, context = self.world.control, self.world.text, list(shadow.tokens)
        if context and not shadow.is_open:
            im_end, other_end = control("<|im_end|>")[0], control("<|endoftext|>")[0]
            is_closed = context[-1] == im_end and not shadow.is_cut
            if context[-1] == other_end and not shadow.is_cut:
                context.pop()
                shadow.is_cut = True
                ends = [item for item in shadow.items if item.end == shadow.tokens]
                for item in ends:
                    item.end, item.is_cut = list(context), item.role == "assistant"
            context += control("\n") if is_closed else control("<|im_end|>\n")
        for message in messages:
            context += control(f"<|im_start|>{message.role}\n")
            context += text.tokenizer.encode_content(message.content)
            context += control("<|im_end|>\n")
        return context

    def _submit(self, name: str, request: TurnRequest) -> None:
        shadow = self.shadows[name]
        before = (shadow.journal.last_seq, shadow.is_over)
        try:
            self.world.submit(name, request)
        except REFUSALS as error:
            assert (shadow.journal.last_seq, shadow.is_over) == before, "a refusal left a trace"
            self.reached["too long"] += isinstance(error, ContextTooLong)
            self.reached["busy"] += isinstance(error, SessionBusy)
        except (SessionClosing, SessionNotFound):
            assert shadow.journal.is_closed or not shadow.is_over
        else:
            shadow.requests[request.turn_id] = request

    def _count(
        self, request: TurnRequest, end: TurnCompleted | TurnCancelled | TurnFailedEntry
    ) -> None:
        reached = self.reached
        match end:
            case TurnCompleted(reason=reason, matched=matched):
                reached["completed"] += 1
                reached["length"] += reason == "length"
                reached["stop token"] += isinstance(matched, int)
                reached["turn after a restart"] += self.restarted
                if isinstance(matched, str):
                    reached["stop string"] += 1
                    held = self._engine_tokens(end.outcome)
                    reached["stop string found late"] += held
            case TurnCancelled(kept_partial=True, outcome=outcome):
                reached["cancel keeps output"] += bool(outcome.token_ids)
                reached["cancel keeps input alone"] += not outcome.token_ids
            case TurnCancelled(outcome=outcome):
                reached["cancel rolls back"] += outcome.usage.input_tokens > 0
            case TurnFailedEntry(code=code):
                names = {
                    "engine_restarting": "engine died under a turn",
                    "numerical_error": "numerical error",
                    "context_too_long": "too long after waiting",
                }
                reached[names.get(code, code)] += 1

    def _engine_tokens(self, outcome: Outcome) -> bool:
        """Whether the engine went further than the stop string before it heard of it."""
        return any(
            each.num_outputs < produced
            for each, produced in self.world.engine.cuts
            if each.num_outputs == len(outcome.token_ids)
        )


def run_machine(
    machine: type[SessionMachine], wanted: tuple[str, ...], *, max_examples: int
) -> None:
    """Run a machine, and check that what is worth reaching was reached."""
    machine.reached.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            # Shrinking fifty steps takes longer than a test may; the steps as found are printed.
            phases=(Phase.generate,),
        ),
    )
    missing = [name for name in wanted if not machine.reached[name]]
    assert not missing, f"never happened: {missing}; reached {dict(machine.reached)}"


def test_sessions_keep_their_promises() -> None:
    run_machine(SessionMachine, WANTED, max_examples=at_depth(450, proof=4000))
