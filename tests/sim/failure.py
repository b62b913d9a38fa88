"""How a simulation says that something is wrong."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.trace import Trace


class Layer(enum.StrEnum):
    """Which check found it: the accounts, one session's pages, the full recount, the KV that a
    forward read, what was said and remembered, the order of events and frames, progress, or an
    exception inside the server."""

    LEDGER = "ledger"
    PAIR = "pair"
    AUDIT = "audit"
    CONTENT = "content"
    SHADOW = "shadow"
    PROTOCOL = "protocol"
    LIVENESS = "liveness"
    CRASH = "crash"


class Broken(Exception):
    """A check of the simulator does not hold. Made where it is found, without the story."""

    def __init__(self, layer: Layer, message: str) -> None:
        super().__init__(f"{layer.value}: {message}")
        self.layer = layer
        self.message = message


class SimFailure(Exception):
    """A simulation found a fault. `step` counts engine steps; `trace` replays it."""

    def __init__(self, layer: Layer, step: int, message: str, trace: Trace) -> None:
        super().__init__(f"{layer.value} at step {step}: {message}")
        self.layer: str = layer.value
        self.step = step
        self.message = message
        self.trace = trace
