"""`TenantLines`: a line of turns per tenant, and the one order in which all of them stand.

Start-time fair queueing over tenants (Goyal, Vin and Cheng 1996): who was served least comes first.
A tenant is charged for what it sent and what it was answered, in tokens. What the cache spared does
not count, so that the order tells nobody what another tenant has cached.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from typing import Final, NamedTuple

from session_server.engine.turn import Turn
from session_server.engine.turn_line import TurnQueue

CREDIT_TOKENS: Final = 1 << 16
"""How far behind the others a tenant that asks for little may be: it is served first for as long,
and no longer, however long it was away."""

PRIORITY_TOKENS: Final = 1 << 14
"""What one level of priority is worth between tenants: a tenant comes first until it was served so
much more than others. Within a tenant it is worth seconds, see `EngineConfig.priority_step_s`."""


MAX_SERVED_TENANTS: Final = 1 << 14
"""Tenants whose service is remembered. Of more, those are forgotten that were served least: these
gain the least by it, and one that floods the server gains nothing by leaving."""


class _Place(NamedTuple):
    """Order a tenant by what it was served, less what its first turn's priority is worth; those
    that are equal by that turn's order."""

    key: int
    order: tuple[float, int]
    tenant: str


class TenantLines:
    """Hold turns, each tenant's in `Turn.order`, and charge tenants for what they get.

    `version` changes with every turn that comes or goes, and when tenants may change places.
    """

    def __init__(self) -> None:
        self._lines: dict[str, TurnQueue] = {}
        self._places: list[_Place] = []
        self._place_of: dict[str, _Place] = {}
        self._served: dict[str, int] = {}
        """Tokens by tenant; one that is missing was served as little as counts."""
        self._paid: list[tuple[int, str]] = []
        """A heap with an entry per tenant of `_served`: no more than it was served."""
        self._now = 0
        self._num_turns = 0
        self.version = 0

    def __len__(self) -> int:
        return self._num_turns

    def __iter__(self) -> Iterator[Turn]:
        """Yield all turns in order, as if each were charged in its turn. O(log tenants) each."""
        ahead: list[tuple[_Place, int]] = []
        num_entered = 0
        while ahead or num_entered < len(self._places):
            entering = self._places[num_entered] if num_entered < len(self._places) else None
            if entering is not None and (not ahead or entering < ahead[0][0]):
                num_entered += 1
                place, index = entering, 0
            else:
                place, index = heapq.heappop(ahead)
            line = self._lines[place.tenant]
            turn = line[index]
            yield turn
            if index + 1 < len(line):
                served = place.key + _worth(turn) + _cost(turn)
                heapq.heappush(ahead, (_place(place.tenant, served, line[index + 1]), index + 1))

    def firsts(self) -> Iterator[Turn]:
        """Yield the first turn of each tenant, in order."""
        return (self._lines[place.tenant][0] for place in self._places)

    def served(self, tenant: str) -> int:
        """Return the tokens a tenant counts as served; of several the least comes first."""
        return max(self._served.get(tenant, 0), self._now - CREDIT_TOKENS)

    def lag(self, tenant: str) -> int:
        """Return the tokens a tenant is behind who was served most, `CREDIT_TOKENS` at most."""
        return max(0, self._now - self.served(tenant))

    def insert(self, turn: Turn) -> None:
        """Insert a turn at its place. O(log turns) comparisons."""
        self.version += 1
        self._num_turns += 1
        tenant = turn.request.tenant
        self._lines.setdefault(tenant, TurnQueue()).insert(turn)
        self._rank(tenant)

    def remove(self, turn: Turn) -> None:
        """Remove a turn. O(log turns) comparisons."""
        tenant = turn.request.tenant
        line = self._lines.get(tenant, TurnQueue())
        line.remove(turn)
        self.version += 1
        self._num_turns -= 1
        if not line:
            del self._lines[tenant]
        self._rank(tenant)

    def charge(self, turn: Turn) -> None:
        """Charge the tenant of a turn about to be admitted for its input; once."""
        self._now = max(self._now, self.served(turn.request.tenant))
        self._add(turn.request.tenant, _cost(turn))
        while self._paid and self._paid[0][0] <= self._now - CREDIT_TOKENS:
            tenant = heapq.heappop(self._paid)[1]
            if self._served[tenant] <= self._now - CREDIT_TOKENS:
                del self._served[tenant]
            else:
                heapq.heappush(self._paid, (self._served[tenant], tenant))
        self._forget_some()

    def charge_outputs(self, turn: Turn) -> None:
        """Charge the tenant of a turn that ends for its answer."""
        self._add(turn.request.tenant, len(turn.outputs))
        self._forget_some()

    def _forget_some(self) -> None:
        """Forget the tenants that were served least, while there are too many. Amortized O(log
        tenants)."""
        while len(self._served) > MAX_SERVED_TENANTS:
            paid, tenant = heapq.heappop(self._paid)
            if paid < (served := self._served[tenant]):
                heapq.heappush(self._paid, (served, tenant))
                continue
            del self._served[tenant]
            self._rank(tenant)

    def _add(self, tenant: str, num_tokens: int) -> None:
        if tenant not in self._served:
            heapq.heappush(self._paid, (self.served(tenant), tenant))
        self._served[tenant] = self.served(tenant) + num_tokens
        if len(self._lines) > 1:
            self.version += 1
        self._rank(tenant)

    def _rank(self, tenant: str) -> None:
        """Give a tenant the place of its first turn; none if it has none."""
        if (before := self._place_of.pop(tenant, None)) is not None:
            del self._places[bisect.bisect_left(self._places, before)]
        if (line := self._lines.get(tenant)) is not None:
            place = self._place_of[tenant] = _place(tenant, self.served(tenant), line[0])
            bisect.insort(self._places, place)


def _place(tenant: str, served: int, turn: Turn) -> _Place:
    return _Place(served - _worth(turn), turn.order, tenant)


def _worth(turn: Turn) -> int:
    return turn.request.priority * PRIORITY_TOKENS


def _cost(turn: Turn) -> int:
    """Return the tokens it is charged for when it is admitted; a retracted turn has paid."""
    return 0 if turn.num_admissions else len(turn.request.tokens)
