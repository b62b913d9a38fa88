"""Check grammars in a process of its own, before the turns that ask for them are accepted."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from session_server.core.errors import InvalidRequest, ServerBusy
from session_server.core.sampling import Grammar
from session_server.text.grammar_child import SUBJECT, GrammarSource
from session_server.text.tokenizer import Tokenizer
from session_server.text.worker_process import (
    WorkerFailed,
    WorkerLimits,
    WorkerLost,
    WorkerProcess,
)

MAX_KNOWN: Final = 256
"""Grammars that were compiled and need not be again."""

MAX_ANSWER_BYTES: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Limit what one check may use, as `WorkerLimits`."""

    deadline_s: float = 5.0
    cpu_s: float = 0.5
    memory_bytes: int = 1 << 30


class GrammarWorker:
    """Compile grammars in a child process, which starts with the first one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        limits: CheckLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(sorted(eos_token_ids))
        self._limits = limits or CheckLimits()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._process: WorkerProcess | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id of the child, None while there is none."""
        return None if self._process is None else self._process.pid

    def knows(self, grammar: Grammar) -> bool:
        """Return whether the grammar was compiled not long ago."""
        return self._digest(grammar) in self._known

    async def check(self, grammar: Grammar) -> None:
        """Return once the grammar was compiled.

        Raises:
            InvalidRequest: it cannot be, or takes too much.
            ServerBusy: the process did not start, or was stopped or killed.
        """
        digest = self._digest(grammar)
        if digest in self._known:
            self._known.move_to_end(digest)
            return
        try:
            await self._started().run(msgspec.msgpack.encode(grammar))
        except WorkerLost as error:
            raise ServerBusy(str(error)) from error
        except WorkerFailed as error:
            raise InvalidRequest(str(error), param="grammar") from error
        self._known[digest] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            await self._process.close()

    def _started(self) -> WorkerProcess:
        if self._process is None:
            source = GrammarSource(self._tokenizer.backend_tokenizer.to_str(), self._eos_token_ids)
            limits = self._limits
            self._process = WorkerProcess(
                "_grammar",
                msgspec.msgpack.encode(source),
                WorkerLimits(
                    limits.deadline_s, limits.cpu_s, limits.memory_bytes, MAX_ANSWER_BYTES
                ),
                subject=SUBJECT,
            )
        return self._process

    @staticmethod
    def _digest(grammar: Grammar) -> bytes:
        return blake2b(msgspec.msgpack.encode(grammar), digest_size=16).digest()
