"""`Tenants`: count the tree's pages by tenant, and say from whom pressure takes the next ones.

Memory is shared by weight. Pressure takes from the tenant that has most for its weight, so that one
that floods the cache evicts itself. Half of what a tenant's share is at least is its minimum: pages
of it are taken only where nothing else can be, see `cache.parked_queue`. A tenant has a minimum
while it has a session, and others have: pages that it leaves in the tree are kept for nobody. Where
there is one tenant nothing is counted as a minimum, and it has everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from cache.errors import AuditFailed
from cache.eviction_order import EvictionOrder
from cache.lazy_heap import LazyHeap
from cache.ledger import Ledger
from cache.radix_node import RadixNode, is_evictable_leaf
from cache.types import Namespace, PoolName

WHOLE_WEIGHT: Final = 1000
"""The weight of a tenant that may have everything."""

_RESOLUTION: Final = 1 << 20
_LAST: Final = 1 << 62
"""Behind all who have pages above their minimum."""


class Owned(Protocol):
    """Describe a session: whose it is."""

    @property
    def namespace(self) -> Namespace: ...


class Account:
    """Count what one tenant has in the tree, and order what of it can be evicted.

    `num_sessions`: those in the engine; `num_roots`: its namespaces in the tree, which stay while
    there are pages. Per pool: `held` pages, of which
    `protected` ones are locked; `guarded`: evictable ones that its minimum keeps; `unheld`: pages
    that it lacks of its minimum. `gives`: whether it has more than its minimum while sessions of it
    are parked (`is_parked`).
    """

    __slots__ = (
        "gives",
        "guarded",
        "held",
        "is_parked",
        "leaves",
        "num_roots",
        "num_sessions",
        "number",
        "orders",
        "protected",
        "unheld",
        "weight",
    )

    def __init__(self, number: int, pools: Iterable[PoolName], bounded: Sequence[PoolName]) -> None:
        self.number = number
        self.weight = WHOLE_WEIGHT
        self.num_sessions = self.num_roots = 0
        self.is_parked = False
        self.gives = dict.fromkeys(pools, False)
        self.held = dict.fromkeys(pools, 0)
        self.protected = dict.fromkeys(pools, 0)
        self.guarded = dict.fromkeys(pools, 0)
        self.unheld = dict.fromkeys(pools, 0)
        self.leaves = EvictionOrder(is_evictable_leaf)
        self.orders = {pool: EvictionOrder(partial(_has_evictable, pool=pool)) for pool in bounded}

    def evictable(self, pool: PoolName) -> int:
        """Return its pages of a pool that no lock covers."""
        return self.held[pool] - self.protected[pool]


class Tenants:
    """Hold the accounts of all tenants with sessions or pages; others are unknown.

    `guarded` and `unheld`: the sums over all accounts, per pool; `num_giving`: how many give.
    What changes one account costs O(log tenants); a tenant that comes or goes costs O(tenants with
    sessions) once the weights of all of these have outgrown what the minimums are parts of, or are
    less than a quarter of it.
    """

    def __init__(self, ledgers: Mapping[PoolName, Ledger], bounded: Sequence[PoolName]) -> None:
        self._ledgers, self._bounded = ledgers, bounded
        self._accounts: dict[str, Account] = {}
        self._present: dict[str, Account] = {}
        """Those with sessions."""

        self._num_seen = 0
        self._weight = 0
        """Of all that are present."""

        self._unit = 0
        """What weights are parts of: a power of two, no less than all of them and no more than four
        times that; 0 for one tenant."""

        self._givers = {pool: LazyHeap[Account]() for pool in ledgers}
        self.guarded = dict.fromkeys(ledgers, 0)
        self.unheld = dict.fromkeys(ledgers, 0)
        self.num_giving = dict.fromkeys(ledgers, 0)

    def __len__(self) -> int:
        return len(self._accounts)

    def __getitem__(self, tenant: str) -> Account:
        return self._accounts[tenant]

    @property
    def num_present(self) -> int:
        """Return how many tenants have sessions."""
        return len(self._present)

    def items(self) -> Iterator[tuple[str, Account]]:
        """Yield every known tenant with its account."""
        yield from self._accounts.items()

    def enter(self, tenant: str, weight: int | None = None) -> None:
        """Count another session of a tenant; `weight`: what it is from now on."""
        account = self._known(tenant)
        before = account.weight if account.num_sessions else 0
        account.num_sessions += 1
        account.weight = account.weight if weight is None else weight
        if account.weight != before:
            self._present[tenant] = account
            self._weigh(account, account.weight - before)

    def enter_into(self, others: Tenants, slots: Iterable[Owned]) -> None:
        """Count sessions in `others`, with the weights known here."""
        for slot in slots:
            tenant = slot.namespace.tenant
            others.enter(tenant, self._accounts[tenant].weight)

    def leave(self, tenant: str) -> None:
        """Count a session less."""
        account = self._accounts[tenant]
        account.num_sessions -= 1
        if not account.num_sessions:
            del self._present[tenant]
            self._weigh(account, -account.weight)
            self._forget_if_gone(tenant)

    def set_parked(self, tenant: str, *, is_parked: bool) -> None:
        """Say whether sessions of a tenant are parked that pressure may cool."""
        account = self._accounts[tenant]
        account.is_parked = is_parked
        if len(self._accounts) > 1:
            for pool in self._ledgers:
                self._recount(account, pool)

    def add_root(self, tenant: str) -> None:
        """Count another namespace in the tree, where pages are about to be."""
        self._known(tenant).num_roots += 1

    def remove_root(self, tenant: str) -> None:
        """Count a namespace less, which has no page any more."""
        self._accounts[tenant].num_roots -= 1
        self._forget_if_gone(tenant)

    def add(self, tenant: str, pool: PoolName, num_pages: int) -> None:
        """Count pages that have entered the tree, unlocked; negative ones have left it."""
        account = self._accounts[tenant]
        account.held[pool] += num_pages
        if len(self._accounts) > 1:
            self._recount(account, pool)

    def protect(self, tenant: str, pool: PoolName, num_pages: int) -> None:
        """Book pages as protected, in the ledger too, when their first lock is taken; negative ones
        as evictable, when their last lock is released."""
        if num_pages < 0:
            self._ledgers[pool].unprotect(-num_pages)
        else:
            self._ledgers[pool].protect(num_pages)
        account = self._accounts[tenant]
        account.protected[pool] += num_pages
        if len(self._accounts) > 1:
            self._recount(account, pool)

    def next_to_give(self, pool: PoolName) -> tuple[Account, int]:
        """Return who gives the next evictable pages of a pool, and how many at most: of those with
        pages above their minimum, or else of all, the one with most for its weight.

        Raises:
            AuditFailed: nothing is evictable; the caller checks the ledger before.
        """
        if len(self._accounts) == 1:
            sole = next(iter(self._accounts.values()))
            return sole, sole.held[pool] - sole.protected[pool]
        if (account := self._givers[pool].first()) is None:
            raise AuditFailed("nothing is evictable, though the ledger says so")
        num_evictable = account.evictable(pool)
        return account, num_evictable - account.guarded[pool] or num_evictable

    def minimum(self, account: Account, pool: PoolName) -> int:
        """Return the pages of a pool that a tenant keeps while others have pages above theirs; none
        without a session."""
        if not (self._unit and account.num_sessions):
            return 0
        return (self._ledgers[pool].num_pages - 1) * account.weight // (2 * self._unit)

    def excess(self, tenant: str, pool: PoolName) -> int:
        """Return how many pages a tenant has above its minimum; negative below it."""
        account = self._accounts[tenant]
        return account.held[pool] - self.minimum(account, pool)

    def lock_cost(self, tenant: str, pool: PoolName, num_pages: int) -> int:
        """Return how many pages that nobody's minimum keeps are fewer once a tenant locks
        `num_pages` of its evictable ones: those that its own minimum keeps are there for it."""
        account = self._accounts[tenant]
        num_kept = self.minimum(account, pool) - account.protected[pool] - num_pages
        num_guarded = max(0, min(num_kept, account.evictable(pool) - num_pages))
        return num_pages - (account.guarded[pool] - num_guarded)

    def _known(self, tenant: str) -> Account:
        if (account := self._accounts.get(tenant)) is None:
            self._num_seen += 1
            account = self._accounts[tenant] = Account(self._num_seen, self._ledgers, self._bounded)
            if len(self._accounts) == 2:
                self._recount_all(self._accounts)  # nothing is counted of one alone
        return account

    def _forget_if_gone(self, tenant: str) -> None:
        account = self._accounts[tenant]
        if account.num_sessions or account.num_roots:
            return
        for pool in self._ledgers:
            if account.held[pool]:
                raise AuditFailed(f"{pool}: a tenant has pages in the tree and no place there")
            self._givers[pool].remove(account)
        del self._accounts[tenant]

    def _weigh(self, account: Account, weight: int) -> None:
        """Add to the weight of those present, as an account came, has gone or weighs otherwise."""
        self._weight += weight
        unit = 1 << (self._weight - 1).bit_length() if len(self._present) > 1 else 0
        # Not at once after it has grown: one who comes and goes would have all recounted each time.
        if 0 < unit < self._unit <= 4 * self._weight:
            unit = self._unit
        if unit != self._unit:
            self._unit = unit
            self._recount_all(self._present)
        for pool in self._ledgers:
            self._recount(account, pool)

    def _recount_all(self, accounts: Mapping[str, Account]) -> None:
        for account in accounts.values():
            for pool in self._ledgers:
                self._recount(account, pool)

    def _recount(self, account: Account, pool: PoolName) -> None:
        """Count anew what depends on the pages that an account holds and has locked."""
        minimum, num_evictable = self.minimum(account, pool), account.evictable(pool)
        guarded = max(0, min(num_evictable, minimum - account.protected[pool]))
        unheld = max(0, minimum - account.held[pool])
        if (before := account.guarded[pool]) != guarded:
            self.guarded[pool] += guarded - before
            account.guarded[pool] = guarded
        if (before := account.unheld[pool]) != unheld:
            self.unheld[pool] += unheld - before
            account.unheld[pool] = unheld
        gives = account.is_parked and account.held[pool] > minimum
        if account.gives[pool] != gives:
            self.num_giving[pool] += 1 if gives else -1
            account.gives[pool] = gives
        givers = self._givers[pool]
        if not num_evictable:
            givers.remove(account)
            return
        rank = -account.held[pool] * _RESOLUTION // account.weight
        rank += 0 if num_evictable > guarded else _LAST
        if givers.priority(account) != rank:
            givers.push(account, rank, account.number)


def _has_evictable(node: RadixNode, pool: PoolName) -> bool:
    return node.num_evictable[pool] > 0
