"""`EngineConfig`: the limits and identities of an engine. They do not change while it lives."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cache.types import PoolName

MAX_DRAFTS: Final = 16
"""More drafts than this are hardly ever accepted, and every one of them is computed."""


class MemoryCheck(enum.Enum):
    """Select what follows a violation: nothing, repair and report, or raise."""

    OFF = "off"
    WARN = "warn"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """Configure the memory checker.

    `probe_interval_s`: seconds of work between two checks of the content of a page.
    """

    check: MemoryCheck = MemoryCheck.WARN
    probe_interval_s: float = 10.0

    def __post_init__(self) -> None:
        if self.probe_interval_s <= 0:
            raise ValueError(f"probe_interval_s must be positive, is {self.probe_interval_s}")


class Drafter(enum.Enum):
    """Select what proposes drafts: n-grams of the turn's history, or the runner's draft model."""

    NGRAM = "ngram"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Speculation:
    """Configure speculation: at most `num_drafts` drafts per turn and forward; 0 is off."""

    num_drafts: int = 0
    drafter: Drafter = Drafter.NGRAM

    def __post_init__(self) -> None:
        if not 0 <= self.num_drafts <= MAX_DRAFTS:
            raise ValueError(f"num_drafts lies in [0, {MAX_DRAFTS}]: {self.num_drafts}")


def num_ahead(*, chunk_tokens: int, num_in_flight: int, num_drafts: int) -> int:
    """Return how many positions of one turn may be launched and not settled.

    Each forward in flight has a chunk of it, or one token and its drafts.
    """
    return num_in_flight * max(chunk_tokens, 1 + num_drafts)


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """Configure where KV is kept that the pools have no room for.

    `host_bytes`: of host memory; 0 turns all of it off. `disk_bytes`: on disk; 0 for none.
    `page_bytes`: what a page of each pool takes there; by default what the spec says.
    `segment_bytes`: pages that are copied at a time, and kept together. What is read of a file
    passes through as much memory. `drain_s`: how long an engine that ends writes to disk.
    `is_shared`: other engines write the same files, and look for those of this one.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    segment_bytes: int = 64 << 20
    drain_s: float = 10.0
    page_bytes: Mapping[PoolName, int] = field(default_factory=dict)
    is_shared: bool = False

    def __post_init__(self) -> None:
        if self.host_bytes < 0 or self.disk_bytes < 0:
            raise ValueError("a tier has no negative size")
        if self.disk_bytes and not self.host_bytes:
            raise ValueError("what is written to disk passes through host memory")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configure an engine; made by `engine_wiring` from the user's settings.

    `chunk_tokens`: prompt positions one forward computes, over all turns; each running turn that
    needs a single position gets it on top, so a forward never exceeds `chunk_tokens +
    max_running`. `num_in_flight`: forwards that may be unsettled, 2 is overlap and 1 lockstep.
    `priority_step_s`: seconds of waiting that one level of priority is worth, so that no turn
    starves. `retract_interval`: for tests, forwards between two forced retractions; 0 forces none.
    """

    model_fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_running: int = 64
    max_waiting: int = 1024
    max_sessions: int = 65536
    chunk_tokens: int = 512
    num_in_flight: int = 2
    memory: MemoryPolicy = MemoryPolicy()
    priority_step_s: float = 10.0
    speculation: Speculation = Speculation()
    tiers: TierPolicy = TierPolicy()
    retract_interval: int = 0

    @property
    def num_ahead(self) -> int:
        """Return how many positions of one turn may be launched and not settled."""
        return num_ahead(
            chunk_tokens=self.chunk_tokens,
            num_in_flight=self.num_in_flight,
            num_drafts=self.speculation.num_drafts,
        )

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_running", "max_waiting", "max_sessions", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, is {getattr(self, name)}")
        if self.num_in_flight not in (1, 2):
            raise ValueError(f"num_in_flight is 1 (lockstep) or 2 (overlap): {self.num_in_flight}")
