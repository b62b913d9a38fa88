"""Estimates of host memory, held against what the interpreter says it keeps."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import get_args

import msgspec
import pytest

from session_server.core.events import TurnTimings
from session_server.core.sampling import Grammar, SamplingParams, TokenLogprob
from session_server.core.session_events import (
    ChatInput,
    ConversationItem,
    ItemEdited,
    Message,
    Outcome,
    SessionEntry,
    SessionForked,
    SessionRewound,
    SessionUpdated,
    TextInput,
    TextOptions,
    TokenInput,
    TokenUsage,
    TurnCompleted,
    TurnDelta,
    TurnFailedEntry,
    TurnInput,
    TurnProgress,
    TurnRequest,
)
from session_server.sessions.backlog import Backlog
from session_server.sessions.ended_turns import RECORD_BYTES, EndedTurns
from session_server.sessions.footprint import entry_bytes, request_bytes
from session_server.sessions.journal import Journal, JournalEntry, JournalLimits
from session_server.sessions.kept_conversations import (
    ConversationEntry,
    KeptConversation,
    KeptConversations,
)
from session_server.sessions.prompt import Prompt
from session_server.sessions.quotas import QuotaLimits, Quotas
from session_server.sessions.record_log import RecordLog
from session_server.sessions.transcript import Transcript
from session_server.sessions.turn import SessionTurn, TurnCourse
from session_server.sessions.views import HistoryModes
from tests.sessions.world import OWNER, World, turn

ALIGNMENT = 16
"""CPython's small object allocator rounds up to it."""

EMPTY_TABLE = 192
"""What the first record costs besides; part of `SESSION_BYTES`."""

SAID = Message("assistant", "")

WITHIN = (0.75, 1.4)
"""Estimate over what is there."""


