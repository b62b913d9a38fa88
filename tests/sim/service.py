"""What tenants were served, and the order in which that puts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from cache.types import TurnId
from session_server.core.events import EngineEvent, TurnFailed, TurnFinished, TurnStarted
from session_server.engine.tenant_lines import CREDIT_TOKENS, PRIORITY_TOKENS
from session_server.engine.turn import Turn
from tests.sim.failure import Broken, Layer
from tests.sim.history import EngineTurn


class ServiceWatch:
    """Counts tokens as docs/scheduling.md says: the input of a turn when it is admitted for the
    first time, its output when it ends.
    """

    def __init__(self, turns: Mapping[TurnId, EngineTurn]) -> None:
        """`turns`: as the engine's events tell of them."""
        self._turns: Final = turns
        self._served: Counter[str] = Counter()

    def count(self, events: Iterable[EngineEvent]) -> None:
        """After a step, and after `turns` have heard of it."""
        for event in events:
            match event:
                case TurnStarted(turn_id=turn_id) if self._turns[turn_id].num_starts == 1:
                    command = self._turns[turn_id].command
                    self._served[command.tenant] += len(command.tokens)
                case TurnFinished() | TurnFailed() if event.turn_id in self._turns:
                    turn = self._turns[event.turn_id]
                    self._served[turn.command.tenant] += len(turn.outputs)
                case _:
                    pass

    def check(self, firsts: Iterable[Turn]) -> None:
        """`firsts`: the first turn of each tenant that has some waiting, in order.

        Raises:
            Broken: somebody comes before a tenant that was served less.
        """
        if self._served.total() >= CREDIT_TOKENS:
            return  # nobody is so far behind in what a simulation serves
        places = [(self._place(turn), turn.order, turn.request.tenant) for turn in firsts]
        if places != sorted(places):
            raise Broken(Layer.LIVENESS, f"tenants are out of order: {places}")

    def _place(self, turn: Turn) -> int:
        request = turn.request
        return self._served[request.tenant] - request.priority * PRIORITY_TOKENS
