"""`Judge`: knows what clients were told and what was committed, and nothing of how."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from session_server.core.session_events import ConversationItem
from session_server.sessions.history_change import apply_tokens
from session_server.sessions.store.records import decode_entry
from tests.sim_replicas.tables import Change


class Broken(Exception):
    """A rule does not hold. `rule`: which one, in a word."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


@dataclass(slots=True)
class Log:
    """What was committed of a session: its conversation as of the last commit, who has committed
    in which epoch, and the ids of the items that each turn ever had."""

    name: str
    epoch: int = 0
    holders: dict[int, int] = field(default_factory=dict)
    tokens: array[int] = field(default_factory=lambda: array("i"))
    items: list[ConversationItem] = field(default_factory=list)
    ids: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Facts:
    """What clients were told of a session.

    `is_there`: it was said to be durable. `num_deleting`: how many have asked for its deletion, and
    were not told that it has moved instead. `gone_s`: when it was said to be gone for good. `said`:
    the turns that were told to be durable, in that order, with the id of their answer. `after`:
    those that had been when a turn was sent first. `cut`: turns that a rewind may have dropped;
    `dropped`: those that it has. `num_inherited`: of those of another session, in which it was
    forked. `is_opened_twice`: two clients open one of this name; when one of theirs is gone the
    other may be there.
    """

    name: str
    ttl_s: float
    used_s: float
    is_there: bool = False
    num_deleting: int = 0
    gone_s: float | None = None
    said: dict[str, str] = field(default_factory=dict)
    after: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    num_inherited: int = 0
    is_opened_twice: bool = False

    @property
    def may_go(self) -> bool:
        """Return whether somebody deletes it."""
        return self.num_deleting > 0

    @property
    def may_be_another(self) -> bool:
        """Return whether what is there may be the second one of this name, which has nothing that
        was said in the first."""
        return self.is_opened_twice and self.may_go


@dataclass(frozen=True, slots=True)
class Begun:
    """What was known of a session when a request for it began."""

    facts: Facts
    said: tuple[str, ...]
    dropped: frozenset[str]
    is_there: bool
    is_gone: bool


