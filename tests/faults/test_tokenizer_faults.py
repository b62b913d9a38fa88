"""The tokenizer or the chat template raises, panics or hangs, at every call."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers.decoders import DecodeStream

from session_server.core.errors import ServerBusy, TokenizeFailed, TurnNotFound
from session_server.core.owner import Owner
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import (
    ChatInput,
    Message,
    TextInput,
    TurnCompleted,
    TurnFailedEntry,
    TurnInput,
    TurnRequest,
)
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.tokenizing import MAX_THREADS, NUM_THREADS
from session_server.sessions.views import OpenRequest
from session_server.text import detokenizer
from session_server.text.chat_template import RenderJob
from session_server.text.model_text import ModelText
from tests.faults.points import Points, injects
from tests.rig.moments import OWNER, SEED, Rig
from tests.sim.echo import EchoModel
from tests.sim.hand_engine import Sizes
from tests.text.local_text import load_local_text
from tests.text.tiny_models import write_model

SIZES = Sizes(num_pages=100, page_size=8, chunk_tokens=64, num_rows=8, max_context_len=512)
WORDS = EchoModel(vocab_size=402)
"""Says letters, and takes every id of the tokenizer."""


class Panic(BaseException):
    """Like a panic of Rust: no `Exception`."""


@dataclass
class Trap:
    """Counts calls into the tokenizer and the template; the armed one does not return well."""

    kind: type[BaseException] | None = RuntimeError
    armed_at: int = -1
    num_calls: int = 0
    has_sprung: bool = False
    way_out: threading.Event = field(default_factory=threading.Event)

    def arm(self, after: int) -> None:
        """Spring at the call behind `after` others."""
        self.armed_at, self.has_sprung = self.num_calls + after + 1, False

    def release(self) -> None:
        """Let go whatever hangs."""
        self.way_out.set()
        self.way_out = threading.Event()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted."""

        def call(*args: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self.armed_at:
                self.has_sprung = True
                if self.kind is not None:
                    raise self.kind("injected")
                self.way_out.wait()
            return function(*args, **options)

        return call


class Trapped:
    """An object some of whose methods are trapped."""

    def __init__(self, target: Any, trap: Trap, *names: str) -> None:
        self.target = target
        for name in names:
            setattr(self, name, trap.around(getattr(target, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


def trap_encoding(text: ModelText, trap: Trap) -> None:
    """Every call that makes tokens of messages is trapped."""
    tokenizer: Any = text.tokenizer
    for name in ("_control", "_content"):
        trapped = Trapped(getattr(tokenizer, name), trap, "encode", "encode_batch_fast")
        setattr(tokenizer, name, trapped)
    assert text.chat is not None
    renderer: Any = text.chat.renderer
    if trap.kind is not Panic:  # Jinja is no Rust
        template = renderer._template
        template._template = Trapped(template._template, trap, "generate")


@contextlib.contextmanager
def trapped_decoding(text: ModelText, trap: Trap) -> Iterator[None]:
    """Every call that makes text of an answer is trapped."""

    class TrappedStream:
        def __init__(self, **options: Any) -> None:
            self._step = trap.around(DecodeStream(**options).step)

        def step(self, pipeline: Any, token_id: int) -> Any:
            return self._step(pipeline.target, token_id)

    tokenizer: Any = text.tokenizer
    tokenizer._control = Trapped(tokenizer._control, trap, "decode")
    with mock.patch.object(detokenizer, "DecodeStream", TrappedStream):
        yield


def chat(turn_id: str, *, max_tokens: int = 5) -> TurnRequest:
    """A turn of messages that name control tokens, so that each is encoded by itself."""
    messages = tuple(Message("user", f"a <|im_end|> {number}") for number in range(8))
    return request(turn_id, ChatInput(messages), max_tokens)


def request(turn_id: str, content: TurnInput, max_tokens: int = 5) -> TurnRequest:
    """A turn of any input."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=SEED, ignore_eos=True)
    return TurnRequest(turn_id, content, sampling)


def begin(rig: Rig) -> None:
    """A conversation with a past, and a neighbour whose answer is long."""
    rig.run(rig.open(session_id="mine"), chat("past"))
    rig.submit(rig.open(session_id="neighbour"), request("long", TextInput("Hi"), max_tokens=12))


@contextlib.contextmanager
def rig_with_text(limits: SessionLimits | None = None) -> Iterator[tuple[Rig, ModelText]]:
    """A server with a tokenizer and template of its own."""
    with tempfile.TemporaryDirectory() as folder:
        text = load_local_text(write_model(Path(folder) / "model", "chatml"))
        with Rig(SIZES, text=text, limits=limits, model=WORDS) as rig:
            yield rig, text


@injects("tokenizer raises or hangs", "every call that encodes raises, in four ways", points=140)
def test_a_tokenizer_that_raises_refuses_that_turn_and_disturbs_no_other(points: Points) -> None:
    for kind in (ValueError, RuntimeError, MemoryError, Panic):
        trap = Trap(kind)
        with rig_with_text() as (rig, text):
            trap_encoding(text, trap)
            for after in itertools.count():
                begin(rig)
                trap.arm(after)
                num_failed = sum(not is_taken(rig, name) for name in ("first", "second"))
                rig.rest()
                num_failed += sum(has_failed(rig, name) for name in ("first", "second"))
                assert num_failed == trap.has_sprung
                assert not has_failed(rig, "long", "neighbour")
                trap.armed_at = -1
                rig.assert_recovered()
                if num_failed == 0:
                    break
                points.strike()


@injects("tokenizer raises or hangs", "every call that decodes raises, in four ways", points=72)
def test_an_answer_that_cannot_be_decoded_ends_well_with_its_tokens(points: Points) -> None:
    for kind in (ValueError, RuntimeError, MemoryError, Panic):
        trap = Trap(kind)
        with rig_with_text() as (rig, text), trapped_decoding(text, trap):
            for after in itertools.count():
                begin(rig)
                trap.arm(after)
                for name in ("first", "second"):
                    rig.submit("mine", chat(name))
                rig.rest()
                for session_id, name in (("mine", "first"), ("mine", "second")):
                    assert not has_failed(rig, name, session_id)
                is_over = not trap.has_sprung
                trap.armed_at = -1
                rig.assert_recovered()
                if is_over:
                    break
                points.strike()


@injects("tokenizer raises or hangs", "every call that encodes hangs", points=18)
def test_an_input_that_hangs_the_tokenizer_is_given_up_and_the_next_is_not(points: Points) -> None:
    trap = Trap(None)
    with rig_with_text(SessionLimits(inline_input_chars=0)) as (rig, text):
        trap_encoding(text, trap)
        for after in itertools.count():
            begin(rig)
            trap.arm(after)
            hanging = rig.loop.create_task(rig.manager.submit(OWNER, "mine", chat("first")))
            while not (trap.has_sprung or hanging.done()):
                rig.do(asyncio.sleep(0))
            trap.armed_at = -1
            # The loop is free: another session's turn is tokenized and runs meanwhile.
            rig.run(rig.open(session_id="other"), rig.new_turn(3, 4))
            assert hanging.done() != trap.has_sprung
            if not trap.has_sprung:
                break
            rig.loop.skipped_s += rig.limits.tokenize_deadline_s
            with pytest.raises(TokenizeFailed, match="too long"):
                rig.do(hanging)
            rig.assert_recovered()
            trap.release()
            # What hung goes on encoding: its calls must not be taken for those of the next input.
            while rig.manager._flow.prompt_builder._threads.num_alive:
                rig.do(asyncio.sleep(0))
            points.strike()


@injects("tokenizer raises or hangs", "as many inputs hang as may, and one more", points=9)
def test_inputs_that_hang_the_tokenizer_are_bounded_and_their_threads_are_not_waited_for(
    points: Points,
) -> None:
    trap = Trap(None)
    with rig_with_text(SessionLimits(inline_input_chars=0)) as (rig, text):
        trap_encoding(text, trap)
        begin(rig)
        for number in range(MAX_THREADS):
            trap.arm(0)
            hanging = rig.loop.create_task(rig.manager.submit(OWNER, "mine", chat(f"n{number}")))
            while not trap.has_sprung:
                rig.do(asyncio.sleep(0))
            rig.loop.skipped_s += rig.limits.tokenize_deadline_s
            with pytest.raises(TokenizeFailed, match="too long"):
                rig.do(hanging)
            points.strike()
        with pytest.raises(ServerBusy):
            rig.submit("mine", chat("refused"))
        points.strike()
        stuck = [thread for thread in threading.enumerate() if thread.name == "tokenize"]
        assert len(stuck) >= MAX_THREADS
        assert all(thread.daemon for thread in stuck), "the process could not end"
        rig.run("mine", rig.new_turn(3))  # token ids need no tokenizer
        trap.release()
        while rig.manager._flow.prompt_builder._threads.num_alive:
            rig.do(asyncio.sleep(0))
        rig.run("mine", chat("taken"))
        rig.assert_recovered()


@injects("tokenizer raises or hangs", "every slot hangs while another owner waits", points=1)
def test_the_time_an_input_waits_for_others_is_not_its_own(points: Points) -> None:
    trap = Trap(None)
    hog = Owner("hog")
    with rig_with_text(SessionLimits(inline_input_chars=0)) as (rig, text):
        trap_encoding(text, trap)
        begin(rig)
        crowd = []
        for number in range(NUM_THREADS + 1):
            rig.manager.open(hog, OpenRequest(session_id=f"s{number}"))
            trap.arm(0)
            submit = rig.manager.submit(hog, f"s{number}", chat("hangs"))
            crowd.append(rig.loop.create_task(submit))
            while not trap.has_sprung and number < NUM_THREADS:
                rig.do(asyncio.sleep(0))
        patient = rig.loop.create_task(rig.manager.submit(OWNER, "mine", chat("first")))
        rig.spin()
        trap.armed_at = -1
        rig.loop.skipped_s += rig.limits.tokenize_deadline_s
        rig.do(patient)
        for each in crowd[:NUM_THREADS]:
            with pytest.raises(TokenizeFailed, match="too long"):
                rig.do(each)
        rig.do(crowd[NUM_THREADS])
        points.strike()
        trap.release()


@injects("tokenizer raises or hangs", "every slot hangs for longer than an input waits", points=1)
def test_an_input_that_waits_too_long_for_others_may_be_sent_again(points: Points) -> None:
    trap = Trap(None)
    with rig_with_text(SessionLimits(inline_input_chars=0, tokenize_wait_s=5.0)) as (rig, text):
        trap_encoding(text, trap)
        begin(rig)
        hanging = []
        for _ in range(NUM_THREADS):
            trap.arm(0)
            submit = rig.manager.submit(OWNER, rig.open(), chat("hangs"))
            hanging.append(rig.loop.create_task(submit))
            while not trap.has_sprung:
                rig.do(asyncio.sleep(0))
        late = rig.loop.create_task(rig.manager.submit(OWNER, "mine", chat("first")))
        rig.spin()
        rig.loop.skipped_s += 5.0
        with pytest.raises(ServerBusy, match="wait to be tokenized"):
            rig.do(late)
        points.strike()
        trap.armed_at = -1
        trap.release()
        for each in hanging:
            rig.do(each)


@injects("tokenizer raises or hangs", "the renderer of templates is gone, or hangs", points=2)
def test_a_renderer_that_is_gone_or_hangs_is_not_blamed_on_the_input(points: Points) -> None:
    async def is_gone(_job: RenderJob) -> list[str]:
        raise ServerBusy("the process of the chat template ended (status -11)")

    async def hangs(_job: RenderJob) -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError("nobody wakes it")

    for render in (is_gone, hangs):
        with rig_with_text(SessionLimits()) as (rig, text):
            begin(rig)
            assert text.chat is not None
            renderer = text.chat.renderer
            with (
                mock.patch.object(renderer, "render_now", return_value=None),
                mock.patch.object(renderer, "render", render),
            ):
                submit = rig.loop.create_task(rig.manager.submit(OWNER, "mine", chat("first")))
                rig.spin()
                rig.loop.skipped_s += rig.limits.tokenize_deadline_s
                with pytest.raises(ServerBusy, match="process"):
                    rig.do(submit)
            points.strike()
            rig.run("mine", chat("first"))
            rig.assert_recovered()


def is_taken(rig: Rig, turn_id: str) -> bool:
    """Submit a chat turn; whether the server took it."""
    try:
        rig.submit("mine", chat(turn_id))
    except TokenizeFailed:
        return False
    return True


def has_failed(rig: Rig, turn_id: str, session_id: str = "mine") -> bool:
    """Whether a turn was taken and failed to be tokenized."""
    try:
        end = rig.manager.turn(OWNER, session_id, turn_id).end
    except TurnNotFound:
        return False
    assert isinstance(end, (TurnCompleted, TurnFailedEntry)), end
    if isinstance(end, TurnFailedEntry):
        assert end.code == "tokenize_failed"
    return isinstance(end, TurnFailedEntry)
