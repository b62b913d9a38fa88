"""The engine as the server knows it, played by hand: commands wait, events travel, and it may die.

Every race between server and engine is played by choosing when to step and when to deliver.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from session_server.core.commands import EngineCommand
from session_server.core.engine_client import EventListener
from session_server.core.errors import EngineUnavailable
from session_server.core.events import EngineDied, EngineEvent, EngineReady
from tests.sim.stage import Stage


class HostedEngine:
    """An `EngineClient`. `make_stage` builds the engine of each life, which takes `inbox_size`
    commands before it has to step; `reached` counts.

    `num_steps`: engine steps of all lives.
    """

    def __init__(
        self, make_stage: Callable[[], Stage], inbox_size: int, reached: Counter[str]
    ) -> None:
        self._make_stage = make_stage
        self._inbox_size = inbox_size
        self._listener: EventListener | None = None
        self._events: deque[EngineEvent] = deque()
        self._commands: list[EngineCommand] = []
        self._epoch = 0
        self._is_up = False
        self._num_steps_before = 0
        self.stage = make_stage()
        self.is_alive = True
        self.reached = reached

    @property
    def num_steps(self) -> int:
        """Steps of all lives."""
        return self._num_steps_before + self.stage.num_steps

    @property
    def is_resting(self) -> bool:
        """Whether nothing moves before somebody sends a command."""
        stage = self.stage
        is_idle = stage.is_blocked and not stage.num_launched and not self._commands
        return not self._events and (is_idle or not self.is_alive)

    async def start(self, listener: EventListener) -> EngineReady:
        """See `EngineClient.start`."""
        self._listener = listener
        self._is_up = True
        return self._ready()

    def send(self, command: EngineCommand) -> None:
        """See `EngineClient.send`."""
        if not self._is_up:
            raise EngineUnavailable("there is no engine")
        if len(self._commands) >= self._inbox_size:
            self.reached["engine takes no more"] += 1
            raise EngineUnavailable("the engine's inbox is full")
        self._commands.append(command)

    async def stop(self) -> None:
        """See `EngineClient.stop`."""
        self._is_up = False

    def step(self, now_s: float, num_results: int) -> None:
        """One step of the engine, if there is one; its events are on their way then."""
        if not self.is_alive:
            return
        commands, self._commands = self._commands, []
        results = self.stage.take_results(num_results)
        self._events.extend(self.stage.step(now_s, commands, results).events)

    def deliver(self, num_events: int | None) -> None:
        """Let events arrive at the server, all or the first few."""
        assert self._listener is not None, "started first"
        count = len(self._events) if num_events is None else min(num_events, len(self._events))
        for _ in range(count):
            event = self._events.popleft()
            if isinstance(event, EngineReady):
                self._is_up = self.is_alive and event.epoch == self._epoch
            self._listener(event)

    def die(self) -> None:
        """Lose everything but the events already on their way."""
        if not self.is_alive:
            return
        self.reached["engine died"] += 1
        self.reached["engine died under turns"] += bool(self.stage.history.live)
        self.is_alive = self._is_up = False
        self._commands.clear()
        self._num_steps_before += self.stage.num_steps
        self.stage = self._make_stage()
        self._events.append(EngineDied(message="killed", will_restart=True))

    def revive(self) -> None:
        """The next engine comes up, knowing nothing."""
        if self.is_alive:
            return
        self.is_alive = True
        self.reached["engine came back"] += 1
        self._events.append(self._ready())

    def _ready(self) -> EngineReady:
        self._epoch += 1
        cache, model = self.stage.cache, self.stage.device.model
        return EngineReady(
            epoch=self._epoch,
            max_turn_len=self.stage.engine.max_turn_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.alphabet[:1],
            page_size=cache.stores.page_size,
            num_pages=max(ledger.num_pages for ledger in cache.stores.ledgers.values()),
            device="echo",
            dtype="none",
            backend="echo",
        )
