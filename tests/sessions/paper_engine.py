"""An engine on paper: real sessions, lengths and commands, no KV and no device.

The next token is a function of the whole context, so a history that differs anywhere gives other
answers. Commands wait until `step`, events until `deliver`: every race between the two sides can
be played by choosing when to call which.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from session_server.core.commands import (
    CancelTurn,
    CloseSession,
    CoolSession,
    DraftInput,
    DropDraft,
    EngineCommand,
    ExpectKV,
    FlushCache,
    ForgetKV,
    MeasureKV,
    OpenSession,
    ReportMemory,
    Shutdown,
    StopTurn,
    SubmitTurn,
    WarmSession,
    WriteKV,
)
from session_server.core.engine_client import EventListener
from session_server.core.errors import EngineUnavailable
from session_server.core.events import (
    CacheFlushed,
    CheckerReport,
    EngineDied,
    EngineEvent,
    EngineReady,
    FinishReason,
    InputDrafted,
    KVForgotten,
    KVMeasured,
    KVWritten,
    MemoryReported,
    SessionCooled,
    SessionGone,
    SessionRefused,
    TokensProduced,
    TurnFailed,
    TurnFinished,
    TurnStarted,
    TurnTimings,
)
from session_server.core.ids import SessionId, TurnId
from session_server.core.sampling import TokenLogprob

TIMINGS = TurnTimings(
    queue_ms=1.0, prefill_ms=2.0, ttft_ms=3.0, decode_ms=4.0, forward_ms=5.0, num_steps=6
)
NextToken = Callable[[list[int]], int]


def _common_len(left: list[int], right: list[int]) -> int:
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)


def token_after(context: list[int], vocab_size: int) -> int:
    """The model: a checksum of the context."""
    return zlib.crc32(",".join(map(str, context)).encode()) % vocab_size


@dataclass
class PaperSlot:
    """A session of the engine: its tokens, how many of them have KV, and its turn."""

    tokens: list[int]
    kv_len: int = 0
    turn: PaperTurn | None = None
    is_closing: bool = False
    draft: list[int] = field(default_factory=list)
    """What a draft has computed behind the tokens."""


@dataclass
class PaperTurn:
    """A turn of the engine. `context` holds the outputs too."""

    command: SubmitTurn
    base: list[int]
    prompt_len: int
    cached: int
    context: list[int]
    drafted: int = 0
    is_started: bool = False

    @property
    def num_outputs(self) -> int:
        return len(self.context) - self.prompt_len


@dataclass
class PaperEngine:
    """Implements `EngineClient`. `faults` collects what the server did wrong."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    max_turn_len: int = 4096
    next_token: NextToken | None = None
    tokens_per_step: int = 1
    slots: dict[SessionId, PaperSlot] = field(default_factory=dict)
    commands: deque[EngineCommand] = field(default_factory=deque)
    events: deque[EngineEvent] = field(default_factory=deque)
    salts: dict[SessionId, str] = field(default_factory=dict)
    seen: list[EngineCommand] = field(default_factory=list)
    cuts: list[tuple[StopTurn, int]] = field(default_factory=list)
    epoch: int = 0
    is_up: bool = False
    is_alive: bool = False
    is_full: bool = False
    refuse_open: str | None = None
    kv_tiers: Literal["none", "host", "disk"] = "none"
    erases: bool = True
    _listener: EventListener | None = None

    # -- EngineClient

    async def start(self, listener: EventListener) -> EngineReady:
        self._listener = listener
        self.come_up()
        ready = self.events.pop()
        assert isinstance(ready, EngineReady)
        self.is_up = True
        return ready

    def send(self, command: EngineCommand) -> None:
        if not self.is_up or self.is_full:
            raise EngineUnavailable("no engine")
        self.commands.append(command)
        self.seen.append(command)

    async def stop(self) -> None:
        self.is_up = self.is_alive = False

    # -- the test's levers

    def deliver(self, limit: int | None = None) -> int:
        """Hand events to the server; returns how many."""
        assert self._listener is not None
        count = 0
        while self.events and (limit is None or count < limit):
            event = self.events.popleft()
            if isinstance(event, EngineReady):
                # A client takes commands for an engine once it has said that the engine is ready.
                self.is_up = event.epoch == self.epoch and self.is_alive
            self._listener(event)
            count += 1
        return count

    def step(self) -> None:
        """Take all commands, then one token for every live turn."""
        while self.commands:
            self._obey(self.commands.popleft())
        for slot in list(self.slots.values()):
            for _ in range(self.tokens_per_step):
                if slot.turn is not None:
                    self._run(slot, slot.turn)

    def run(self, steps: int = 10_000) -> None:
        """Step and deliver until nothing is left to do."""
        for _ in range(steps):
            self.step()
            if not self.deliver() and not self.commands and not self.is_busy:
                return
        raise AssertionError("the engine never came to rest")

    @property
    def is_busy(self) -> bool:
        return any(slot.turn is not None for slot in self.slots.values())

    def die(self, *, will_restart: bool = True) -> None:
        """Lose everything but the events already on their way."""
        assert self.is_alive
        self.is_up = self.is_alive = False
        self.commands.clear()
        self.slots.clear()
        self.events.append(EngineDied(message="killed", will_restart=will_restart))

    def come_up(self) -> None:
        assert not self.is_alive
        self.is_alive = True
        self.epoch += 1
        self.events.append(
            EngineReady(
                epoch=self.epoch,
                max_turn_len=self.max_turn_len,
                vocab_size=self.vocab_size,
                eos_token_ids=self.eos_ids,
                page_size=16,
                num_pages=1024,
                device="paper",
                dtype="float32",
                backend="paper",
                kv_tiers=self.kv_tiers,
            )
        )

    def cool(self, session_id: SessionId) -> None:
        """Pressure takes an idle session's KV."""
        slot = self.slots[session_id]
        assert slot.turn is None
        slot.kv_len = 0
        slot.draft = []
        self.events.append(SessionCooled(session_id=session_id))

    def fail(self, session_id: SessionId, code: str) -> None:
        """End the session's live turn by a fault."""
        slot = self.slots[session_id]
        assert slot.turn is not None
        self._fail(session_id, slot.turn.command.turn_id, code, len(slot.turn.base))
        slot.tokens = slot.turn.base
        slot.turn = None

    # -- inside

    def _obey(self, command: EngineCommand) -> None:
        match command:
            case OpenSession(session_id=session_id):
                self._open(command)
            case SubmitTurn():
                self._submit(command)
            case DraftInput():
                self._draft(command)
            case DropDraft(session_id=session_id):
                if session_id in self.slots:
                    self.slots[session_id].draft = []
            case StopTurn(turn_id=turn_id, num_outputs=num_outputs):
                self._note_cut(command)
                self._cut(turn_id, num_outputs, FinishReason.STOP)
            case CancelTurn(turn_id=turn_id, num_outputs=num_outputs):
                self._cut(turn_id, num_outputs, FinishReason.CANCELLED)
            case MeasureKV(request_id=request_id, session_id=session_id, base_len=base_len):
                held_len = base_len if session_id in self.slots else 0
                self.events.append(
                    KVMeasured(request_id=request_id, held_len=held_len, copied_len=0)
                )
            case WriteKV(request_id=request_id, session_id=session_id):
                slot = self.slots.get(session_id)
                num_tokens = 0 if slot is None else len(slot.tokens)
                files = ((b"file", num_tokens),) if num_tokens else ()
                self.events.append(
                    KVWritten(request_id=request_id, num_tokens=num_tokens, files=files)
                )
            case WarmSession() | CoolSession() | ExpectKV():
                pass  # the paper engine keeps nothing outside of its slots
            case CloseSession(session_id=session_id):
                slot = self.slots.pop(session_id, None)
                assert slot is None or slot.turn is None, "closed under a live turn"
                self.events.append(SessionGone(session_id=session_id))
            case ForgetKV(number=number):
                # The paper engine keeps nothing outside of its slots.
                if number is not None:
                    self.events.append(KVForgotten(number=number, is_gone=self.erases))
            case FlushCache(request_id=request_id):
                done = not self.is_busy
                if done:
                    for session_id in self.slots:
                        self.cool(session_id)
                self.events.append(CacheFlushed(request_id=request_id, done=done))
            case ReportMemory(request_id=request_id):
                self.events.append(
                    MemoryReported(
                        request_id=request_id,
                        pools={},
                        rows=1,
                        rows_free=1,
                        num_sessions=len(self.slots),
                        sessions=(),
                        checks=CheckerReport(runs=1, levels={"2": 1}),
                    )
                )
            case Shutdown():
                self.is_up = False

    def _note_cut(self, command: StopTurn) -> None:
        """Remember how far a turn was when its stop was heard."""
        for slot in self.slots.values():
            if slot.turn is not None and slot.turn.command.turn_id == command.turn_id:
                self.cuts.append((command, slot.turn.num_outputs))

    def _open(self, command: OpenSession) -> None:
        session_id = command.session_id
        if self.refuse_open is not None or session_id in self.slots:
            code = self.refuse_open or "duplicate"
            self.events.append(SessionRefused(session_id=session_id, code=code, message="no"))
            return
        self.slots[session_id] = PaperSlot(list(command.tokens))
        self.salts[session_id] = command.tenant_salt

    def _submit(self, command: SubmitTurn) -> None:
        slot = self.slots.get(command.session_id)
        if slot is None:
            self._fail(command.session_id, command.turn_id, "session_not_found", 0)
            return
        assert slot.turn is None, "two turns of one session"
        assert command.base_len <= len(slot.tokens), "built on tokens the engine does not hold"
        assert command.tokens, "a forward needs a query"
        assert command.sampling.seed is not None
        base = slot.tokens[: command.base_len]
        context = base + list(command.tokens)
        needed = 1 if command.sampling.max_tokens else 0
        assert len(context) + needed <= self.max_turn_len, "cannot fit"
        assert len(context) + command.sampling.max_tokens <= self.max_turn_len, "not clipped"
        assert all(0 <= token < self.vocab_size for token in command.tokens)
        cached, drafted = min(slot.kv_len, command.base_len), 0
        if slot.draft and command.base_len == len(slot.tokens):
            both = _common_len(slot.draft, context)
            cached, drafted = max(cached, both), max(0, both - cached)
            cached, drafted = min(cached, len(context) - 1), min(drafted, len(context) - 1)
        slot.draft = []
        slot.turn = PaperTurn(command, base, len(context), cached, context, drafted)

    def _draft(self, command: DraftInput) -> None:
        slot = self.slots.get(command.session_id)
        kept = processed = 0
        total = command.base_len + len(command.tokens)
        if slot is not None and slot.turn is None:
            assert command.base_len <= len(slot.tokens), "built on tokens the engine does not hold"
            assert command.tokens, "a forward needs a query"
            assert total < self.max_turn_len, "a turn could not follow"
            del slot.tokens[command.base_len :]
            slot.kv_len = min(slot.kv_len, command.base_len)
            context = slot.tokens + list(command.tokens)
            kept = max(slot.kv_len, _common_len(slot.draft, context))
            slot.draft, processed = context, total
        self.events.append(
            InputDrafted(
                session_id=command.session_id,
                draft_id=command.draft_id,
                kept=kept,
                processed=processed,
                total=total,
            )
        )

    def _run(self, slot: PaperSlot, turn: PaperTurn) -> None:
        sampling = turn.command.sampling
        if not turn.is_started:
            turn.is_started = True
            self.events.append(
                TurnStarted(
                    turn_id=turn.command.turn_id,
                    prompt_tokens=turn.prompt_len,
                    cached_tokens=turn.cached,
                    drafted_tokens=turn.drafted,
                )
            )
        if sampling.max_tokens == 0:
            self._finish(slot, turn, FinishReason.LENGTH, None)
            return
        choose = self.next_token or (lambda context: token_after(context, self.vocab_size))
        token = choose(turn.context)
        turn.context.append(token)
        logprobs = (TokenLogprob(token, -0.5),) if sampling.logprobs else ()
        self.events.append(
            TokensProduced(turn_id=turn.command.turn_id, token_ids=(token,), logprobs=logprobs)
        )
        is_eos = token in self.eos_ids and not sampling.ignore_eos
        if is_eos or token in sampling.stop_token_ids:
            self._finish(slot, turn, FinishReason.STOP, token)
        elif turn.num_outputs >= sampling.max_tokens:
            self._finish(slot, turn, FinishReason.LENGTH, None)

    def _cut(self, turn_id: TurnId, num_outputs: int | None, reason: FinishReason) -> None:
        for slot in self.slots.values():
            turn = slot.turn
            if turn is None or turn.command.turn_id != turn_id:
                continue
            if num_outputs is None:
                turn.context = list(turn.base)
            else:
                assert num_outputs <= turn.num_outputs, "kept more than there is"
                del turn.context[turn.prompt_len + num_outputs :]
            self._finish(slot, turn, reason, None)

    def _finish(
        self, slot: PaperSlot, turn: PaperTurn, reason: FinishReason, matched: int | None
    ) -> None:
        slot.tokens = turn.context
        slot.kv_len = max(len(turn.context) - 1, 0)
        slot.turn = None
        self.events.append(
            TurnFinished(
                turn_id=turn.command.turn_id,
                session_id=turn.command.session_id,
                reason=reason,
                matched_token=matched,
                history_len=len(slot.tokens),
                prompt_tokens=turn.prompt_len,
                cached_tokens=turn.cached,
                num_outputs=max(turn.num_outputs, 0),
                num_retractions=0,
                timings=TIMINGS,
            )
        )

    def _fail(self, session_id: SessionId, turn_id: TurnId, code: str, history_len: int) -> None:
        self.events.append(
            TurnFailed(
                turn_id=turn_id,
                session_id=session_id,
                code=code,
                message="it failed",
                history_len=history_len,
            )
        )
