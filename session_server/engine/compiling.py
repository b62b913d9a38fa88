"""`Compiling`: turns whose grammar is not compiled, and the compiled grammars of the others.

Compiling takes longer than a step, so it is done elsewhere: a step asks for it and a later one gets
the result. Meanwhile the turn waits, and others go on.
"""

from __future__ import annotations

from cache.types import TurnId
from session_server.core.batch import CompiledGrammar, CompileRequest
from session_server.engine.turn import Turn
from session_server.engine.turn_queue import TurnQueue


class Compiling:
    """Hold the turns in `TurnState.COMPILING`, and what was compiled for turns that live.

    Grammars are compiled for `max_turns` turns at most, in order, because compiled ones take much
    more memory than their texts, and far more turns may wait than run. A turn that ends while its
    own is compiled holds its place until that has ended.
    """

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._queue = TurnQueue()
        self._asked: dict[TurnId, Turn | None] = {}
        """None for a turn that has ended."""

        self._compiled: dict[TurnId, CompiledGrammar] = {}

    @property
    def num_compiled(self) -> int:
        """Return how many grammars are kept for turns that live."""
        return len(self._compiled)

    def insert(self, turn: Turn) -> None:
        """Add a turn that waits for its grammar."""
        self._queue.insert(turn)

    def remove(self, turn: Turn) -> None:
        """Forget a turn that ends, whatever its state."""
        self._compiled.pop(turn.turn_id, None)
        if turn.turn_id in self._asked:
            self._asked[turn.turn_id] = None
        elif turn.is_compiling:
            self._queue.remove(turn)

    def requests(self) -> tuple[CompileRequest, ...]:
        """Return what to compile now; each turn is asked for once."""
        requests: list[CompileRequest] = []
        while self._queue and len(self._asked) + len(self._compiled) < self._max_turns:
            turn = self._queue[0]
            self._queue.remove(turn)
            self._asked[turn.turn_id] = turn
            grammar = turn.request.sampling.grammar
            assert grammar is not None, "only a turn with a grammar waits for one"
            requests.append(CompileRequest(turn.turn_id, grammar))
        return tuple(requests)

    def complete(self, turn_id: TurnId, grammar: CompiledGrammar) -> Turn | None:
        """Keep the compiled grammar of a turn and return it; None if the turn has ended."""
        turn = self._asked.pop(turn_id, None)
        if turn is not None:
            self._compiled[turn_id] = grammar
        return turn

    def give_up(self, turn_id: TurnId) -> None:
        """Forget a turn, maybe one that has ended, whose grammar could not be compiled."""
        self._asked.pop(turn_id, None)

    def of(self, turn: Turn) -> CompiledGrammar | None:
        """Return the grammar of a turn; None if it has none."""
        return self._compiled.get(turn.turn_id)
