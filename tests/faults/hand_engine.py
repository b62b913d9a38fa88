"""The real engine on the echo device, on the event loop's thread, a step when asked for one.

What the manager sends waits for `step`, what the engine says waits for `deliver`: a fault can be
put between any two of them. The bench behind it recounts every page after every step.
"""

from __future__ import annotations

from collections.abc import Callable

from session_server.core.commands import EngineCommand, OpenSession, SubmitTurn
from session_server.core.engine_client import EventListener
from session_server.core.errors import EngineUnavailable
from session_server.core.events import EngineDied, EngineEvent, EngineReady
from tests.engine.bench import Bench, Stage
from tests.sim.echo import EOS


class HandEngine:
    """Implements `EngineClient`. `bench` is replaced when the engine dies."""

    def __init__(
        self, stage: Stage | None = None, make_bench: Callable[[Stage], Bench] = Bench
    ) -> None:
        self._stage = stage or Stage()
        self._make_bench = make_bench
        self._commands: list[EngineCommand] = []
        self._events: list[EngineEvent] = []
        self._listener: EventListener | None = None
        self._is_blocked = True
        self._epoch = 0
        self.is_up = False
        self.is_full = False
        self.bench = make_bench(self._stage)

    # -- EngineClient

    async def start(self, listener: EventListener) -> EngineReady:
        """See `EngineClient.start`."""
        self._listener = listener
        return self._come_up()

    def send(self, command: EngineCommand) -> None:
        """See `EngineClient.send`."""
        if not self.is_up or self.is_full:
            raise EngineUnavailable("no engine")
        match command:
            case OpenSession(session_id=session_id, tenant_salt=salt):
                self.bench.salts[session_id] = salt
            case SubmitTurn(session_id=session_id, turn_id=turn_id):
                self.bench.sessions[turn_id] = session_id
        self._commands.append(command)

    async def stop(self) -> None:
        """See `EngineClient.stop`."""
        self.is_up = False

    # -- levers

    @property
    def is_busy(self) -> bool:
        """Whether another step would make a difference."""
        is_working = bool(self._commands or len(self.bench.runner) or not self._is_blocked)
        return self.is_up and is_working

    @property
    def has_news(self) -> bool:
        """Whether events wait to be delivered."""
        return bool(self._events)

    def step(self) -> None:
        """One step of the engine, if there is anything to do."""
        if not self.is_busy:
            return
        commands, self._commands = tuple(self._commands), []
        runner = self.bench.runner
        results = (runner.execute(),) if self._is_blocked and len(runner) else ()
        outcome = self.bench.step(*commands, results=results)
        self._is_blocked = outcome.is_blocked
        self._events.extend(outcome.events)

    def deliver(self) -> None:
        """Tell the manager everything it has not heard."""
        assert self._listener is not None
        events, self._events = self._events, []
        for event in events:
            self._listener(event)

    def crash(self) -> None:
        """The engine is gone, with what it held and all that was under way to and from it."""
        self.is_up = False
        self._commands, self._events = [], []
        self._is_blocked = True
        self.bench = self._make_bench(self._stage)

    def tell_death(self, *, will_restart: bool = True) -> None:
        """The supervisor has noticed."""
        self._events.append(EngineDied(message="killed", will_restart=will_restart))

    def revive(self) -> None:
        """A new engine, which knows no session."""
        self._events.append(self._come_up())

    def _come_up(self) -> EngineReady:
        self._epoch += 1
        self.is_up = True
        stage = self._stage
        return EngineReady(
            epoch=self._epoch,
            max_turn_len=self.bench.engine.max_turn_len,
            vocab_size=stage.vocab_size,
            eos_token_ids=(EOS,),
            page_size=stage.page_size,
            num_pages=stage.num_pages,
            device="echo",
            dtype="none",
            backend="echo",
        )
