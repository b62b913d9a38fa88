"""What a client was told, and whether the server's history can be that: the checker.

The idea is Jepsen's: clients write down what they asked and what they heard, with answers that
never came as *unknown*; afterwards a small sequential model says whether any order of execution
explains it all. Here the server publishes its order, the journal, so the check is linear: replay
the journal through the model, and hold every client's word against it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Frame = Mapping[str, Any]

ENDS = {"turn.completed": "completed", "turn.cancelled": "cancelled", "turn.failed": "failed"}


class End(NamedTuple):
    """How a turn ended, as every surface tells it."""

    status: str
    text: str
    input_tokens: int
    output_tokens: int

    @classmethod
    def of_frame(cls, frame: Frame) -> End:
        """From a terminal frame."""
        usage, text = frame["usage"], frame["item"]["content"] if "item" in frame else ""
        return cls(ENDS[frame["type"]], text, usage["input_tokens"], usage["output_tokens"])


@dataclass
class Ask:
    """One turn as its client knows it. `said` and `heard` are moments of the client's own clock;
    `heard` None: the end is unknown, and the turn may have run at any time or never."""

    turn_id: str
    body: dict[str, Any]
    said: int
    heard: int | None = None
    end: End | None = None
    pieces: dict[int, str] = field(default_factory=dict)
    cancel: dict[str, Any] | None = None


@dataclass
class SessionLog:
    """Everything one client said and heard about its session."""

    session_id: str = ""
    epoch: str = ""
    asks: dict[str, Ask] = field(default_factory=dict)
    ends_heard: dict[int, tuple[str, str]] = field(default_factory=dict)
    _moment: int = 0

    def ask(self, turn_id: str, body: dict[str, Any]) -> Ask:
        """The client says it wants this turn."""
        self._moment += 1
        self.asks[turn_id] = Ask(turn_id, body, self._moment)
        return self.asks[turn_id]

    def hear(self, turn_id: str, end: End) -> list[str]:
        """The client is told how a turn ended; gives what contradicts what it was told before."""
        ask = self.asks[turn_id]
        if ask.end is not None:
            return [] if ask.end == end else [f"{turn_id}: told {ask.end}, then {end}"]
        self._moment += 1
        ask.heard, ask.end = self._moment, end
        return []

    @property
    def unknown(self) -> list[Ask]:
        """Turns whose end was not heard."""
        return [ask for ask in self.asks.values() if ask.end is None]


class SessionModel:
    """A session as a sequential machine: what the turns, one after the other, must have left."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.kept: list[tuple[str, str, int]] = []

    def run(self, end: Frame, body: Mapping[str, Any]) -> Iterator[str]:
        """One turn has run, from its terminal frame; says what cannot be."""
        turn_id, usage = end["turn_id"], end["usage"]
        if usage["input_tokens"] > 0 and "input_ids" in body:  # else it ended before it began
            expected = self.num_tokens + len(body["input_ids"])
            if usage["input_tokens"] != expected:
                yield f"{turn_id}: context of {usage['input_tokens']} tokens, not {expected}"
        is_kept = end["type"] == "turn.completed" or end.get("kept_partial", False)
        if is_kept:
            self.num_tokens = usage["input_tokens"] + usage["output_tokens"]
            self.kept.append((turn_id, end["item"]["content"], self.num_tokens))
        elif "item" in end and end["item"]["content"]:
            yield f"{turn_id}: nothing stays of it, but {end['item']['content']!r}"


def violations(
    log: SessionLog, journal: Sequence[Frame], items: Sequence[Frame], num_tokens: int
) -> Iterator[str]:
    """What the server's account and the client's cannot both be; nothing when all is well.

    `journal`: every frame from seq 1 on, of a session that is idle; `items` and `num_tokens`: its
    history as REST shows it.
    """
    yield from _journal_is_contiguous(journal)
    turns = _by_turn(journal)
    for turn_id, frames in turns.items():
        yield from _turn_is_whole(turn_id, frames)
    yield from (f"{turn_id}: nobody asked for it" for turn_id in turns if turn_id not in log.asks)
    model = SessionModel()
    for frame in journal:
        if _is_end_of(log, frame):
            yield from model.run(frame, log.asks[frame["turn_id"]].body)
    yield from _history_is(model, items, num_tokens)
    yield from _client_was_told_the_truth(log, journal, turns)
    yield from _order_is_real(log, journal)


