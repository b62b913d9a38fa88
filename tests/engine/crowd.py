"""A bench that keeps account of what each forward gave to whom: the stage of the fairness tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cache.types import TurnId
from session_server.core.batch import Batch
from session_server.core.commands import EngineCommand
from tests.engine.bench import Bench
from tests.scenarios.lines import distinct
from tests.sim.hand_engine import Sizes


@dataclass(frozen=True, slots=True)
class Coming:
    """A turn to come: lengths of its prompt and its answer, its priority, and whose it is."""

    prompt_len: int
    max_new: int = 1
    priority: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Guest:
    """A turn of the crowd. `ahead`: who was live when it came; `since`: forwards before it."""

    prompt_len: int
    max_new: int
    ahead: frozenset[str]
    since: int


@dataclass(frozen=True, slots=True)
class Given:
    """What one forward gave to one live turn: `num_tokens` of the `lacked` prompt positions, and
    perhaps a token. `was_running`: it had been admitted before.
    """

    lacked: int
    num_tokens: int
    was_running: bool
    has_token: bool


class Crowd:
    """Turns of sessions that share nothing, so that a turn lacks its whole prompt at first.

    `forwards`: per forward, what it gave to each live turn.
    """

    def __init__(self, stage: Sizes) -> None:
        self.bench = Bench(stage)
        self.guests: dict[str, Guest] = {}
        self.forwards: list[dict[str, Given]] = []
        self._computed: dict[str, int] = {}
        self._is_blocked = True

    def submit(self, name: str, prompt_len: int, *, max_new: int = 1, priority: int = 0) -> None:
        """Send a turn in a session of its own."""
        self.arrive({name: Coming(prompt_len, max_new, priority)})

    def arrive(self, coming: Mapping[str, Coming]) -> None:
        """Send turns in one step, each in a session of its own."""
        commands = []
        for name, turn in coming.items():
            session_id = self.bench.open(f"of {name}", salt=name, tenant=turn.tenant)
            self._note_launches()
            prompt = distinct(len(self.guests) + len(commands), turn.prompt_len)
            commands.append(
                self.bench.submit_command(
                    session_id,
                    name,
                    prompt,
                    priority=turn.priority,
                    tenant=turn.tenant,
                    max_tokens=turn.max_new,
                )
            )
        ahead = frozenset(self.live())
        for name, turn in coming.items():
            self.guests[name] = Guest(turn.prompt_len, turn.max_new, ahead, len(self.forwards))
            self._computed[name] = 0
        self.step(*commands)

    def step(self, *commands: EngineCommand) -> None:
        """One step as a loop takes it: it waits for the device when nothing else can be done."""
        is_waited_for = self._is_blocked and len(self.bench.runner)
        results = (self.bench.runner.execute(),) if is_waited_for else ()
        outcome = self.bench.step(*commands, results=results)
        self._is_blocked = outcome.is_blocked
        self._note_launches()

    def finish(self, *, max_steps: int = 50_000) -> None:
        """Step until every turn has ended, and see that each said what it would say alone."""
        for _ in range(max_steps):
            if not self.live():
                break
            self.step()
        assert not self.live(), f"still live: {self.live()}"
        for index, (name, guest) in enumerate(self.guests.items()):
            self.bench.expect(name, distinct(index, guest.prompt_len))
            assert len(self.bench.tokens(name)) == guest.max_new

    def live(self) -> list[str]:
        """Turns that have not ended, in order of submission."""
        return [name for name in self.guests if self.bench.turns[TurnId(name)].end is None]

    def num_forwards(self, name: str) -> int:
        """Forwards launched from the submission of a turn on, up to the one that gave its first
        token; 1 is the least there can be.
        """
        since = self.guests[name].since
        for index, forward in enumerate(self.forwards[since:], 1):
            if name in forward and forward[name].has_token:
                return index
        raise AssertionError(f"{name} got no first token")

    def _note_launches(self) -> None:
        for batch in self.bench.batches[len(self.forwards) :]:
            self.forwards.append(self._given(batch))

    def _given(self, batch: Batch) -> dict[str, Given]:
        rows = {str(row.turn_id): row for row in batch.rows}
        given: dict[str, Given] = {}
        for name in self.live():
            lacked = self.guests[name].prompt_len - self._computed[name]
            row = rows.get(name)
            if row is None:
                given[name] = Given(lacked, 0, self._computed[name] > 0, has_token=False)
                continue
            self._computed[name] = row.start + row.num_tokens
            num_tokens = max(0, min(lacked, row.num_tokens))
            given[name] = Given(lacked, num_tokens, row.sampling is None, row.sample)
        return given
