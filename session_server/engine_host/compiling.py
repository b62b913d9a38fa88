"""`CompileThreads`: compile grammars off the engine's thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Final

from session_server.core.batch import CompiledGrammar, CompileRequest, CompileResult
from session_server.core.errors import GrammarFailed, SessionServerError, UnsupportedOperation
from session_server.core.sampling import Grammar

NUM_THREADS: Final = 2
"""Grammars that are compiled at the same time."""

Compile = Callable[[Grammar], CompiledGrammar]
"""Compile a grammar, on any thread. Raises SessionServerError."""

_logger: Final = logging.getLogger("session_server.engine")


def refuse(_: Grammar) -> CompiledGrammar:
    """Refuse every grammar, for an engine whose runner knows none."""
    raise UnsupportedOperation("this engine supports no grammars", param="grammar")


class CompileThreads:
    """Compile grammars in the order of the requests, and call `deliver` with each result.

    The threads start with the first request.
    """

    def __init__(self, compile_: Compile, deliver: Callable[[CompileResult], None]) -> None:
        self._compile = compile_
        self._deliver = deliver
        self._requests: queue.SimpleQueue[CompileRequest] = queue.SimpleQueue()
        self._num_threads = 0

    def submit(self, requests: Iterable[CompileRequest]) -> None:
        """Queue requests. Never blocks."""
        for request in requests:
            self._requests.put(request)
            if self._num_threads < NUM_THREADS:
                self._num_threads += 1
                threading.Thread(target=self._run, name="engine-compile", daemon=True).start()

    def _run(self) -> None:
        while True:
            request = self._requests.get()
            self._deliver(CompileResult(request.turn_id, self._outcome(request.grammar)))

    def _outcome(self, grammar: Grammar) -> CompiledGrammar | SessionServerError:
        try:
            return self._compile(grammar)
        except SessionServerError as error:
            return error
        except BaseException as error:  # noqa: BLE001 - a panic in Rust costs this turn alone
            # Its message may contain text of the client, so only its type is logged.
            _logger.error("a grammar was not compiled error=%s", type(error).__name__)
            return GrammarFailed("the grammar could not be compiled", param="grammar")
