"""What clients and a scheduler do to a cache, one action at a time, chosen by a `Random`.

Hypothesis drives the actions with a random of its own, so that failures shrink; seeded walks drive
the same actions for depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from cache.errors import (
    HistoryMismatch,
    NamespaceMismatch,
    OutOfRows,
    PinQuotaExceeded,
    SlotBusy,
    SlotExists,
)
from cache.types import Retention, SessionId, TurnId
from tests.cache.free_lists import Allocation
from tests.cache.headroom import headroom
from tests.cache.kv_world import (
    NAMESPACES,
    NUM_TOKEN_IDS,
    Mixture,
    World,
    documents,
    make_cache,
)

SESSIONS = [SessionId(f"session-{number}") for number in range(6)]
DOCUMENTS = documents()
MAX_LEN = 64
NUM_PAGES = {1: 80, 4: 24, 16: 9}
"""Pages of the pool by page size: room for one session of `MAX_LEN` and a bit."""

NUM_STATES = 14
"""Room for one turn that runs, overshoots and rests on snapshots, and a bit."""

INTERESTING = frozenset(
    {
        "cold match",
        "cool",
        "deferred close",
        "discard",
        "duplicate re-pointed",
        "edge grown in place",
        "eviction",
        "fork match",
        "long edge trimmed",
        "out of pages",
        "out of rows",
        "overshoot",
        "page taken back",
        "pin quota refusal",
        "quarantine",
        "refused while busy",
        "resident extends its match",
        "resume",
        "retract",
        "rewind below protected",
        "rollback",
        "split",
    }
)


class Player:
    """Six sessions of two tenants on a pool that holds about one and a half of them."""

    def __init__(
        self,
        page_size: int,
        *,
        num_pages: int | None = None,
        allocation: Allocation = "lifo",
        mixture: Mixture = "full",
    ) -> None:
        num_pages = num_pages or NUM_PAGES[page_size]
        cache = make_cache(
            page_size,
            num_pages=num_pages,
            num_states=NUM_STATES,
            num_rows=3,
            pinned_quota_pages=num_pages // 4,
            max_context_len=2 * MAX_LEN,
            allocation=allocation,
            mixture=mixture,
        )
        self.world = World(cache, page_size)
        for number, session_id in enumerate(SESSIONS[:4]):
            self.world.open(session_id, NAMESPACES[number == 3])

    @property
    def idle(self) -> list[SessionId]:
        return [name for name in sorted(self.world.histories) if name not in self.world.turns]

    @property
    def running(self) -> list[SessionId]:
        return sorted(self.world.turns)

    # Sessions

    def open(self, random: Random) -> None:
        session_id = random.choice(SESSIONS)
        tokens = random.choice(DOCUMENTS)[: random.randint(0, 40)]
        retention = random.choice(list(Retention))
        try:
            self.world.open(session_id, NAMESPACES[0], tokens, retention)
        except SlotExists:
            assert session_id in self.world.histories
        except PinQuotaExceeded:
            assert retention is Retention.PINNED
            self.world.marks["pin quota refusal"] += 1

    def fork(self, random: Random) -> None:
        world = self.world
        unused = [name for name in SESSIONS if name not in world.histories]
        if not unused or not world.histories:
            return
        session_id = random.choice(sorted(world.histories))
        wrong = NAMESPACES[world.namespaces[session_id] == NAMESPACES[0]]
        with pytest.raises(NamespaceMismatch):
            world.cache.fork(session_id, unused[0], namespace=wrong)
        world.fork(session_id, unused[0])

    def rewind(self, random: Random) -> None:
        session_id = random.choice(self.idle)
        length = len(self.world.histories[session_id])
        with pytest.raises(HistoryMismatch):
            self.world.cache.rewind(session_id, length + 1)
        self.world.rewind(session_id, random.randint(0, length))

    def cool(self, random: Random) -> None:
        self.world.cool(random.choice(self.idle))

    def close(self, random: Random) -> None:
        session_id = random.choice(SESSIONS[1:])
        if session_id in self.world.histories:
            self.world.close(session_id)

    def quarantine(self, random: Random) -> None:
        # Quarantined pages never come back, so a pool this small bears it once.
        if self.world.histories and not self.world.marks["quarantine"]:
            self.world.quarantine(random.choice(sorted(self.world.histories)))

    # Turns

    def begin(self, random: Random) -> None:
        world, session_id = self.world, random.choice(self.idle)
        history = world.histories[session_id]
        base_len, reuse_len = len(history), None
        if session_id in world.waiting:
            new_tokens = world.waiting[session_id]
        else:
            if random.random() < 0.3 or base_len > MAX_LEN - 16:
                base_len = random.randint(0, base_len // 2)
            new_tokens = self._input(random, base_len)
            reuse_len = random.choice([None, None, None, None, 0, 7])
        before = world.fingerprint()
        try:
            loan = world.begin(session_id, new_tokens, base_len=base_len, max_reuse_len=reuse_len)
        except (OutOfRows, PinQuotaExceeded) as refusal:
            pinned = isinstance(refusal, PinQuotaExceeded)
            world.marks["pin quota refusal" if pinned else "out of rows"] += 1
            assert world.fingerprint() == before, "a verb that raised changed something"
            return
        turn_id = world.turns[session_id].turn_id
        again = world.cache.begin_turn(
            session_id, turn_id, base_len=base_len, new_tokens=new_tokens
        )
        assert again is loan, "asking again gave another answer"

    def step(self, random: Random) -> None:
        self.world.step(random.choice(self.running), random.randint(1, 16))

    def step_all(self, random: Random) -> None:
        for session_id in self.running:
            if session_id in self.world.turns:
                self.world.step(session_id, random.choice([1, 5, 64]))

    def overshoot(self, random: Random) -> None:
        self.world.overshoot(random.choice(self.running), random.randint(1, 5))

    def end(self, random: Random) -> None:
        session_id = random.choice(self.running)
        turn = self.world.turns[session_id]
        end = len(turn.tokens)
        keep_len = random.choice([end, end, end, turn.base_len, random.randint(turn.base_len, end)])
        self.world.end(session_id, keep_len)

    def retract(self, random: Random) -> None:
        self.world.retract(random.choice(self.running))

    def discard(self, random: Random) -> None:
        self.world.discard(random.choice(self.running))

    def whole_turn(self, random: Random) -> None:
        """From input to answer with nothing in between but pressure."""
        session_id = random.choice(self.idle)
        if len(self.world.turns) == self.world.cache.inspect().stores.rows.num_rows:
            return
        while headroom(self.world.cache).free_rows == 0:
            idle = next(iter(self.world.cache.parked), None)
            if idle is None:
                return
            self.world.cool(idle.session_id)
        history = self.world.histories[session_id]
        base_len = len(history) if len(history) <= MAX_LEN - 16 else random.randint(0, 20)
        try:
            self.world.begin(session_id, self._input(random, base_len), base_len=base_len)
        except PinQuotaExceeded:
            self.world.marks["pin quota refusal"] += 1
        for _ in range(random.randint(1, 6)):
            if session_id in self.world.turns:
                self.world.step(session_id, 64)
        if session_id in self.world.turns:
            self.world.end(session_id, len(self.world.turns[session_id].tokens))

    def refuse_what_is_busy(self, random: Random) -> None:
        session_id, before = random.choice(self.running), self.world.fingerprint()
        cache = self.world.cache
        verbs: Sequence[Callable[[], object]] = (
            lambda: cache.begin_turn(session_id, TurnId("late"), base_len=0, new_tokens=[1]),
            lambda: cache.rewind(session_id, 0),
            lambda: cache.cool(session_id),
            cache.flush,
        )
        for verb in verbs:
            with pytest.raises(SlotBusy):
                verb()
        assert self.world.fingerprint() == before, "a refused verb disturbed something"
        self.world.marks["refused while busy"] += 1

    def _input(self, random: Random, base_len: int) -> list[int]:
        """Mostly what the others say too, so that there is something to share."""
        document = random.choice(DOCUMENTS)[base_len:]
        if document and random.random() < 0.7:
            return document[: random.randint(1, 24)]
        return [random.randrange(NUM_TOKEN_IDS) for _ in range(random.randint(1, 6))]


Action = Callable[[Player, Random], None]

ON_ANY: dict[Action, int] = {Player.open: 3, Player.fork: 2, Player.close: 1, Player.quarantine: 1}
ON_IDLE: dict[Action, int] = {
    Player.begin: 8,
    Player.whole_turn: 8,
    Player.cool: 1,
    Player.rewind: 1,
}
ON_RUNNING: dict[Action, int] = {
    Player.step: 8,
    Player.step_all: 4,
    Player.overshoot: 2,
    Player.end: 8,
    Player.retract: 1,
    Player.discard: 1,
    Player.refuse_what_is_busy: 1,
}


def act(player: Player, random: Random) -> None:
    """One action that is possible now."""
    possible = dict(ON_ANY)
    possible.update(ON_IDLE if player.idle else {})
    possible.update(ON_RUNNING if player.running else {})
    (action,) = random.choices(list(possible), weights=list(possible.values()))
    action(player, random)
