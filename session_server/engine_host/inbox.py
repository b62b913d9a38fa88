"""`Inbox`: what waits for the engine's next step, bounded by the memory that it takes."""

from __future__ import annotations

import queue
from collections import deque
from typing import Final

from session_server.core.batch import CompileResult, StepResult
from session_server.core.commands import EngineCommand, OpenSession, SubmitTurn
from session_server.engine_host.device import DeviceCrash

MAX_INBOX_BYTES: Final = 64 << 20
"""Memory of what may wait for the next step. The item that reaches the bound may exceed it."""

_ITEM_BYTES: Final = 1024
_VALUE_BYTES: Final = 40  # of a token id in a tuple, which is a Python object
_CHAR_BYTES: Final = 6  # of a text beyond ASCII: its code point and its UTF-8

InboxItem = EngineCommand | StepResult | CompileResult | DeviceCrash


def memory_bytes(item: InboxItem) -> int:
    """Return about how many bytes of memory an item takes."""
    match item:
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


class Inbox(queue.Queue[InboxItem]):
    """Pass items to the engine's thread, results before commands. `maxsize` counts bytes.

    A reader that waits in `put` leaves further commands in its socket.
    """

    def _init(self, maxsize: int) -> None:
        self._results: deque[InboxItem] = deque()
        self._commands: deque[InboxItem] = deque()
        self._num_bytes = 0

    def _qsize(self) -> int:
        return self._num_bytes

    def _put(self, item: InboxItem) -> None:
        is_result = isinstance(item, StepResult | CompileResult | DeviceCrash)
        (self._results if is_result else self._commands).append(item)
        self._num_bytes += memory_bytes(item)

    def _get(self) -> InboxItem:
        item = (self._results or self._commands).popleft()
        self._num_bytes -= memory_bytes(item)
        return item
