"""What must be true of everything the engine says: a sequential model of it, and what it owes.

The model follows the commands the engine was given and the events it answered with. Per turn: what
it was asked, what a lone turn would say (`Truth`), what was heard, and how it may end. It knows
nothing of pages, plans or batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

from cache.types import SessionId, TurnId
from session_server.core.commands import (
    CancelTurn,
    CloseSession,
    CoolSession,
    DraftInput,
    DropDraft,
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
    EngineStats,
    FinishReason,
    InputDrafted,
    MemoryReported,
    PrefillProgressed,
    PromptLogprobsComputed,
    SessionCooled,
    SessionGone,
    SessionRefused,
    TokensProduced,
    TurnFailed,
    TurnFinished,
    TurnStarted,
    one_by_one,
)
from session_server.core.sampling import TokenLogprob
from session_server.engine.config import EngineConfig
from tests.sim.draft_history import EngineDrafts
from tests.sim.draws import name_value
from tests.sim.echo import EchoModel, Truth, score_of
from tests.sim.failure import Broken, Layer
from tests.sim.faults import DOUBT_SITES

TurnEvent = (
    TurnStarted
    | PrefillProgressed
    | PromptLogprobsComputed
    | TokensProduced
    | TurnFinished
    | TurnFailed
)

DOUBT_FAILURES: Final = ("internal_inconsistency", "server_busy")
"""How a turn may fail under which memory is found wrong, and one that comes when pages are lost."""

_FAR_BEYOND: Final = 1000
"""Further than any history of a simulation: a base length that the engine cannot hold."""


@dataclass(slots=True, eq=False)
class EngineSession:
    """One session. The engine holds `held`, all that its last turn left.

    `root` begins its chains; `tags` are known ones of a beginning of `held`. `resident_len`:
    positions whose KV nothing has taken since.
    """

    session_id: SessionId
    salt: str
    held: tuple[int, ...]
    root: int
    tags: list[int] = field(default_factory=list)
    live: EngineTurn | None = None
    resident_len: int = 0


@dataclass(slots=True, eq=False)
class EngineTurn:
    """One turn as the engine's counterpart knows it.

    `refusals`: codes with which it may fail at once, `must_fail` when it has to. `wish`: a cancel,
    stop or close that the engine was given, and how many outputs it keeps. `faults`: codes by
    which it may fail later.
    """

    command: SubmitTurn
    session: EngineSession | None
    prompt: tuple[int, ...]
    truth: Truth
    refusals: frozenset[str] = frozenset()
    must_fail: bool = False
    wish: tuple[FinishReason, int | None] | None = None
    faults: set[str] = field(default_factory=set)
    outputs: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_starts: int = 0
    end: TurnFinished | TurnFailed | None = None

    @property
    def stage(self) -> str:
        """Where it stands, as far as the engine has said."""
        if self.num_starts == 0:
            return "waiting"
        return "decode" if self.outputs else "prefill"


@dataclass(frozen=True, slots=True)
class Bounds:
    """`max_turn_len`: the longest context a turn may reach. `forgets`: whether layers do.
    `page_size`: of every pool, in tokens."""

    max_turn_len: int
    forgets: bool
    page_size: int


class EngineHistory:
    """Checks every event as it is heard, and after every step that nothing owed is missing.

    Every method that checks raises `Broken`. `reached` counts what was seen to happen.
    """

    def __init__(
        self, settings: EngineConfig, model: EchoModel, bounds: Bounds, reached: Counter[str]
    ) -> None:
        self._settings = settings
        self._model = model
        self._bounds = bounds
        self._owed: Counter[Hashable] = Counter()
        self._live_before: dict[int, set[TurnId]] = {}
        # Pinned sessions, and whether they were not refused.
        self._pinned: dict[SessionId, bool] = {}
        self.drafts = EngineDrafts(model, reached)
        self.sessions: dict[SessionId, EngineSession] = {}
        self.turns: dict[TurnId, EngineTurn] = {}
        self.live: dict[TurnId, EngineTurn] = {}
        self.ended: list[TurnId] = []
        self.reached = reached

    def truth_of(self, turn_id: TurnId) -> Truth:
        """What the cells of a turn or a draft hold, and what it says."""
        if turn_id in self.drafts:
            return self.drafts.truth_of(turn_id)
        return self.turns[turn_id].truth

    def salt_of(self, turn_id: TurnId) -> str:
        """The namespace of a turn or a draft."""
        if turn_id in self.drafts:
            return self.drafts.salt_of(turn_id)
        session = self.turns[turn_id].session
        assert session is not None, "a turn without a session does not run"
        return session.salt

    def doubt(self) -> None:
        """Memory is said to be wrong in this step, which is no fault of the engine."""
        for turn in self.live.values():
            turn.faults |= set(DOUBT_FAILURES)

    @property
    def num_doubts(self) -> int:
        """Times that memory was said to be wrong, in all lives of the engine."""
        return sum(self.reached[f"fault {site}"] for site in DOUBT_SITES)

    # Commands

    def told(self, commands: Sequence[EngineCommand], *, has_results: bool) -> None:
        """The engine is about to obey these commands, after it has taken in results if any."""
        self.drafts.begin_step(has_results=has_results)
        # Results end turns, and a session that is not opened refuses its first: both make room.
        is_certain = not has_results and not any(_is_pinned(command) for command in commands)
        for command in commands:
            match command:
                case OpenSession():
                    self._open(command)
                case SubmitTurn():
                    self._submit(command, is_certain=is_certain)
                case DraftInput():
                    self._draft(command)
                case DropDraft(session_id=session_id):
                    self.drafts.drop(session_id)
                case CancelTurn(turn_id=turn_id, num_outputs=num_outputs):
                    self._wish(turn_id, FinishReason.CANCELLED, num_outputs)
                case StopTurn(turn_id=turn_id, num_outputs=num_outputs):
                    self._wish(turn_id, FinishReason.STOP, num_outputs)
                case CoolSession(session_id=session_id):
                    self.drafts.drop(session_id)  # nothing is said of it any more
                case CloseSession(session_id=session_id):
                    self._close(session_id)
                case FlushCache(request_id=request_id):
                    self._owed["flush", request_id] += 1
                    self._live_before[request_id] = set(self.live)
                case ReportMemory(request_id=request_id):
                    self._owed["report", request_id] += 1
                case _:
                    pass

    def _open(self, command: OpenSession) -> None:
        session_id = command.session_id
        if session_id in self.sessions:
            self._owed["refused", session_id] += 1
            return
        self.sessions[session_id] = EngineSession(
            session_id, command.tenant_salt, command.tokens, name_value(command.tenant_salt)
        )
        if command.pinned:
            self._pinned[session_id] = True

    def _submit(self, command: SubmitTurn, *, is_certain: bool) -> None:
        if command.turn_id in self.live:
            self.reached["duplicate submit"] += 1
            return
        session = self.sessions.get(command.session_id)
        held = session.held if session is not None else ()
        prompt = held[: command.base_len] + command.tokens
        seed = command.sampling.seed or 0
        root = session.root if session is not None else 0
        known = session.tags[: command.base_len] if session is not None else ()
        truth = Truth(self._model, root, prompt, seed=seed, known=known)
        turn = EngineTurn(command, session, prompt, truth)
        self.reached["turn"] += 1
        turn.refusals = frozenset(filter(None, (self._refusal(command, session),)))
        turn.must_fail = bool(turn.refusals)
        if self._is_full():
            turn.refusals |= {"server_busy"}
            turn.must_fail |= is_certain
        self.turns[command.turn_id] = turn
        self.live[command.turn_id] = turn
        if turn.must_fail:
            self._owed["end", command.turn_id] = 1
        elif session is not None:
            session.live = turn
            if not turn.refusals:
                self.drafts.replace(session.session_id)

    def _draft(self, command: DraftInput) -> None:
        session, base_len = self.sessions.get(command.session_id), command.base_len
        is_whole = session is not None and session.live is None and base_len <= len(session.held)
        fits = 0 < base_len + len(command.tokens) <= self._bounds.max_turn_len
        self.drafts.submit(command, session, is_refused=not (is_whole and fits))
        if session is None or not is_whole or not fits or base_len == len(session.held):
            return
        # The history was rewound since the engine heard of it, and is cut to where that led.
        self.reached["draft behind a rewind"] += 1
        session.held, session.tags = session.held[:base_len], session.tags[:base_len]
        kept_len = 0 if self._bounds.forgets else base_len - base_len % self._bounds.page_size
        session.resident_len = min(session.resident_len, kept_len)

    def _refusal(self, command: SubmitTurn, session: EngineSession | None) -> str | None:
        """The code with which a turn is refused, if it is not because of others."""
        if session is None:
            return "session_not_found"
        if session.live is not None and session.live.wish is None:
            return "session_busy"
        if command.base_len > len(session.held) + _FAR_BEYOND:
            return "internal_inconsistency"
        tokens = command.tokens
        if tokens and (min(tokens) < 0 or max(tokens) >= self._settings.vocab_size):
            return "invalid_request"
        needed = command.base_len + len(tokens) + min(1, command.sampling.max_tokens)
        return "context_too_long" if needed > self._bounds.max_turn_len else None

    def _is_full(self) -> bool:
        num_live = sum(turn.wish is None and not turn.must_fail for turn in self.live.values())
        return num_live >= self._settings.max_waiting + self._settings.max_running

    def _wish(self, turn_id: TurnId, reason: FinishReason, num_outputs: int | None) -> None:
        turn = self.live.get(turn_id)
        if turn is None:
            self.reached["late command"] += turn_id in self.turns
            return
        if turn.wish is not None or turn.must_fail:
            return
        turn.wish = (reason, num_outputs)
        self._owed["end", turn_id] = 1
        self.reached[f"{reason.value} in {turn.stage}"] += 1

    def _close(self, session_id: SessionId) -> None:
        self._owed["gone", session_id] += 1
        self.drafts.forget(session_id)
        session = self.sessions.pop(session_id, None)
        if session is None:
            self.reached["close of a closed session"] += 1
            return
        turn = session.live
        if turn is None:
            self.reached["close idle"] += 1
            return
        self.reached[f"close in {turn.stage}"] += 1
        if turn.wish is None:
            turn.wish = (FinishReason.CANCELLED, None)
        self._owed["end", turn.command.turn_id] = 1

    # Events

    def heard(self, events: Iterable[EngineEvent]) -> None:
        """Check the events of one step, and that it left nothing owing."""
        for event in one_by_one(events):
            match event:
                case (
                    TurnStarted()
                    | PrefillProgressed()
                    | PromptLogprobsComputed()
                    | TokensProduced()
                    | TurnFinished()
                    | TurnFailed()
                ):
                    self._on_turn(event)
                case InputDrafted():
                    self.drafts.on_drafted(event)
                case SessionCooled(session_id=session_id):
                    if session_id in self.sessions:
                        self.sessions[session_id].resident_len = 0
                case SessionRefused(session_id=session_id, code=code):
                    self._on_refused(session_id, code)
                case SessionGone(session_id=session_id):
                    self._pay("gone", session_id)
                case CacheFlushed():
                    self._on_flushed(event)
                case MemoryReported():
                    self._on_report(event)
                case EngineStats(check_violations=found):
                    if found > self.num_doubts:
                        raise Broken(Layer.AUDIT, f"the engine's checker found {found} violations")
                case _:
                    pass
        if self._owed:
            raise Broken(Layer.PROTOCOL, f"the step owes {sorted(map(str, self._owed))}")

    def _on_turn(self, event: TurnEvent) -> None:
        turn = self.live.get(event.turn_id)
        if turn is None:
            known = "has ended" if event.turn_id in self.turns else "is unknown"
            raise Broken(Layer.PROTOCOL, f"{event} of a turn that {known}")
        match event:
            case TurnStarted():
                self._on_started(turn, event)
            case PrefillProgressed(computed=computed, total=total):
                if not 0 < computed < total == len(turn.prompt):
                    raise Broken(Layer.SHADOW, f"progress of a prompt: {event}")
            case PromptLogprobsComputed(logprobs=logprobs):
                self._on_scored(turn, logprobs)
            case TokensProduced():
                self._on_tokens(turn, event)
            case TurnFinished():
                self._on_finished(turn, event)
            case TurnFailed():
                self._on_failed(turn, event)
            case _:
                assert_never(event)

    def _pay(self, *debt: Hashable) -> None:
        if self._owed[debt] < 1:
            raise Broken(Layer.PROTOCOL, f"nobody asked for {debt}")
        self._owed[debt] -= 1
        if not self._owed[debt]:
            del self._owed[debt]

    def _on_started(self, turn: EngineTurn, event: TurnStarted) -> None:
        if event.prompt_tokens != len(turn.prompt):
            raise Broken(Layer.SHADOW, f"{event}, the prompt has {len(turn.prompt)} tokens")
        if not 0 <= event.cached_tokens < len(turn.prompt):
            raise Broken(Layer.SHADOW, f"{event}: a forward needs a query")
        session, command = turn.session, turn.command
        assert session is not None, "a refused turn does not start"
        turn.num_starts += 1
        if turn.num_starts > 1:
            self.reached["admitted again"] += 1
            return
        self.drafts.on_started(event, session.session_id)
        kept_len = min(session.resident_len, command.base_len)
        # What a rewind cuts inside a page that the tree owns is given up with that page.
        is_rewind = command.base_len < len(session.held) or not command.tokens
        if not is_rewind and command.sampling.prompt_logprobs_from is None:
            self.reached["went on from kept KV"] += kept_len > 0
            if event.cached_tokens < kept_len:
                raise Broken(Layer.SHADOW, f"{event}: {kept_len} positions were kept")

    def _on_scored(self, turn: EngineTurn, logprobs: tuple[TokenLogprob, ...]) -> None:
        start, tags = turn.command.sampling.prompt_logprobs_from, turn.truth.tags
        if start is None or not logprobs:
            raise Broken(Layer.PROTOCOL, "prompt logprobs that nobody asked for")
        start += len(turn.prompt_logprobs)
        turn.prompt_logprobs.extend(logprobs)
        expected = [
            TokenLogprob(token, score_of(tags[position - 1], token) if position else None)
            for position, token in enumerate(turn.prompt)
            if start <= position < start + len(logprobs)
        ]
        if list(logprobs) != expected:
            raise Broken(Layer.SHADOW, f"prompt logprobs {logprobs} are not {expected}")
        self.reached["prompt scored"] += len(turn.prompt_logprobs) > 1

    def _on_tokens(self, turn: EngineTurn, event: TokensProduced) -> None:
        if turn.num_starts == 0 or not event.token_ids:
            raise Broken(Layer.PROTOCOL, f"{event} before the turn started, or of nothing")
        turn.outputs.extend(event.token_ids)
        length = len(turn.prompt) + len(turn.outputs)
        if turn.truth.context(length)[len(turn.prompt) :] != turn.outputs:
            expected = turn.truth.context(length)[len(turn.prompt) :]
            raise Broken(
                Layer.SHADOW, f"{turn.command.turn_id} said {turn.outputs}, alone {expected}"
            )

    def _on_finished(self, turn: EngineTurn, event: TurnFinished) -> None:
        self._end(turn, event)
        self.drafts.replace(event.session_id)
        wish, num_said = turn.wish, len(turn.outputs)
        self.reached[f"finished {event.reason.value}"] += 1
        self.reached["resumed after a retraction"] += event.num_retractions > 0 and num_said > 0
        is_natural = event.matched_token is not None or event.reason is FinishReason.LENGTH
        if is_natural:
            self._check_natural_end(turn, event)
            kept_len = len(turn.prompt) + num_said
        elif wish is None or event.reason is not wish[0]:
            raise Broken(Layer.PROTOCOL, f"{event}, nobody asked for it")
        elif wish[1] is not None and turn.num_starts > event.num_retractions:
            kept_len = len(turn.prompt) + min(wish[1], num_said)
        else:
            kept_len = turn.command.base_len  # a turn that waits holds nothing
        if event.history_len != kept_len or event.prompt_tokens != len(turn.prompt):
            raise Broken(Layer.SHADOW, f"{event}, {kept_len} of {len(turn.prompt)} and outputs")
        if event.num_outputs != max(0, kept_len - len(turn.prompt)):
            raise Broken(Layer.SHADOW, f"{event} counts its outputs wrong")
        if turn.session is not None:
            resident_len = 0 if is_natural else self._undone_len(turn, event)
            turn.session.held = (turn.prompt + tuple(turn.outputs))[:kept_len]
            turn.truth.reach(kept_len)
            turn.session.tags = turn.truth.tags[:kept_len]
            if is_natural:
                resident_len = kept_len - 1
            elif event.num_retractions == 0 and num_said > 0 and kept_len >= len(turn.prompt):
                num_cut = len(turn.prompt) + num_said - kept_len
                resident_len = self._kept_len(kept_len, num_cut)
            turn.session.resident_len = resident_len

    def _kept_len(self, kept_len: int, num_cut: int) -> int:
        """What a session holds whose turn was cut off when it had said something: everything before
        an output is computed by then, except after a retraction."""
        if num_cut and self._bounds.forgets:
            return 0  # a window may have passed the cut, and the session goes on from before
        if num_cut and self._settings.speculation.num_drafts:
            # Accepted drafts were published with the prompt, and may be another session's by now.
            return kept_len - 1 - (kept_len - 1) % self._bounds.page_size
        return kept_len - 1

    def _undone_len(self, turn: EngineTurn, event: TurnFinished) -> int:
        """What a session holds whose turn was undone: what it held before. But a page that the
        turn began in and that was published since, or matched, may be another session's too."""
        session, command = turn.session, turn.command
        assert session is not None
        is_undone = event.history_len == len(session.held) == command.base_len
        scores = command.sampling.prompt_logprobs_from is not None
        if not (is_undone and command.tokens) or scores or event.num_retractions:
            return 0
        self.reached["turn undone"] += session.resident_len > 0
        if not turn.outputs and event.cached_tokens <= session.resident_len:
            return session.resident_len
        return session.resident_len - session.resident_len % self._bounds.page_size

    def _check_natural_end(self, turn: EngineTurn, event: TurnFinished) -> None:
        sampling, outputs = turn.command.sampling, turn.outputs
        stops = set(sampling.stop_token_ids)
        stops |= set() if sampling.ignore_eos else set(self._settings.eos_token_ids)
        first = max(0, sampling.min_tokens - 1)
        at_stop = [i for i, token in enumerate(outputs) if i >= first and token in stops]
        start = sampling.prompt_logprobs_from
        num_wanted = 0 if start is None else max(0, len(turn.prompt) - start)
        if len(turn.prompt_logprobs) != num_wanted:
            raise Broken(Layer.PROTOCOL, f"{event} without all its prompt logprobs")
        if event.reason is FinishReason.STOP:
            if at_stop != [len(outputs) - 1] or event.matched_token != outputs[-1]:
                raise Broken(Layer.SHADOW, f"{event} after {outputs} with stops {stops}")
            return
        room = self._bounds.max_turn_len - len(turn.prompt)
        if at_stop or len(outputs) != min(sampling.max_tokens, room):
            raise Broken(Layer.SHADOW, f"{event} after {outputs}, room for {room}, stops {stops}")
        self.reached["context full"] += room < sampling.max_tokens

    def _on_failed(self, turn: EngineTurn, event: TurnFailed) -> None:
        self._end(turn, event)
        self.reached[f"failed {event.code}"] += 1
        refusals = turn.refusals if turn.num_starts == 0 else frozenset()
        if self._pinned.get(event.session_id) is False:
            refusals |= {"session_not_found"}
        faults = turn.faults | ({"quota_exceeded"} if event.session_id in self._pinned else set())
        faults |= {"server_busy"} if self.num_doubts or self.reached["tier: disk silent"] else set()
        if event.code not in refusals | faults:
            layer = Layer.PAIR if event.code == "internal_inconsistency" else Layer.SHADOW
            raise Broken(layer, f"{event}, allowed were {sorted(refusals | faults)}")
        if event.code in refusals or turn.session is None:
            return
        self.drafts.replace(event.session_id)  # it was not refused, though it might have been
        if event.history_len != turn.command.base_len:
            raise Broken(Layer.SHADOW, f"{event} changed the history")
        turn.session.held, turn.session.resident_len = turn.session.held[: event.history_len], 0

    def _end(self, turn: EngineTurn, event: TurnFinished | TurnFailed) -> None:
        """The one way out of `live`."""
        if turn.must_fail and not isinstance(event, TurnFailed):
            raise Broken(Layer.PROTOCOL, f"{event}, it had to be refused: {turn.refusals}")
        turn_id = turn.command.turn_id
        if event.session_id != turn.command.session_id:
            raise Broken(Layer.PROTOCOL, f"{event} is not of session {turn.command.session_id}")
        turn.end = event
        del self.live[turn_id]
        self._owed.pop(("end", turn_id), None)
        self.ended.append(turn_id)
        if turn.session is not None and turn.session.live is turn:
            turn.session.live = None

    def _on_refused(self, session_id: SessionId, code: str) -> None:
        if self._owed["refused", session_id]:
            self._pay("refused", session_id)
            return
        if session_id not in self._pinned or code != "quota_exceeded":
            raise Broken(Layer.PROTOCOL, f"{session_id} was refused: {code}")
        self.reached["pin refused"] += 1
        self._pinned[session_id] = False
        self.drafts.refuse_all(session_id)
        self.sessions.pop(session_id, None)

    def _on_flushed(self, event: CacheFlushed) -> None:
        self._pay("flush", event.request_id)
        live = self._live_before.pop(event.request_id) & set(self.live)
        if event.done is bool(live):
            raise Broken(Layer.PROTOCOL, f"{event} while {sorted(live)} were live")
        self.reached["flush done" if event.done else "flush refused"] += 1
        for session in self.sessions.values():
            session.resident_len *= not event.done

    def _on_report(self, event: MemoryReported) -> None:
        self._pay("report", event.request_id)
        self.reached["report"] += 1
        if event.checks.violations > self.num_doubts:
            raise Broken(Layer.AUDIT, f"the engine found: {'; '.join(event.checks.recent)}")
        for name, pool in event.pools.items():
            parts = [pool.free, pool.reserved, pool.tree_evictable, pool.tree_protected]
            parts += [pool.session_held, pool.active, pool.fenced, pool.spill, pool.quarantine]
            if sum(parts) != pool.pages:
                raise Broken(Layer.LEDGER, f"the report of {name} does not sum: {pool}")


def _is_pinned(command: EngineCommand) -> bool:
    return isinstance(command, OpenSession) and command.pinned
