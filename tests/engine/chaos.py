"""A seeded server that does everything a server may do, and much that it may not.

It keeps each session's history as the truth, as `sessions` does, tells the engine at random
moments, executes launches late, injects faults, and compares every outcome with a straight-line
replay. It counts what it reaches, so that a test can fail when something never happened.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from cache.types import SessionId, TurnId
from session_server.core.commands import (
    CancelTurn,
    CloseSession,
    EngineCommand,
    FlushCache,
    OpenSession,
    ReportMemory,
    StopTurn,
    SubmitTurn,
)
from session_server.core.events import (
    CacheFlushed,
    EngineEvent,
    FinishReason,
    MemoryReported,
    SessionCooled,
    SessionGone,
    SessionRefused,
    TurnFailed,
    TurnFinished,
)
from session_server.core.sampling import SamplingParams
from session_server.sim.echo import EOS, VOCAB_SIZE, replay, replay_scores
from tests.engine.bench import Bench, Stage

NUM_SESSIONS = 9
DOCUMENTS = [
    tuple(random.Random(seed).randrange(1, VOCAB_SIZE) for _ in range(80)) for seed in range(3)
]
"""Prompts begin with a piece of one of these, so that sessions share prefixes."""


@dataclass
class Live:
    """A turn the server waits for. `kept`: what the server decided to keep, once it decided."""

    command: SubmitTurn
    prompt: tuple[int, ...]
    fault: str | None = None
    kept: int | None = None
    is_ended_early: bool = False


@dataclass
class ServerSession:
    """The server's truth. The engine holds the first `held_len` tokens of `history`."""

    session_id: SessionId
    salt: str
    history: tuple[int, ...]
    held_len: int
    live: Live | None = None
    is_closing: bool = False
    is_pinned: bool = False


