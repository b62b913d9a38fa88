"""The engine as the server knows it, stepped by hand: commands wait, events travel, and it may die.

What the server sends waits for a step, what the engine says waits for `deliver`: every race between
the two is played by choosing when to call which, and a fault fits between any two of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from session_server.core.commands import EngineCommand
from session_server.core.engine_client import EventListener
from session_server.core.errors import EngineUnavailable
from session_server.core.events import EngineDied, EngineEvent, EngineReady, one_by_one
from tests.sim.hand_engine import HandEngine

INBOX_SIZE: Final = 1 << 16
"""Commands that it takes before it has to step, where nobody says how many."""

STEP_S: Final = 0.01
"""Time that passes in a step, where nobody says what time it is."""

EngineT = TypeVar("EngineT", bound=HandEngine)


class HostedEngine(Generic[EngineT]):
    """Implements `EngineClient`.

    Attributes:
        hand: the engine of this life; the next one has its own.
        is_alive: whether there is an engine that can step.
        inbox_size: commands it takes before it has to step; may change.
        reached: what happened, counted.
    """

    def __init__(
        self,
        make_engine: Callable[[], EngineT],
        *,
        inbox_size: int = INBOX_SIZE,
        reached: Counter[str] | None = None,
    ) -> None:
        """Build the first engine; `make_engine` is called for each life."""
        self._make_engine = make_engine
        self.inbox_size = inbox_size
        self._listener: EventListener | None = None
        self._events: deque[EngineEvent] = deque()
        self._commands: list[EngineCommand] = []
        self._epoch = 0
        self._is_up = False
        self._num_steps_before = 0
        self.hand = make_engine()
        self.is_alive = True
        self.now_s = 0.0
        self.reached: Counter[str] = Counter() if reached is None else reached

    # -- EngineClient

    async def start(self, listener: EventListener) -> EngineReady:
        """See `EngineClient.start`."""
        self._listener = listener
        self._is_up = True
        return self._ready()

    def send(self, command: EngineCommand) -> None:
        """See `EngineClient.send`."""
        if not self._is_up:
            raise EngineUnavailable("there is no engine")
        if len(self._commands) >= self.inbox_size:
            self.reached["engine takes no more"] += 1
            raise EngineUnavailable("the engine's inbox is full")
        self._commands.append(command)

    async def stop(self) -> None:
        """See `EngineClient.stop`."""
        self._is_up = False

    # -- levers

    @property
    def num_steps(self) -> int:
        """Steps of all lives."""
        return self._num_steps_before + self.hand.num_steps

    @property
    def is_busy(self) -> bool:
        """Whether another step would make a difference."""
        hand = self.hand
        return self.is_alive and bool(self._commands or hand.num_launched or not hand.is_blocked)

    @property
    def is_resting(self) -> bool:
        """Whether nothing moves before somebody sends a command."""
        return not self._events and not self.is_busy

    def step(self) -> None:
        """Take one step as a loop would, if it makes a difference: an engine that can do nothing
        else waits for its oldest forward.
        """
        if self.is_busy:
            self.now_s += STEP_S
            self.play(self.now_s, 1 if self.hand.is_blocked else 0)

    def play(self, now_s: float, num_results: int) -> None:
        """Take one step with so many results; its events are on their way then."""
        if not self.is_alive:
            return
        commands, self._commands = self._commands, []
        results = self.hand.take_results(num_results)
        self._events.extend(one_by_one(self.hand.step(now_s, commands, results).events))

    def deliver(self, num_events: int | None = None) -> None:
        """Let events arrive at the server, all or the first few."""
        assert self._listener is not None, "started first"
        count = len(self._events) if num_events is None else min(num_events, len(self._events))
        for _ in range(count):
            event = self._events.popleft()
            if isinstance(event, EngineReady):
                self._is_up = self.is_alive and event.epoch == self._epoch
            self._listener(event)

    def crash(self, *, is_heard: bool = False) -> None:
        """Lose the engine and what is under way to it, and unless it `is_heard`, what it has said.

        The server does not know before `tell_death`.
        """
        self.reached["engine died"] += 1
        self.is_alive = self._is_up = False
        self._commands.clear()
        if not is_heard:
            self._events.clear()
        self._num_steps_before += self.hand.num_steps
        self.hand = self._make_engine()

    def tell_death(self, *, will_restart: bool = True) -> None:
        """Let the supervisor notice."""
        self._events.append(EngineDied(message="killed", will_restart=will_restart))

    def revive(self) -> None:
        """Bring the next engine up, which knows no session."""
        if self.is_alive:
            return
        self.is_alive = True
        self.reached["engine came back"] += 1
        self._events.append(self._ready())

    def _ready(self) -> EngineReady:
        self._epoch += 1
        return self.hand.ready(self._epoch)
