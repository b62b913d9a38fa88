"""A simulation as people read it: one line per engine step, one per operation of the outside."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cache.ledger import Accounts
from session_server.core.batch import Batch, BatchRow, RowResult, StepResult
from session_server.core.commands import (
    CancelTurn,
    CloseSession,
    DraftInput,
    DropDraft,
    EngineCommand,
    OpenSession,
    StopTurn,
    SubmitTurn,
)
from session_server.core.events import (
    EngineEvent,
    EngineStats,
    InputDrafted,
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
from tests.sim.trace import Op

LEGEND: Final = """\
  step  settled | told | launched | pages | said
  settled   #7 t1:2 t3:nan     forward 7 came back: t1 got 2 tokens, t3 NaN; #7 error: all failed
  told      s1+6 new session of 6 tokens   t1=s1@6+3 turn: 6 tokens of s1, then 3 new
            t1x2 cancel, 2 outputs stay (x-: nothing)   t1.2 stop after 2   s1x close
            d1~s1@6+3 draft of what a turn would be   s1~ its draft is dropped
  launched  #9 t1@12+1 t3@4+8? forward 9: t1 one position from 12, t3 eight (? samples, d2 drafts)
  pages     f free  e evictable  p protected by a lock  h held by idle sessions  a active
  said      t1> started  t1+2 two tokens  t1! ended (what, history length)  s1- cooled  s1x gone
            d1~9 draft computed up to 9
  >         what clients, the network or the clock did"""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one engine step was given and gave."""

    number: int
    results: Sequence[StepResult]
    commands: Sequence[EngineCommand]
    batch: Batch | None
    accounts: Accounts
    events: Sequence[EngineEvent]


class Story:
    """The last `num_lines` lines. Ids the server made up are renamed in order of appearance."""

    def __init__(self, num_lines: int) -> None:
        self._lines: deque[str] = deque(maxlen=num_lines)
        self._names: dict[str, str] = {}
        self._launches: dict[int, Batch] = {}

    @property
    def lines(self) -> list[str]:
        """Oldest first."""
        return list(self._lines)

    def op(self, op: Op) -> None:
        """An operation of the outside; what only moves the engine shows in its steps."""
        if op["op"] not in {"step", "execute"}:
            rest = {name: value for name, value in op.items() if name != "op"}
            self._lines.append(f"      > {op['op']} {json.dumps(rest)}"[:240])

    def step(self, record: StepRecord) -> None:
        """A step of the engine."""
        if record.batch is not None:
            self._launches[record.batch.step] = record.batch
        parts = [
            " ".join(map(self._result, record.results)),
            " ".join(map(self._command, record.commands)),
            self._batch(record.batch) if record.batch is not None else "",
            _pages(record.accounts),
            " ".join(filter(None, map(self._event, one_by_one(record.events)))),
        ]
        self._lines.append(f"{record.number:6d}  {' | '.join(parts)}")

    def _name(self, given: str) -> str:
        """Short names stay; a long one was drawn at random."""
        if len(given) < 12:
            return given
        if given not in self._names:
            kind = "S" if given.startswith("s_") else "T"
            self._names[given] = f"{kind}{len(self._names) + 1}"
        return self._names[given]

    def _result(self, result: StepResult) -> str:
        batch = self._launches.pop(result.step)
        if result.error is not None:
            return f"#{result.step} error"
        if batch.probe is not None:
            return f"#{result.step} probe {'holds' if result.probe_holds else 'fails'}"
        pairs = zip(batch.rows, result.row_results(), strict=True)
        rows = (f"{self._name(row.turn_id)}:{_outcome(outcome)}" for row, outcome in pairs)
        return f"#{result.step} {' '.join(rows)}"

    def _command(self, command: EngineCommand) -> str:
        match command:
            case OpenSession(session_id=session_id, tokens=tokens):
                return f"{self._name(session_id)}+{len(tokens)}"
            case SubmitTurn():
                where = f"{self._name(command.session_id)}@{command.base_len}"
                return f"{self._name(command.turn_id)}={where}+{len(command.tokens)}"
            case DraftInput():
                where = f"{self._name(command.session_id)}@{command.base_len}"
                return f"{self._name(command.draft_id)}~{where}+{len(command.tokens)}"
            case DropDraft(session_id=session_id):
                return f"{self._name(session_id)}~"
            case CancelTurn(turn_id=turn_id, num_outputs=num_outputs):
                return f"{self._name(turn_id)}x{'-' if num_outputs is None else num_outputs}"
            case StopTurn(turn_id=turn_id, num_outputs=num_outputs):
                return f"{self._name(turn_id)}.{num_outputs}"
            case CloseSession(session_id=session_id):
                return f"{self._name(session_id)}x"
            case _:
                return type(command).__name__.lower()

    def _batch(self, batch: Batch) -> str:
        if batch.probe is not None:
            return f"#{batch.step} probe row {batch.probe.row}@{batch.probe.start}"
        return f"#{batch.step} {' '.join(map(self._row, batch.rows))}"

    def _row(self, row: BatchRow) -> str:
        drafts = f"d{row.num_drafts}" if row.num_drafts else ""
        sample = "?" if row.sample else ""
        return f"{self._name(row.turn_id)}@{row.start}+{row.num_tokens}{drafts}{sample}"

    def _event(self, event: EngineEvent) -> str:
        match event:
            case TurnStarted(turn_id=turn_id, cached_tokens=cached_tokens):
                return f"{self._name(turn_id)}>{cached_tokens}"
            case TokensProduced(turn_id=turn_id, token_ids=token_ids):
                return f"{self._name(turn_id)}+{len(token_ids)}"
            case TurnFinished(turn_id=turn_id, reason=reason, history_len=history_len):
                return f"{self._name(turn_id)}!{reason.value},{history_len}"
            case TurnFailed(turn_id=turn_id, code=code):
                return f"{self._name(turn_id)}!{code}"
            case InputDrafted(draft_id=draft_id, processed=processed):
                return f"{self._name(draft_id)}~{processed}"
            case PrefillProgressed() | PromptLogprobsComputed() | EngineStats():
                return ""
            case _:
                return self._session_event(event)

    def _session_event(self, event: EngineEvent) -> str:
        match event:
            case SessionCooled(session_id=session_id):
                return f"{self._name(session_id)}-"
            case SessionGone(session_id=session_id):
                return f"{self._name(session_id)}x"
            case SessionRefused(session_id=session_id, code=code):
                return f"{self._name(session_id)}!{code}"
            case _:
                return type(event).__name__.lower()


def wrapped(lines: Iterable[str], width: int) -> list[str]:
    """Lines cut to a terminal's width."""
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _outcome(outcome: RowResult) -> str:
    return str(len(outcome.token_ids)) if outcome.finite else "nan"


def _pages(accounts: Accounts) -> str:
    counts = {
        "f": accounts.free,
        "e": accounts.tree_evictable,
        "p": accounts.tree_protected,
        "h": accounts.session_held,
        "a": accounts.active,
        "q": accounts.quarantine,
    }
    return " ".join(f"{name}{count}" for name, count in counts.items() if count)