def kept_bytes(root: object, *, but: Iterable[object] = ()) -> int:
    """Bytes of everything that `root` keeps alive, without what others keep as well (`but`)."""
    seen = {id(each) for each in but}
    total, left = 0, [root]
    while left:
        found = left.pop()
        is_shared = isinstance(found, type | FunctionType | ModuleType | bool | None)
        is_small = isinstance(found, int) and -5 <= found <= 256
        if is_shared or is_small or id(found) in seen:
            continue
        seen.add(id(found))
        total += -(-sys.getsizeof(found) // ALIGNMENT) * ALIGNMENT
        left += gc.get_referents(found)
        if isinstance(found, msgspec.Struct):  # one without `gc` names no referents
            left += [getattr(found, name) for name in found.__struct_fields__]
    return total


def fresh(num_tokens: int) -> tuple[int, ...]:
    """Token ids of the small vocabulary that nobody else holds, as they come from a decoder."""
    return tuple(int(str(300 + index % 100)) for index in range(num_tokens))


def scores(num_tokens: int, num_tops: int) -> tuple[TokenLogprob, ...]:
    return tuple(
        msgspec.convert(
            [t, -0.5 * t, [[t + i, -0.1 * t * i] for i in range(num_tops)]], TokenLogprob
        )
        for t in fresh(num_tokens)
    )


def outcome(num_tokens: int = 0, num_scored: int = 0, num_tops: int = 0) -> Outcome:
    usage = TokenUsage(int("1000"), int("2000"), int("3000"))
    timings = TurnTimings(
        queue_ms=1.5, prefill_ms=2.5, ttft_ms=3.5, decode_ms=4.5, forward_ms=5.5, num_steps=600
    )
    text = "word " * num_tokens
    logprobs, prompt_logprobs = scores(num_tokens, num_tops), scores(num_scored, num_tops)
    return Outcome("i_1", text, fresh(num_tokens), usage, timings, logprobs, prompt_logprobs)


ENTRIES = {
    "progress": TurnProgress("t", int("500"), int("501"), int("502")),
    "one token": TurnDelta("t", "i", "word ", fresh(1)),
    "many tokens": TurnDelta("t", "i", "word " * 50, fresh(50)),
    "a scored token": TurnDelta("t", "i", "word ", fresh(1), scores(1, 20)),
    "wide text": TurnDelta("t", "i", "\N{OWL}" * 1000, fresh(1)),
    "end": TurnCompleted("t", "stop", int("5000"), outcome(200)),
    "scored end": TurnCompleted("t", "length", None, outcome(50, 100, 20)),
    "failure": TurnFailedEntry("t", "numerical_error", "NaN " * 20, False, outcome()),
    "rewind": SessionRewound("i_" + "1" * 3, int("1180"), int("1120")),
    "fork": SessionForked("s_" + "b" * 32, int("1180")),
    "edit": ItemEdited("i_" + "1" * 3, int("1180"), int("1120")),
    "metadata": SessionUpdated(1.5, {f"key {i}": f"value {i}" * 20 for i in range(16)}),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_journal_counts_about_what_its_entries_take(name: str) -> None:
    entry: SessionEntry = ENTRIES[name]
    journal = Journal(JournalLimits(max_bytes=1 << 30))
    empty = kept_bytes(journal)
    for _ in range(20):
        copy = msgspec.json.decode(msgspec.json.encode(entry), type=type(entry))
        msgspec.json.encode(copy)  # as a reader does, which may leave something behind
        journal.append(copy)
    estimate, real = journal.num_bytes, kept_bytes(journal) - empty
    assert estimate == 20 * entry_bytes(entry)
    assert WITHIN[0] <= estimate / real <= WITHIN[1], (estimate, real)


def test_nothing_that_a_journal_or_a_conversation_keeps_is_walked_by_a_full_collection() -> None:
    """A collection that walks every entry stops the event loop for hundreds of milliseconds."""
    kinds = (*get_args(SessionEntry), JournalEntry, ConversationItem, Message, Outcome, TokenUsage)
    assert all(issubclass(kind, msgspec.Struct) for kind in kinds)
    journal = Journal(JournalLimits(max_bytes=1 << 30))

    def collect() -> None:
        # A collection stops to track tuples of numbers, the next one tuples of such tuples.
        for _ in range(3):
            gc.collect()

    def fill() -> None:
        for entry in ENTRIES.values():
            for _ in range(20):
                journal.append(msgspec.json.decode(msgspec.json.encode(entry), type=type(entry)))

    fill()
    collect()
    before = len(gc.get_objects())
    fill()
    collect()
    assert len(gc.get_objects()) - before < 10
    assert not any(map(gc.is_tracked, journal._entries))


@pytest.mark.parametrize(
    "turn_input",
    [
        TokenInput(fresh(500)),
        TextInput("x" * 10_000),
        ChatInput(tuple(Message("user", f"message {i} " * 30) for i in range(20))),
    ],
    ids=["tokens", "text", "messages"],
)
def test_a_waiting_turn_counts_about_what_it_keeps(world: World, turn_input: TurnInput) -> None:
    bias = tuple((token, 0.5 + token) for token in fresh(50))
    sampling = SamplingParams(logit_bias=bias, stop_token_ids=fresh(20))
    options = TextOptions(stop=tuple(f"stop {i} " * 5 for i in range(10)))
    session = world.manager._sessions.get(OWNER, world.open())
    world.submit(session.session_id, turn("live"))
    empty = kept_bytes(session.queue, but=[world.loop, world.manager])
    request = TurnRequest("waits", turn_input, sampling, options)
    world.submit(session.session_id, request)
    real = kept_bytes(session.queue, but=[world.loop, world.manager]) - empty
    assert WITHIN[0] <= request_bytes(request) / real <= WITHIN[1], (request_bytes(request), real)


def test_what_an_answer_is_held_to_is_counted() -> None:
    text = "a" * 10_000
    free = turn("1")
    for grammar in (Grammar("regex", text), Grammar("lark", "", calls=text)):
        held = replace(free, sampling=msgspec.structs.replace(free.sampling, grammar=grammar))
        assert request_bytes(held) - request_bytes(free) >= sys.getsizeof(text)


def test_a_session_counts_about_what_it_keeps(world: World) -> None:
    shared = [OWNER, world.manager, world.text, world.manager._limits.journal, world.loop]
    shared += [world.manager._clock, world.manager._maker.replay]
    for num_turns in (0, 20):
        name = world.open(metadata={f"key {i}": "value " * 20 for i in range(4)})
        session = world.manager._sessions.get(OWNER, name)
        for index in range(num_turns):
            world.run(name, turn(f"turn {index}", f"message {index} " * 5, max_tokens=20))
        session.journal._entries.clear()
        real = kept_bytes(session, but=shared)
        assert WITHIN[0] <= session.num_bytes / real <= WITHIN[1], (session.num_bytes, real)


def test_a_transcript_of_a_template_that_renders_all_counts_its_messages_too() -> None:
    with World("alternating") as world:
        now = world.manager._sessions.get(OWNER, world.open()).transcript.state().now
    transcript = Transcript(HistoryModes("template", "template"), (), now=now)
    empty, counted = kept_bytes(transcript), transcript.num_bytes
    for index in range(100):
        message = Message("user", f"message {index} " * 10)
        prompt = Prompt(len(transcript), fresh(30), (message,), None, generate=True)
        growth = transcript.growth(prompt, f"turn {index}")
        before = transcript.num_bytes
        transcript.commit(prompt, f"turn {index}", f"i_{index}", output=(), said=SAID)
        assert growth <= transcript.num_bytes - before + 4096
    real = kept_bytes(transcript) - empty
    assert WITHIN[0] <= (transcript.num_bytes - counted) / real <= WITHIN[1]


@pytest.mark.parametrize("num_turns", [1, 6, 100, 683, 2000])
def test_a_record_of_an_ended_turn_takes_no_more_than_is_counted(
    world: World, num_turns: int
) -> None:
    ended, seq = EndedTurns(), 1 << 40
    empty = kept_bytes(ended)
    for index in range(num_turns):
        accepted = world.loop.create_future()
        live = SessionTurn(
            turn(f"{index}".rjust(64, "t")),
            bytes(16),
            "i_7",
            accepted,
            TurnCourse(0.0),
            created_seq=seq,
        )
        end = TurnCompleted("t", "stop", None, outcome(3))
        ended.add(live, end, end_seq=seq + 5, num_items=1 << 20)
    assert ended.num_bytes == RECORD_BYTES * num_turns
    assert kept_bytes(ended) - empty <= ended.num_bytes + EMPTY_TABLE


def test_a_kept_conversation_counts_about_what_it_keeps() -> None:
    conversation = KeptConversation("conv_1", OWNER, 0, {"a": "b"})
    kept = KeptConversations(Quotas(QuotaLimits()), RecordLog(), Backlog())
    kept.add(conversation, ())
    for number in (100, 1000, 4096):
        said = ((f"msg_{number}_{i}", Message("user", f"number {i}")) for i in range(number))
        kept.append(conversation, [ConversationEntry(*each) for each in said])
        real, estimate = kept_bytes(conversation, but=[OWNER]), conversation.num_bytes
        assert WITHIN[0] <= estimate / real <= WITHIN[1], (estimate, real)
