"""`GrammarCache`: compiled grammars, the latest used ones within a bound of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from session_server.core.grammar import CompiledMatcher, GrammarCompiler, compiled_bytes
from session_server.core.sampling import Grammar

MAX_CACHED_BYTES: Final = 64 << 20
"""Memory of compiled grammars that no turn uses any more, as `compiled_bytes` estimates it."""


class GrammarCache:
    """Compile grammars, and keep them for the next turn with the same one. Thread-safe."""

    def __init__(self, compiler: GrammarCompiler, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._compiler = compiler
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Grammar, CompiledMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def compile(self, grammar: Grammar) -> CompiledMatcher:
        """Return a compiled grammar. Raises what `GrammarCompiler.compile` does."""
        with self._lock:
            if (kept := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return kept
        compiled = self._compiler.compile(grammar)
        with self._lock:
            if grammar not in self._kept:  # else another thread was faster
                self._kept[grammar] = compiled
                self.num_bytes += compiled_bytes(grammar)
            while self.num_bytes > self._max_bytes:
                oldest, _ = self._kept.popitem(last=False)
                self.num_bytes -= compiled_bytes(oldest)
        return compiled
