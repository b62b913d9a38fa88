"""`Inbox`: what waits for the engine's next step, bounded by the memory that it takes."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from session_server.core.batch import CompileResult, StepResult
from session_server.core.commands import EngineCommand, OpenSession, SubmitTurn
from session_server.core.tier_orders import TierResult

MAX_INBOX_BYTES: Final = 64 << 20
"""Memory of commands that may wait for the next step. The one that reaches the bound may exceed
it."""

_ITEM_BYTES: Final = 1024
_VALUE_BYTES: Final = 40  # of a token id in a tuple, which is a Python object
_CHAR_BYTES: Final = 6  # of a text beyond ASCII: its code point and its UTF-8


def memory_bytes(command: EngineCommand) -> int:
    """Return about how many bytes of memory a command takes."""
    match command:
        case OpenSession(tokens=tokens):
            num_values = len(tokens)
        case SubmitTurn(tokens=tokens, sampling=sampling):
            num_values = len(tokens) + len(sampling.stop_token_ids) + 3 * len(sampling.logit_bias)
            if sampling.grammar is not None:
                num_chars = len(sampling.grammar.text) + len(sampling.grammar.calls)
                num_values += num_chars * _CHAR_BYTES // _VALUE_BYTES
        case _:
            num_values = 0
    return _ITEM_BYTES + _VALUE_BYTES * num_values


_T = TypeVar("_T")


class Taken(NamedTuple):
    """Hold what one step takes, each kind in its order."""

    commands: Sequence[EngineCommand]
    results: Sequence[StepResult]
    compiled: Sequence[CompileResult]
    copied: Sequence[TierResult]


class Inbox:
    """Pass commands and results from any thread to the next step. `max_bytes` bounds commands.

    Of results there are no more than forwards in flight, grammars asked for and orders given.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._has_room = threading.Condition()
        self._commands: deque[EngineCommand] = deque()
        self._num_bytes = 0
        self._results: deque[StepResult] = deque()
        self._compiled: deque[CompileResult] = deque()
        self._copied: deque[TierResult] = deque()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing waits for the next step."""
        return not (self._commands or self._results or self._compiled or self._copied)

    def put(self, command: EngineCommand, *, block: bool = True) -> None:
        """Add one command. A reader that waits here leaves further ones in its socket.

        Raises:
            queue.Full: `max_bytes` wait already and `block` is False.
        """
        with self._has_room:
            while self._num_bytes >= self._max_bytes:
                if not block:
                    raise queue.Full
                self._has_room.wait()
            self._commands.append(command)
            self._num_bytes += memory_bytes(command)

    def put_result(self, result: StepResult) -> None:
        """Add the result of a forward."""
        self._results.append(result)

    def put_compiled(self, result: CompileResult) -> None:
        """Add a grammar that was compiled."""
        self._compiled.append(result)

    def put_copied(self, result: TierResult) -> None:
        """Add the result of an order."""
        self._copied.append(result)

    def take(self, *, max_items: int, max_bytes: int) -> Taken:
        """Remove and return all results, and the oldest commands up to a bound, of which the last
        may exceed `max_bytes`. One thread at a time."""
        results, compiled = _take_all(self._results), _take_all(self._compiled)
        copied = _take_all(self._copied)
        commands: list[EngineCommand] = []
        if self._commands:
            with self._has_room:
                num_bytes = 0
                while self._commands and len(commands) < max_items and num_bytes < max_bytes:
                    commands.append(self._commands.popleft())
                    num_bytes += memory_bytes(commands[-1])
                self._num_bytes -= num_bytes
                self._has_room.notify_all()
        return Taken(commands, results, compiled, copied)


def _take_all(waiting: deque[_T]) -> list[_T]:
    return [waiting.popleft() for _ in range(len(waiting))]
