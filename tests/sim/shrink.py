"""From a failing run to the operations and the settings that matter.

First the operations: delta debugging (ddmin, Zeller and Hildebrandt 2002), which leaves out chunks
as long as the same layer of checks still fails. Then the configuration, field by field towards
what is simplest, and the operations once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from session_server.engine.config import MemoryCheck
from tests.sim.config import Front, SimConfig
from tests.sim.failure import SimFailure
from tests.sim.layers import Layers
from tests.sim.simulation import replay
from tests.sim.trace import Op, Trace

T = TypeVar("T")

MAX_TRIES: Final = 3000
"""Replays one shrinking may cost."""

_SIMPLE: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "sizes": {
        "num_in_flight": (1,),
        "num_drafts": (0,),
        "num_repeats": (0,),
        "pinned_quota_pages": (0,),
        "max_waiting": (64,),
        "num_rows": (2, 3),
        "max_running": (1, 2),
        "layers": (Layers(),),
        "page_size": (1, 2, 4),
        "num_pages": (8, 12, 18, 30),
        "chunk_tokens": (64, 16, 4),
        "max_context_len": (24, 48),
        "allocation": ("lifo",),
        "memory_check": (MemoryCheck.OFF,),
        "share_prefixes": (True,),
    },
    "habits": {
        "num_sessions": (2, 3),
        "num_owners": (1,),
        "inline_chars": (4096,),
        "journal_entries": (1000,),
        "socket_frames": (64,),
        "engine_inbox": (48,),
    },
    "faults": {
        "alloc_page": (0,),
        "alloc_row": (0,),
        "tokenizer_slow": (0,),
    },
}


_BOUNDS: Final = frozenset({"num_rows", "max_running"})
"""What other sizes were drawn for: more of it would be another failure."""


class OutOfTries(Exception):
    """The budget of a shrinking is used up."""


def shrink(
    failure: SimFailure, *, on_try: Callable[[int, Trace], None], max_tries: int = MAX_TRIES
) -> SimFailure:
    """The smallest failure of the same layer that was found.

    `on_try` is told before each replay how many there were, and the smallest trace so far.
    """
    hunt = _Hunt(failure, on_try, max_tries)
    try:
        hunt.cut_ops()
        hunt.simplify()
        hunt.cut_ops()
    except OutOfTries:
        pass
    return hunt.best


def minimise(items: Sequence[T], still_fails: Callable[[list[T]], bool]) -> list[T]:
    """ddmin: a sublist that still fails and from which no tried chunk can be left out, down to
    single items."""
    kept, num_chunks = list(items), 2
    while len(kept) >= 2:
        size = max(1, len(kept) // num_chunks)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            if still_fails(rest):
                kept, num_chunks = rest, max(num_chunks - 1, 2)
                break
        else:
            if size == 1:
                return kept
            num_chunks = min(2 * num_chunks, len(kept))
    return [] if kept and still_fails([]) else kept


class _Hunt:
    def __init__(
        self, failure: SimFailure, on_try: Callable[[int, Trace], None], max_tries: int
    ) -> None:
        self.best = failure
        self._on_try = on_try
        self._max_tries = max_tries
        self._num_tries = 0

    def cut_ops(self) -> None:
        """Leave out operations."""
        config = self.best.trace.config
        minimise(self.best.trace.ops, lambda ops: self._fails(config, ops))

    def simplify(self) -> None:
        """Make the configuration simpler, one field at a time."""
        for part, field, value in _simpler(self.best.trace.config.front):
            config = self.best.trace.config
            old = getattr(config, part)
            if getattr(old, field) == value or (field in _BOUNDS and value > getattr(old, field)):
                continue
            simple = dataclasses.replace(old, **{field: value})
            changed = dataclasses.replace(config, **{part: simple})
            self._fails(changed, self.best.trace.ops)

    def _fails(self, config: SimConfig, ops: Sequence[Op]) -> bool:
        if self._num_tries >= self._max_tries:
            raise OutOfTries
        self._num_tries += 1
        self._on_try(self._num_tries, self.best.trace)
        try:
            replay(Trace(config, list(ops)))
        except SimFailure as failure:
            if failure.layer != self.best.layer:
                return False
            self.best = failure
            return True
        except ValueError:
            pass  # settings that make no sense together
        return False


def _simpler(front: Front) -> Iterator[tuple[str, str, Any]]:
    for part, fields in _SIMPLE.items():
        for field, values in fields.items():
            if front is Front.DIRECT and part == "habits":
                continue
            for value in values:
                yield part, field, value
