"""The echo runner in real time: executes inside `launch`, or a moment later like a device."""

from __future__ import annotations

import ctypes
import threading
import time

import msgspec

from session_server.core.batch import Batch, PendingStep, StepResult
from session_server.engine.config import MemoryCheck
from session_server.engine_host.loop import EngineAssembly
from tests.sim.device import EchoRunner
from tests.sim.echo import VOCAB_SIZE, EchoModel
from tests.sim.hand_engine import HandEngine, Sizes

BUG_TOKEN = 31
"""A prompt that begins with it makes the runner raise."""

HANG_TOKEN = 30
"""A prompt that begins with it never comes back."""

GRIP_TOKEN = 29
"""A prompt that begins with it never comes back, and lets no other thread run."""


class LiveStage(msgspec.Struct, frozen=True):
    """What the settings frame of a test engine says. `forward_s`: time of one forward.
    `vocab_size`: token ids that it takes; it says the same few whatever that is."""

    forward_s: float = 0.0
    is_device: bool = False
    fails_to_build: bool = False
    memory_check: MemoryCheck = MemoryCheck.STRICT
    max_running: int = 8
    vocab_size: int = VOCAB_SIZE


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._result


class _Later:
    """Executes when waited for, as a device would while the host goes on."""

    def __init__(self, runner: EchoRunner, lock: threading.Lock, forward_s: float) -> None:
        self._runner = runner
        self._lock = lock
        self._forward_s = forward_s

    def is_done(self) -> bool:
        return False

    def wait(self) -> StepResult:
        time.sleep(self._forward_s)
        with self._lock:
            return self._runner.execute()


class LiveEcho:
    """A `Runner`."""

    def __init__(self, runner: EchoRunner, stage: LiveStage) -> None:
        self._runner = runner
        self._stage = stage
        self._lock = threading.Lock()

    def launch(self, batch: Batch) -> PendingStep:
        """See `Runner.launch`."""
        for row in batch.rows:
            first = row.tokens[0] if row.start == 0 and row.tokens is not None else None
            if first == BUG_TOKEN:
                raise RuntimeError("a bug on purpose")
            if first == HANG_TOKEN:
                time.sleep(3600)
            if first == GRIP_TOKEN:
                ctypes.PyDLL(None).sleep(3600)  # C, called with the interpreter lock held
        with self._lock:
            self._runner.launch(batch)
        if self._stage.is_device:
            return _Later(self._runner, self._lock, self._stage.forward_s)
        time.sleep(self._stage.forward_s)
        return _Done(self._runner.execute())


def assemble(settings: bytes) -> EngineAssembly:
    """An engine over an echo runner; every tenant's salt is "a"."""
    stage = msgspec.msgpack.decode(settings, type=LiveStage)
    if stage.fails_to_build:
        raise ValueError("no such model")
    sizes = Sizes(
        num_pages=256,
        num_rows=32,
        max_context_len=512,
        memory_check=stage.memory_check,
        max_running=stage.max_running,
    )
    hand = HandEngine.of(sizes, model=EchoModel(vocab_size=stage.vocab_size))
    hand.device.assume_salt("a")
    return EngineAssembly(hand.engine, LiveEcho(hand.device, stage), hand.ready(epoch=0))
