"""The direct front: a server reduced to its histories, which tells the engine everything a server
may say, and much that it may not.

It keeps each session's history as the truth, decides what a cancelled turn leaves, and compares
what the engine holds with it. Commands wait in an inbox for the next step, as they do in service.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from cache.types import SessionId, TurnId
from session_server.core.commands import (
    CancelTurn,
    CloseSession,
    CoolSession,
    DraftInput,
    DropDraft,
    EngineCommand,
    FlushCache,
    ForgetKV,
    OpenSession,
    ReportMemory,
    Shutdown,
    StopTurn,
    SubmitTurn,
    WarmSession,
)
from session_server.core.events import EngineEvent, SessionRefused, TurnFailed, TurnFinished
from session_server.core.sampling import SamplingParams
from session_server.engine.engine import StepOutcome
from tests.sim.context import SimContext
from tests.sim.failure import Broken, Layer
from tests.sim.stage import Stage
from tests.sim.trace import Op

STEP_S: Final = 0.01
"""Time one engine step takes."""

MAX_LEFT: Final = 6


@dataclass(slots=True, eq=False)
class ServerTurn:
    """A turn the server waits for. `kept`: outputs it decided to keep, None for nothing at all,
    once `is_decided`."""

    command: SubmitTurn
    prompt: tuple[int, ...]
    kept: int | None = None
    is_decided: bool = False


@dataclass(slots=True, eq=False)
class ServerSession:
    """The server's truth of one session. `typed`: what was drafted last."""

    session_id: SessionId
    history: tuple[int, ...]
    live: ServerTurn | None = None
    typed: tuple[int, ...] = ()
    tenant: str = ""
    owner: str = ""