@dataclass
class Chaos:
    """One seeded run."""

    seed: int
    stage: Stage
    reached: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.bench = Bench(self.stage)
        self.sessions: dict[SessionId, ServerSession] = {}
        self.expected_failures: dict[TurnId, str] = {}
        self.ended: list[TurnId] = []
        self.num_names = 0
        self.num_heard = 0

    def run(self, num_actions: int) -> None:
        """Act, then let everything come to rest, close, and count the pages."""
        for _ in range(num_actions):
            self._act()
            self._hear()
        self.bench.run()
        self._hear()
        assert all(session.live is None for session in self.sessions.values())
        self.bench.close_all()
        counters = self.bench.engine.counters
        self.reached["runs"] += 1
        self.reached["retract"] += counters.retractions
        self.reached["cool"] += counters.coolings
        self.reached["overshoot"] += counters.overshoots
        self.reached["shortfall"] += counters.shortfalls
        self.reached["right draft"] += counters.accepted_tokens
        self.reached["wrong draft"] += counters.draft_tokens - counters.accepted_tokens
        self.reached["probe"] += self.bench.engine._guard.prober.num_probes
        self.reached["publish duplicate"] += self.bench.cache.num_repoints

    # Acting

    def _act(self) -> None:
        # Every other seed is a calm one: turns live long enough to meet and retract each other.
        unrest = 1 if self.seed % 2 else 5
        actions = {
            self._settle: 40,
            self._submit: 22,
            self._step: 6,
            self._open: 4,
            self._cancel: unrest,
            self._stop: unrest / 3,
            self._close: unrest / 3,
            self._misbehave: unrest,
            self._inject: unrest / 3,
            self._flush: unrest / 5,
            self._report: unrest / 5,
        }
        action = self.random.choices(list(actions), list(actions.values()))[0]
        action()

    def _name(self, prefix: str) -> str:
        self.num_names += 1
        return f"{prefix}{self.num_names}"

    def _send(self, *commands: EngineCommand) -> None:
        self.bench.step(*commands)

    def _step(self) -> None:
        self.bench.step()

    def _settle(self) -> None:
        if len(self.bench.runner):
            self.bench.settle()
        else:
            self.bench.step()

    def _open(self) -> None:
        if len(self.sessions) >= NUM_SESSIONS:
            return
        salt, session_id = self.random.choice("aab"), SessionId(self._name("s"))
        document = self.random.choice(DOCUMENTS)
        history = document[: self.random.choice([0, 0, 7, 16, 33])]
        self.bench.salts[session_id] = salt
        session = ServerSession(session_id, salt, history, len(history))
        session.is_pinned = self.stage.pinned_quota_pages > 0 and self.random.random() < 0.6
        self.sessions[session_id] = session
        self._send(
            OpenSession(
                session_id=session_id, tenant_salt=salt, tokens=history, pinned=session.is_pinned
            )
        )

    def _pick(self, *, is_live: bool) -> ServerSession | None:
        candidates = [
            session
            for session in self.sessions.values()
            if (session.live is not None) == is_live and not session.is_closing
        ]
        return self.random.choice(candidates) if candidates else None

    def _submit(self) -> None:
        if (session := self._pick(is_live=False)) is None:
            return
        if session.history and self.random.random() < 0.15:
            cut = self.random.randrange(len(session.history) + 1)
            session.history = session.history[:cut]
            self.reached["rewind"] += 1
        room = self.bench.engine.max_turn_len - len(session.history)
        if room < 12:
            session.history = session.history[: self.random.randrange(20)]
            room = self.bench.engine.max_turn_len - len(session.history)
        new = self._new_tokens(session, room)
        base_len = min(session.held_len, len(session.history))
        prompt = session.history + new
        if not prompt:
            return
        command = SubmitTurn(
            session_id=session.session_id,
            turn_id=TurnId(self._name("t")),
            base_len=base_len,
            tokens=prompt[base_len:],
            sampling=self._sampling(len(prompt)),
            priority=self.random.choice([0, 0, 0, 1, 5]),
        )
        self.bench.sessions[command.turn_id] = session.session_id
        session.live = Live(command, prompt)
        if len(prompt) + min(1, command.sampling.max_tokens) > self.bench.engine.max_turn_len:
            session.live.fault = "context_too_long"
        self._send(command)

    def _new_tokens(self, session: ServerSession, room: int) -> tuple[int, ...]:
        if self.random.random() < 0.03:
            return tuple([1] * (room + self.random.randrange(3)))
        start = len(session.history)
        length = min(room - 1, self.random.choice([0, 1, 1, 2, 3, 5, 8, 13, 40]))
        for document in DOCUMENTS:
            if start + length <= len(document) and session.history == document[:start]:
                return document[start : start + length]
        return tuple(self.random.randrange(1, VOCAB_SIZE) for _ in range(length))

    def _sampling(self, prompt_len: int) -> SamplingParams:
        pick = self.random.choice
        max_tokens = pick([0, 1, 2, 5, 9, 17, 30, 60])
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, pick([0, 0, 0, 2, 6])),
            seed=self.random.randrange(4),
            ignore_eos=pick([True, True, False]),
            stop_token_ids=pick([(), (), (), (5, 9)]),
            prompt_logprobs_from=pick([None, None, None, 0, self.random.randrange(prompt_len + 2)]),
        )

    def _cancel(self) -> None:
        if (session := self._pick(is_live=True)) is None:
            return
        live = session.live
        assert live is not None
        if live.is_ended_early:
            return
        seen = self.bench.turns[live.command.turn_id]
        live.kept = self.random.choice([None, self.random.randrange(len(seen.tokens) + 1)])
        if self.random.random() < 0.5 and live.kept is not None:
            live.kept = len(seen.tokens)
        live.is_ended_early = True
        stage = "waiting" if not seen.starts else "decode" if seen.tokens else "prefill"
        self.reached[f"cancel in {stage}"] += 1
        self._send(CancelTurn(turn_id=live.command.turn_id, num_outputs=live.kept))

    def _stop(self) -> None:
        if (session := self._pick(is_live=True)) is None:
            return
        live = session.live
        assert live is not None
        num_heard = len(self.bench.turns[live.command.turn_id].tokens)
        if live.is_ended_early or num_heard == 0:
            return
        live.kept = self.random.randint(1, num_heard)
        live.is_ended_early = True
        self.reached["stop string"] += 1
        self._send(StopTurn(turn_id=live.command.turn_id, num_outputs=live.kept))

    def _close(self) -> None:
        if not self.sessions:
            return
        session = self.random.choice(list(self.sessions.values()))
        if session.live is not None:
            session.live.kept, session.live.is_ended_early = None, True
            seen = self.bench.turns[session.live.command.turn_id]
            self.reached["close while running" if seen.starts else "close while waiting"] += 1
        session.is_closing = True
        close = CloseSession(session_id=session.session_id)
        self._send(*([close, close] if self.random.random() < 0.3 else [close]))

    def _misbehave(self) -> None:
        """Commands that must change nothing."""
        what = self.random.choice(["late", "duplicate", "busy", "unknown", "base", "vocab"])
        if what == "late" and self.ended:
            turn_id = self.random.choice(self.ended)
            self.reached["late command"] += 1
            self._send(
                CancelTurn(turn_id=turn_id, num_outputs=self.random.choice([None, 0, 3])),
                StopTurn(turn_id=turn_id, num_outputs=1),
            )
        live = self._pick(is_live=True)
        if what == "duplicate" and live is not None and live.live is not None:
            self.reached["duplicate submit"] += 1
            self._send(live.live.command)
        if what == "busy" and live is not None:
            self._send_refused(live.session_id, base_len=0, code="session_busy")
        idle = self._pick(is_live=False)
        if what == "unknown":
            self._send_refused(SessionId("nobody"), base_len=0, code="session_not_found")
        if what == "base" and idle is not None:
            self._send_refused(
                idle.session_id, base_len=idle.held_len + 9999, code="internal_inconsistency"
            )
        if what == "vocab" and idle is not None:
            self._send_refused(
                idle.session_id, base_len=0, tokens=(1, VOCAB_SIZE), code="invalid_request"
            )

    def _send_refused(
        self, session_id: SessionId, *, base_len: int, code: str, tokens: tuple[int, ...] = (1,)
    ) -> None:
        turn_id = TurnId(self._name("bad"))
        self.expected_failures[turn_id] = code
        self._send(
            SubmitTurn(
                session_id=session_id,
                turn_id=turn_id,
                base_len=base_len,
                tokens=tokens,
                sampling=SamplingParams(seed=0),
            )
        )

    def _inject(self) -> None:
        faults = self.bench.runner.faults
        what = self.random.choice(["nan", "poison", "step"])
        if what == "step":
            faults.fail_steps.add(len(self.bench.batches) + 1)
            self.reached["failed step"] += 1
            return
        session = self._pick(is_live=True)
        if session is None or session.live is None or session.live.fault is not None:
            return
        turn_id = session.live.command.turn_id
        session.live.fault = "numerical_error" if what == "nan" else "device_failed"
        (faults.nan_turns if what == "nan" else faults.poison_turns).add(turn_id)

    def _flush(self) -> None:
        self._send(FlushCache(request_id=1))

    def _report(self) -> None:
        self._send(ReportMemory(request_id=2, full=self.random.random() < 0.5))

    # Hearing

    def _hear(self) -> None:
        news = self.bench.events[self.num_heard :]
        self.num_heard = len(self.bench.events)
        for event in news:
            self._on(event)

    def _on(self, event: EngineEvent) -> None:
        match event:
            case TurnFinished():
                self._finished(event)
            case TurnFailed():
                self._failed(event)
            case SessionGone(session_id=session_id):
                session = self.sessions.pop(session_id, None)
                assert session is None or (session.live is None and session.is_closing)
            case SessionRefused(session_id=session_id, code=code):
                assert code == "quota_exceeded"
                assert self.sessions.pop(session_id).is_pinned
                self.reached["pin refused"] += 1
            case SessionCooled(session_id=session_id):
                assert session_id in self.bench.salts
            case CacheFlushed(done=done):
                self.reached["flush done" if done else "flush refused"] += 1
            case MemoryReported(checks=checks, pools=pools):
                self.reached["report"] += 1
                assert checks.violations == 0
                for pool in pools.values():
                    parts = [pool.free, pool.reserved, pool.tree_evictable, pool.tree_protected]
                    parts += [pool.session_held, pool.active, pool.quarantine]
                    assert sum(parts) == pool.pages
            case _:
                pass

    def _end(self, event: TurnFinished | TurnFailed) -> tuple[ServerSession, Live]:
        session = self.sessions[event.session_id]
        live, session.live = session.live, None
        assert live is not None
        assert live.command.turn_id == event.turn_id
        self.ended.append(event.turn_id)
        faults = self.bench.runner.faults
        faults.nan_turns.discard(event.turn_id)
        faults.poison_turns.discard(event.turn_id)
        outputs = self.bench.turns[event.turn_id].tokens
        seed = live.command.sampling.seed
        assert seed is not None
        assert outputs == replay(session.salt, live.prompt, seed=seed, max_new=len(outputs))
        return session, live

    def _finished(self, event: TurnFinished) -> None:
        session, live = self._end(event)
        seen, sampling = self.bench.turns[event.turn_id], live.command.sampling
        assert live.fault != "context_too_long"
        assert event.prompt_tokens == len(live.prompt)
        assert 0 <= event.cached_tokens < len(live.prompt)
        self.reached[f"finished {event.reason.value}"] += 1
        self.reached["resumed"] += event.num_retractions > 0 and bool(seen.tokens)
        if event.reason is FinishReason.CANCELLED or event.matched_token is None:
            is_asked_for = live.is_ended_early or event.reason is FinishReason.LENGTH
            assert is_asked_for
        if not live.is_ended_early:
            live.kept = len(seen.tokens)
            self._check_natural_end(event, sampling, seen.tokens, len(live.prompt))
            self._check_scores(session, live)
        if live.kept is None:
            assert event.num_outputs == 0 or event.reason is not FinishReason.CANCELLED
        else:
            session.history = live.prompt + tuple(seen.tokens[: live.kept])
        truth = live.prompt + tuple(seen.tokens)
        # What the engine holds is a prefix of what was said; the server knows how much of it.
        session.held_len = min(event.history_len, len(session.history))
        assert session.history[: session.held_len] == truth[: session.held_len]

    def _check_natural_end(
        self, event: TurnFinished, sampling: SamplingParams, outputs: list[int], prompt_len: int
    ) -> None:
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        at_stop = [
            i for i, token in enumerate(outputs) if token in stops and i + 1 >= sampling.min_tokens
        ]
        assert event.num_outputs == len(outputs)
        assert event.history_len == prompt_len + len(outputs)
        if event.reason is FinishReason.STOP:
            assert at_stop == [len(outputs) - 1]
            assert event.matched_token == outputs[-1]
        else:
            room = self.bench.engine.max_turn_len - prompt_len
            assert not at_stop
            assert len(outputs) == min(sampling.max_tokens, room)
            self.reached["context full"] += room < sampling.max_tokens

    def _check_scores(self, session: ServerSession, live: Live) -> None:
        start = live.command.sampling.prompt_logprobs_from
        scores = self.bench.turns[live.command.turn_id].scores
        if start is None:
            assert scores == []
            return
        assert scores == replay_scores(session.salt, live.prompt, start)
        self.reached["scored"] += len(scores) > 1

    def _failed(self, event: TurnFailed) -> None:
        self.reached[f"failed {event.code}"] += 1
        if event.turn_id in self.expected_failures:
            assert event.code == self.expected_failures.pop(event.turn_id)
            return
        session, live = self._end(event)
        is_twice_unlucky = event.code == "device_failed" and self.reached["failed step"] > 1
        is_over_quota = event.code == "quota_exceeded" and session.is_pinned
        assert event.code == live.fault or is_twice_unlucky or is_over_quota, event
        session.held_len = min(event.history_len, len(session.history))