def _journal_is_contiguous(journal: Sequence[Frame]) -> Iterator[str]:
    last_seq = 0
    for frame in journal:
        # A delta may stand for several, and then carries the number of the last.
        is_next = frame["seq"] == last_seq + 1
        if not is_next and not (frame["type"] == "turn.delta" and frame["seq"] > last_seq):
            yield f"{frame['type']} {frame['seq']} after {last_seq}"
        last_seq = frame["seq"]


def _by_turn(journal: Sequence[Frame]) -> dict[str, list[Frame]]:
    turns: dict[str, list[Frame]] = defaultdict(list)
    for frame in journal:
        if "turn_id" in frame:
            turns[frame["turn_id"]].append(frame)
    return turns


def _turn_is_whole(turn_id: str, frames: Sequence[Frame]) -> Iterator[str]:
    kinds = [frame["type"] for frame in frames]
    if kinds[0] != "turn.created" or kinds.count("turn.created") != 1:
        yield f"{turn_id}: begins {kinds[:3]}"
    if sum(kind in ENDS for kind in kinds) != 1 or kinds[-1] not in ENDS:
        yield f"{turn_id}: ends {kinds[-3:]}"
        return
    end = frames[-1]
    deltas = [frame for frame in frames if frame["type"] == "turn.delta"]
    text, num_tokens = "".join(d["text"] for d in deltas), sum(d["n"] for d in deltas)
    is_kept = end["type"] == "turn.completed" or end.get("kept_partial", False)
    if is_kept and (text, num_tokens) != (end["item"]["content"], end["usage"]["output_tokens"]):
        yield f"{turn_id}: deltas say {text!r}, the end {end['item']['content']!r}"


def _history_is(model: SessionModel, items: Sequence[Frame], num_tokens: int) -> Iterator[str]:
    if num_tokens != model.num_tokens:
        yield f"the history has {num_tokens} tokens, its turns left {model.num_tokens}"
    answers = [item for item in items if item["role"] == "assistant"]
    shown = [(item["turn_id"], item["content"], item["end_len"]) for item in answers]
    if shown != model.kept:
        yield f"the history shows {shown}, its turns left {model.kept}"


def _client_was_told_the_truth(
    log: SessionLog, journal: Sequence[Frame], turns: Mapping[str, Sequence[Frame]]
) -> Iterator[str]:
    by_seq = {frame["seq"]: (frame["type"], frame.get("turn_id", "")) for frame in journal}
    for seq, heard in log.ends_heard.items():
        if by_seq.get(seq) != heard:
            yield f"frame {seq} was {heard}, the journal says {by_seq.get(seq)}"
    for ask in log.asks.values():
        frames = turns.get(ask.turn_id, ())
        ends = [End.of_frame(frame) for frame in frames if frame["type"] in ENDS]
        if ask.end is not None and ends != [ask.end]:
            yield f"{ask.turn_id}: told {ask.end}, the journal says {ends}"
        text = "".join(frame["text"] for frame in frames if frame["type"] == "turn.delta")
        pieces = "".join(piece for _, piece in sorted(ask.pieces.items()))
        # What came over all its connections, by seq, is the beginning of what was said.
        if not text.startswith(pieces):
            yield f"{ask.turn_id}: heard {pieces!r} of {text!r}"


def _order_is_real(log: SessionLog, journal: Sequence[Frame]) -> Iterator[str]:
    """A turn asked for after another's end was heard must not have run before it."""
    ran = [log.asks[frame["turn_id"]] for frame in journal if _is_end_of(log, frame)]
    for index, first in enumerate(ran):
        for then in ran[index + 1 :]:
            if then.heard is not None and then.heard < first.said:
                yield f"{first.turn_id} ran before {then.turn_id}, but was asked for after its end"


def _is_end_of(log: SessionLog, frame: Frame) -> bool:
    return frame["type"] in ENDS and frame["turn_id"] in log.asks