class Judge:
    """Hold what clients are told against what they were told, and the log against both. `clock`:
    seconds of the world."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.facts: dict[str, Facts] = {}
        self.logs: dict[tuple[int, str], Log] = {}
        """By number and name: a number may be given again, once nothing has it."""

    # -- what is committed

    def committed(self, changes: Sequence[Change]) -> None:
        """Take note of a commit. Raises Broken."""
        for change in changes:
            key = change.number, change.name
            log = self.logs.get(key)
            if log is None:
                log = self.logs[key] = Log(key[1])
            self._check_epoch(log, change)
            if change.is_whole:
                log.tokens, log.items = array("i"), []
            num_kept = len(log.items)
            for data in change.entries:
                entry = decode_entry(data).change
                apply_tokens(log.tokens, entry)
                num_kept = min(num_kept, entry.items.num_kept)
                del log.items[entry.items.num_kept :]
                log.items += entry.items.added
            if change.entries:
                self._check_turns(log, log.items[num_kept:])
                facts = self.facts.get(log.name)
                if facts is not None and change.is_whole:
                    self._check_items(facts, log.items, tuple(facts.said), facts.dropped)

    def _check_epoch(self, log: Log, change: Change) -> None:
        if change.epoch < log.epoch:
            raise Broken("epoch", f"{log.name}: {change.epoch} behind {log.epoch}")
        log.epoch = change.epoch
        if log.holders.setdefault(change.epoch, change.replica_id) != change.replica_id:
            raise Broken("epoch", f"{log.name}: two replicas have committed in {change.epoch}")

    def _check_turns(self, log: Log, added: Sequence[ConversationItem]) -> None:
        ids: dict[str, list[str]] = {}
        for item in added:
            ids.setdefault(item.turn_id, []).append(item.id)
        for turn_id, found in ids.items():
            if log.ids.setdefault(turn_id, tuple(found)) != tuple(found) and turn_id:
                raise Broken("twice", f"{log.name}: turn {turn_id} was run again")

    # -- what is told

    def begin(self, name: str) -> Begun:
        """Return what is known as of now."""
        facts = self.facts[name]
        is_gone = facts.gone_s is not None
        return Begun(facts, tuple(facts.said), frozenset(facts.dropped), facts.is_there, is_gone)

    def opened(self, name: str, ttl_s: float) -> Facts:
        """Take note of a session that somebody begins to open."""
        now_s = self._clock()
        return self.facts.setdefault(name, Facts(name, ttl_s, now_s))

    def sent(self, name: str, turn_id: str) -> None:
        """Take note of a turn that is sent, perhaps not for the first time."""
        facts = self.facts[name]
        facts.after.setdefault(turn_id, tuple(facts.said))

    def durable(self, begun: Begun, turn_id: str, item_id: str, *, is_news: bool) -> None:
        """Take note of a turn that was told to be durable, as news or once more. Raises Broken."""
        facts = begun.facts
        self.found(begun)
        if facts.may_be_another:
            return
        if facts.said.setdefault(turn_id, item_id) != item_id:
            raise Broken("twice", f"{facts.name}: turn {turn_id} has two answers")
        facts.is_there = True
        if is_news:
            self.used(facts)

    def used(self, facts: Facts) -> None:
        """Take note of a session that was used, which is durable."""
        facts.num_deleting += facts.is_opened_twice and self.may_expire(facts)
        facts.is_there, facts.used_s = True, self._clock()

    def found(self, begun: Begun) -> None:
        """Take note of a session that was found. Raises Broken."""
        if begun.is_gone:
            raise Broken("deleted", f"{begun.facts.name} comes back")

    def not_found(self, begun: Begun) -> None:
        """Take note of a session that was said not to exist. Raises Broken."""
        facts = begun.facts
        if begun.is_there and not facts.may_go and not self.may_expire(facts):
            raise Broken("lost", f"{facts.name} is not found")
        # Who deletes it was not told that it is gone: with its replica it may come back.
        if begun.is_there and not facts.may_go:
            self.gone(begun)

    def gone(self, begun: Begun) -> None:
        """Take note of a session that was told to be deleted."""
        if not begun.facts.is_opened_twice:
            begun.facts.gone_s = self._clock()

    def may_expire(self, facts: Facts) -> bool:
        """Return whether a session may have expired: no clock goes that wrong."""
        return self._clock() - facts.used_s > 0.7 * facts.ttl_s - 3.0

    def read(
        self, begun: Begun, items: Sequence[ConversationItem], *, may_be_another: bool = False
    ) -> None:
        """Take note of a conversation that was told; `may_be_another`: the second one of its name.
        Raises Broken."""
        self.found(begun)
        _check_once(begun.facts, items)
        if not may_be_another:
            self._check_items(begun.facts, items, begun.said, begun.dropped)

    def _check_items(
        self,
        facts: Facts,
        items: Sequence[ConversationItem],
        said: Iterable[str],
        dropped: Iterable[str],
    ) -> None:
        places = _check_once(facts, items)
        if facts.may_be_another:
            return
        for turn_id in said:
            if turn_id in facts.cut:
                continue
            place = places.get(facts.said[turn_id])
            if place is None or items[place].turn_id != turn_id:
                raise Broken("history", f"{facts.name} has not turn {turn_id}")
            for earlier in facts.after.get(turn_id, ()):
                if places.get(facts.said[earlier], -1) > place:
                    raise Broken("history", f"{facts.name}: {turn_id} is before {earlier}")
        here = {item.turn_id for item in items}
        for turn_id in dropped:
            if turn_id in here:
                raise Broken("history", f"{facts.name} has turn {turn_id}, which was rewound")


def _check_once(facts: Facts, items: Sequence[ConversationItem]) -> dict[str, int]:
    """Return the places of items by their ids. Raises Broken for one that is there twice."""
    places = {item.id: place for place, item in enumerate(items)}
    if len(places) != len(items):
        raise Broken("history", f"{facts.name} has an item twice")
    return places
