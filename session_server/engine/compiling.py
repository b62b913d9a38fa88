"""`Compiling`: turns whose grammar is not compiled, and the compiled grammars of the others.

Compiling takes longer than a step, so it is done elsewhere: a step asks for it and a later one gets
the result. Meanwhile the turn waits, and others go on.
"""

from __future__ import annotations

from collections import Counter

from cache.types import TurnId
from session_server.core.batch import CompiledGrammar, CompileRequest
from session_server.engine.plan_admission import KEPT_PLACES
from session_server.engine.tenant_lines import TenantLines
from session_server.engine.turn import Turn


class Compiling:
    """Hold the turns in `TurnState.COMPILING`, and what was compiled for turns that live.

    Grammars are compiled for `max_turns` turns at most, in order, because compiled ones take much
    more memory than their texts, and far more turns may wait than run. A turn that ends while its
    own is compiled holds its place until that has ended. Tenants come in rotation, and leave places
    to each other as they do among running turns, see `KEPT_PLACES`.
    """

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._queue = TenantLines()
        self._asked: dict[TurnId, Turn | None] = {}
        """None for a turn that has ended."""

        self._compiled: dict[TurnId, CompiledGrammar] = {}
        self._tenants: dict[TurnId, str] = {}
        """Of those asked for or compiled, whose they are."""

        self._num_held: Counter[str] = Counter()

    @property
    def num_compiled(self) -> int:
        """Return how many grammars are kept for turns that live."""
        return len(self._compiled)

    def insert(self, turn: Turn) -> None:
        """Add a turn that waits for its grammar."""
        self._queue.insert(turn)

    def remove(self, turn: Turn) -> None:
        """Forget a turn that ends, whatever its state."""
        if self._compiled.pop(turn.turn_id, None) is not None:
            self._release(turn.turn_id)
        if turn.turn_id in self._asked:
            self._asked[turn.turn_id] = None
        elif turn.is_compiling:
            self._queue.remove(turn)

    def requests(self, *, is_shared: bool = False) -> tuple[CompileRequest, ...]:
        """Return what to compile now; each turn is asked for once. `is_shared`: there are sessions
        of several tenants."""
        if not self._queue:
            return ()
        requests: list[CompileRequest] = []
        num_kept = self._max_turns // KEPT_PLACES if is_shared else 0
        while (turn := self._next(num_kept)) is not None:
            tenant = turn.request.tenant
            self._queue.charge(turn)
            self._queue.remove(turn)
            self._asked[turn.turn_id] = turn
            self._tenants[turn.turn_id] = tenant
            self._num_held[tenant] += 1
            grammar = turn.request.sampling.grammar
            assert grammar is not None, "only a turn with a grammar waits for one"
            requests.append(CompileRequest(turn.turn_id, grammar))
        return tuple(requests)

    def complete(self, turn_id: TurnId, grammar: CompiledGrammar) -> Turn | None:
        """Keep the compiled grammar of a turn and return it; None if the turn has ended."""
        turn = self._asked.pop(turn_id, None)
        if turn is not None:
            self._compiled[turn_id] = grammar
        else:
            self._release(turn_id)
        return turn

    def give_up(self, turn_id: TurnId) -> None:
        """Forget a turn, maybe one that has ended, whose grammar could not be compiled."""
        self._asked.pop(turn_id, None)
        self._release(turn_id)

    def of(self, turn: Turn) -> CompiledGrammar | None:
        """Return the grammar of a turn; None if it has none."""
        return self._compiled.get(turn.turn_id)

    def _next(self, num_kept: int) -> Turn | None:
        """Return the first turn whose tenant has a place. O(tenants) where none has."""
        num_free = self._max_turns - len(self._asked) - len(self._compiled)
        if num_free <= 0:
            return None
        held = self._num_held
        firsts = self._queue.firsts()
        return next((t for t in firsts if num_free > min(held[t.request.tenant], num_kept)), None)

    def _release(self, turn_id: TurnId) -> None:
        if (tenant := self._tenants.pop(turn_id, None)) is not None:
            self._num_held[tenant] -= 1
            if not self._num_held[tenant]:
                del self._num_held[tenant]