class DirectWorld:
    """Applies operations. What refers to a session or turn that is not there does nothing."""

    def __init__(self, context: SimContext) -> None:
        self._context = context
        self._inbox: list[EngineCommand] = []
        self._turns: dict[TurnId, ServerSession] = {}
        self._closing: set[SessionId] = set()
        self._cut: dict[SessionId, int] = {}
        self._num_requests = 0
        self._num_steps_before = 0
        self._ends_by_s = 0.0
        self.stage = Stage(context, context.config.sizes.model)
        self.sessions: dict[SessionId, ServerSession] = {}
        self.left: deque[ServerSession] = deque(maxlen=MAX_LEFT)
        """Sessions that were closed and may come back."""

        self._verbs: dict[str, Callable[[Op], None]] = {
            "open": self._open,
            "submit": self._submit,
            "draft": self._draft,
            "drop": self._drop,
            "cancel": self._cancel,
            "stop": self._stop,
            "close": self._close,
            "warm": self._warm,
            "cool": self._cool,
            "forget": self._forget,
            "late": self._late,
            "duplicate": self._duplicate,
            "refused": self._refused,
            "flush": self._flush,
            "report": self._report,
            "step": self._step,
            "execute": self._execute,
            "carry": self._carry,
            "silence": self._keep_silent,
            "rest": lambda _: self.rest(),
            "shutdown": self._shutdown,
            "restart": self._restart,
        }

    @property
    def num_steps(self) -> int:
        """Engine steps so far, of all lives."""
        return self._num_steps_before + self.stage.num_steps

    @property
    def is_resting(self) -> bool:
        """Whether nothing moves before a command comes."""
        is_busy = self._inbox or self.stage.history.live or self.stage.num_launched
        return not (is_busy or self.is_ending)

    @property
    def is_ending(self) -> bool:
        """Whether the engine was told to end."""
        return self._context.disk.is_ending

    @property
    def has_ended(self) -> bool:
        """Whether the engine has ended as it was told to."""
        return not self._inbox and self.stage.engine.has_shut_down

    def apply(self, op: Op) -> None:
        """Do one operation. An engine that is ending is told nothing more."""
        if not self.is_ending or op["op"] in {"step", "execute", "carry", "silence", "restart"}:
            self._verbs[op["op"]](op)

    def finish(self) -> None:
        """Nothing new: let everything end, close all, empty the cache, see that nothing is left."""
        if self.is_ending:
            self._restart({})
        stage = self.stage
        stage.calm()
        self.rest()
        for session_id in list(self.sessions):
            self._inbox.append(CloseSession(session_id=session_id))
        self.rest()
        self._inbox.append(FlushCache(request_id=self._request_id()))
        self.rest()
        stage.check_empty()

    def close(self) -> None:
        """Nothing is held."""

    def rest(self) -> None:
        """Step as the engine's loop does, until nothing is left to do."""
        stage = self.stage
        self._advance(0)
        for _ in range(stage.rest_budget):
            if stage.is_blocked and not stage.num_launched:
                return
            self._advance(1 if stage.is_blocked else 0)
        raise Broken(Layer.LIVENESS, f"still live: {sorted(stage.history.live)}")

    # Operations

    def _open(self, op: Op) -> None:
        session_id = SessionId(op["s"])
        history = tuple(op["tokens"])
        if session_id in self.sessions:
            return
        self.sessions[session_id] = ServerSession(
            session_id, history, tenant=op.get("tenant", ""), owner=op["owner"]
        )
        self._inbox.append(
            OpenSession(
                session_id=session_id,
                tenant_salt=op["owner"],
                tenant=op.get("tenant", ""),
                tenant_weight={"a": 100, "b": 500}.get(op["owner"], 900),
                tokens=history,
                pinned=op["pinned"],
            )
        )

    def _submit(self, op: Op) -> None:
        session = self.sessions.get(SessionId(op["s"]))
        if session is None or session.live is not None or session.session_id in self._closing:
            return
        base_len, prompt = self._built_on(session, op)
        if not prompt:
            return
        session.typed = ()
        command = SubmitTurn(
            session_id=session.session_id,
            turn_id=TurnId(op["t"]),
            base_len=base_len,
            tokens=prompt[base_len:],
            sampling=SamplingParams(**op["sampling"]),
            priority=op["priority"],
            tenant=session.tenant,
        )
        session.live = ServerTurn(command, prompt)
        self._turns[command.turn_id] = session
        self._inbox.append(command)

    def _built_on(self, session: ServerSession, op: Op) -> tuple[int, tuple[int, ...]]:
        """How much of a context the engine holds, and the context: what is left of the history
        after a rewind, and what is said."""
        copy = self.stage.history.sessions.get(session.session_id)
        held = session.history if copy is None else copy.held
        held = held[: self._cut.get(session.session_id)]
        self.stage.history.reached["rewind"] += op["cut"] < len(session.history)
        session.history = session.history[: op["cut"]]
        base_len = max(0, _common_len(session.history, held) - op["lag"])
        return base_len, session.history + tuple(op["new"])

    def _draft(self, op: Op) -> None:
        session = self.sessions.get(SessionId(op["s"]))
        if session is None or session.live is not None or session.session_id in self._closing:
            return
        base_len, context = self._built_on(session, op)
        if not context:
            return
        session.typed = tuple(op["new"])
        self._cut[session.session_id] = base_len
        self._inbox.append(
            DraftInput(
                session_id=session.session_id,
                draft_id=TurnId(op["d"]),
                base_len=base_len,
                tokens=context[base_len:],
            )
        )

    def _drop(self, op: Op) -> None:
        if (session := self.sessions.get(SessionId(op["s"]))) is not None:
            session.typed = ()
            self._inbox.append(DropDraft(session_id=session.session_id))

    def _cancel(self, op: Op) -> None:
        self._decide(op, "cancel")

    def _stop(self, op: Op) -> None:
        self._decide(op, "stop")

    def _decide(self, op: Op, verb: str) -> None:
        turn_id = TurnId(op["t"])
        session = self._turns.get(turn_id)
        if session is None or session.live is None or session.live.is_decided:
            return
        keep = op["keep"]
        if keep is not None:
            keep = min(keep, self._num_heard(turn_id))
        if verb == "stop" and not keep:
            return
        session.live.kept, session.live.is_decided = keep, True
        if verb == "cancel":
            self._inbox.append(CancelTurn(turn_id=turn_id, num_outputs=keep))
        else:
            self._inbox.append(StopTurn(turn_id=turn_id, num_outputs=keep))

    def _close(self, op: Op) -> None:
        session = self.sessions.get(SessionId(op["s"]))
        if session is None:
            return
        if session.live is not None and not session.live.is_decided:
            session.live.kept, session.live.is_decided = None, True
        is_deleted = op.get("deleted", True)
        close = CloseSession(session_id=session.session_id, is_deleted=is_deleted)
        if not is_deleted:
            self.left.append(session)
        self._closing.add(session.session_id)
        self._inbox.extend([close] * op["times"])

    def _forget(self, _: Op) -> None:
        """Delete the session that was closed first of those to come back; the engine does not know
        it."""
        if not self.left:
            return
        session = self.left.popleft()
        tokens = np.array(session.history, "<i4").tobytes()
        forget = ForgetKV(tenant_salt=session.owner, tenant=session.tenant, tokens=tokens)
        self._inbox.append(forget)

    def _cool(self, op: Op) -> None:
        if SessionId(op["s"]) in self.sessions:
            self._inbox.append(CoolSession(session_id=SessionId(op["s"])))

    def _warm(self, op: Op) -> None:
        self._inbox.append(WarmSession(session_id=SessionId(op["s"])))

    def _late(self, op: Op) -> None:
        turn_id = TurnId(op["t"])
        if turn_id not in self._turns:
            self._inbox.append(CancelTurn(turn_id=turn_id, num_outputs=op["keep"]))
            self._inbox.append(StopTurn(turn_id=turn_id, num_outputs=1))

    def _duplicate(self, op: Op) -> None:
        session = self._turns.get(TurnId(op["t"]))
        if session is not None and session.live is not None and not session.live.is_decided:
            self._advance(0)
            if session.live is not None:
                self._inbox.append(session.live.command)
                self._advance(0)

    def _refused(self, op: Op) -> None:
        """A turn that must be refused; without results, which might make it right."""
        session_id = SessionId(op["s"])
        self._advance(0)
        session = self.sessions.get(session_id)
        is_live = session is not None and session.live is not None
        if op["why"] == "busy" and not is_live:
            return
        base_len = 10**6 if op["why"] == "base" else 0
        command = SubmitTurn(
            session_id=SessionId("nobody") if op["why"] == "unknown" else session_id,
            turn_id=TurnId(op["t"]),
            base_len=base_len,
            tokens=(1, self.stage.device.model.vocab_size) if op["why"] == "vocab" else (1,),
            sampling=SamplingParams(seed=0),
            tenant="" if session is None else session.tenant,
        )
        if op["why"] in {"busy", "unknown"} or (session is not None and not is_live):
            self._inbox.append(command)
            self._advance(0)

    def _flush(self, op: Op) -> None:
        del op
        self._inbox.append(FlushCache(request_id=self._request_id()))

    def _report(self, op: Op) -> None:
        self._inbox.append(ReportMemory(request_id=self._request_id(), full=op["full"]))

    def _step(self, op: Op) -> None:
        if "fault" in op:
            self.stage.inject(op["fault"], op["which"])
        self._advance(op["results"])

    def _execute(self, op: Op) -> None:
        del op
        if len(self.stage.device):
            self.stage.execute()

    def _carry(self, op: Op) -> None:
        carrier = self.stage.carrier
        if carrier is not None and carrier.num_waiting:
            carrier.carry(op["which"])

    def _keep_silent(self, op: Op) -> None:
        """Nothing comes until the engine has something to do by itself: first it may ask the disk
        for its room, which does not answer either."""
        del op
        for _ in range(2):
            due_s = self.stage.engine.due_s
            if due_s is None:
                return
            watched_s = self.stage.engine.inspect().tiers.store.orders.disk_watch.due_s
            is_over = watched_s is not None and watched_s <= due_s
            self._context.reached["tier: disk silent"] += is_over and not self.is_ending
            self.stage.skipped_s += max(0.0, due_s - self._now_s)
            self._advance(0)
            if is_over:
                fenced = self.stage.cache.inspect().stores.fenced
                self._context.reached["tier: copy given up"] += bool(fenced)
                return

    def _shutdown(self, op: Op) -> None:
        """The server ends: it keeps what turns have said, and tells the engine to end."""
        del op
        for turn_id in list(self._turns):
            self._decide({"t": turn_id, "keep": self._num_heard(turn_id)}, "cancel")
        self._inbox += [DropDraft(session_id=session_id) for session_id in self.sessions]
        self._inbox.append(Shutdown())
        self._context.disk.is_ending = True

    def _restart(self, op: Op) -> None:
        """The engine is gone with all but its disk, whether or not it was told. The next one knows
        no session."""
        del op
        if not self.is_ending:
            self._context.reached["fault engine_death"] += 1
        elif self.has_ended:
            self.stage.tiers.check_ended()
        for session in self.sessions.values():
            session.live, session.typed = None, ()
        self.left.extend(self.sessions.values())
        for gone in (self.sessions, self._turns, self._inbox, self._closing, self._cut):
            gone.clear()
        self._context.disk.is_ending = False
        self._num_steps_before += self.stage.num_steps
        self.stage = Stage(self._context, self._context.config.sizes.model)

    # The engine

    @property
    def _now_s(self) -> float:
        return self.stage.num_steps * STEP_S + self.stage.skipped_s

    def _advance(self, num_results: int) -> None:
        commands, self._inbox = self._inbox, []
        self._cut.clear()
        stage = self.stage
        results = stage.take_results(num_results)
        now_s = self._now_s
        if any(isinstance(command, Shutdown) for command in commands):
            self._ends_by_s = now_s + stage.settings.tiers.drain_s
        outcome = stage.step(now_s, commands, results)
        for event in outcome.events:
            self._hear(event)
        if self.is_ending:
            self._check_ending(now_s, outcome)

    def _check_ending(self, now_s: float, outcome: StepOutcome) -> None:
        """An engine that is to end begins nothing, waits for something while it has not, and for
        nothing but forwards once its time is over."""
        if outcome.batch is not None:
            raise Broken(Layer.PROTOCOL, "an engine that is to end has launched something")
        is_waiting = self.stage.is_blocked and not self.has_ended
        if is_waiting and not self.stage.num_launched:
            raise Broken(Layer.LIVENESS, "an engine that is to end waits for nothing")
        if now_s >= self._ends_by_s and not (
            self.has_ended or self.stage.engine.inspect().in_flight
        ):
            raise Broken(Layer.LIVENESS, f"an engine that was to end by {self._ends_by_s} goes on")

    def _hear(self, event: EngineEvent) -> None:
        match event:
            case TurnFinished() | TurnFailed():
                session = self._turns.pop(event.turn_id, None)
                if session is not None:
                    self._end(session, event)
            case SessionRefused(session_id=session_id):
                self.sessions.pop(session_id, None)
            case _:
                pass
        for session_id in self._closing:
            self.sessions.pop(session_id, None)
        self._closing.clear()

    def _end(self, session: ServerSession, event: TurnFinished | TurnFailed) -> None:
        turn, session.live = session.live, None
        assert turn is not None, "a turn the server waits for"
        outputs = self.stage.history.turns[event.turn_id].outputs
        if isinstance(event, TurnFailed):
            return
        kept = turn.kept if turn.is_decided else len(outputs)
        if kept is not None:
            session.history = turn.prompt + tuple(outputs[:kept])
        copy = self.stage.history.sessions.get(session.session_id)
        truth = turn.prompt + tuple(outputs)
        if copy is not None and copy.held != truth[: len(copy.held)]:
            raise Broken(Layer.SHADOW, f"{event}: the engine holds {copy.held}, said was {truth}")

    def _num_heard(self, turn_id: TurnId) -> int:
        turn = self.stage.history.turns.get(turn_id)
        return 0 if turn is None else len(turn.outputs)

    def _request_id(self) -> int:
        self._num_requests += 1
        return self._num_requests


def _common_len(left: Iterable[int], right: Iterable[int]) -> int:
    length = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        length += 1
    return length
