"""One session and what happens to it between two turns, through the real engine and runner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, get_args

import pytest
from msgspec.structs import replace

from session_server.core.batch import StepResult
from session_server.core.commands import (
    CancelTurn,
    EngineCommand,
    FlushCache,
    OpenSession,
)
from session_server.core.events import (
    CacheFlushed,
    EngineEvent,
    TokensProduced,
    TurnFailed,
    TurnFinished,
)
from session_server.core.ids import SessionId
from tests.oracle.talks import MAX_STEPS, Setup, Talk, load_engine

Event = Literal["rollback", "cut", "cool", "rewind", "rewind and cool", "fork"]
EVENTS: Final[tuple[Event, ...]] = get_args(Event)

_NUM_CUT: Final = 3
_REWOUND: Final = 5


class Stage:
    """An engine and its runner, one step at a time."""

    def __init__(self, setup: Setup, directory: Path) -> None:
        self._runner, self._engine = load_engine(setup, directory)
        self._num_in_flight = 1 + setup.overlap
        self._in_flight: deque[StepResult] = deque()
        self._now_s = 0.0

    def play(self, *commands: EngineCommand, until: Callable[[EngineEvent], bool]) -> None:
        """Send commands and step until an event that is waited for."""
        waiting = list(commands)
        for _ in range(MAX_STEPS):
            is_full = len(self._in_flight) >= self._num_in_flight
            results = [self._in_flight.popleft()] if is_full else []
            self._now_s += 0.01
            outcome = self._engine.step(self._now_s, waiting, results)
            waiting = []
            if outcome.batch is not None:
                self._in_flight.append(self._runner.launch(outcome.batch).wait())
            elif self._in_flight:
                late = self._engine.step(self._now_s, [], [self._in_flight.popleft()])
                outcome.events.extend(late.events)
                if late.batch is not None:
                    self._in_flight.append(self._runner.launch(late.batch).wait())
            for event in outcome.events:
                if isinstance(event, TurnFailed):
                    pytest.fail(f"{event.code}: {event.message}")
            heard = [until(event) for event in outcome.events]
            if any(heard):
                return
        pytest.fail("what was waited for never happened")

    def turn(self, talk: Talk, *before: EngineCommand) -> None:
        """The next turn of a talk, to its end."""

        def hear(event: EngineEvent) -> bool:
            if isinstance(event, TokensProduced):
                talk.hear(event)
            return isinstance(event, TurnFinished)

        self.play(*before, talk.next_turn(), until=hear)

    def cancelled_turn(self, talk: Talk, num_kept: int | None) -> None:
        """A turn that is cancelled when it has said something; so many of its outputs stay."""
        turn = talk.next_turn()
        long = replace(turn, sampling=replace(turn.sampling, max_tokens=40))
        said: list[int] = []

        def speaks(event: EngineEvent) -> bool:
            said.extend(event.token_ids if isinstance(event, TokensProduced) else ())
            return len(said) > _NUM_CUT

        self.play(long, until=speaks)
        cancel = CancelTurn(turn_id=turn.turn_id, num_outputs=num_kept)
        self.play(cancel, until=lambda event: isinstance(event, TurnFinished))
        if num_kept is None:
            del talk.tokens[turn.base_len :]
        else:
            talk.tokens += said[:num_kept]

    def flush(self) -> None:
        """Cool every session, and forget what was published."""
        self.play(FlushCache(request_id=1), until=lambda event: isinstance(event, CacheFlushed))


def tell(event: Event, setup: Setup, directory: Path, first: int) -> Talk:
    """A turn of `first` tokens, the event, and a last turn, whose answers are heard."""
    stage = Stage(setup, directory)
    talk = Talk(SessionId("s"), (first, 9, 5))
    stage.turn(talk, OpenSession(session_id=talk.session_id, tenant_salt="t"))
    match event:
        case "rollback":
            stage.cancelled_turn(talk, None)
        case "cut":
            stage.cancelled_turn(talk, 1)
        case "cool":
            stage.flush()
        case "rewind" | "rewind and cool":
            stage.turn(talk)
            del talk.tokens[first + _REWOUND :]
            if event == "rewind and cool":
                stage.flush()
        case "fork":
            # A session with the same history finds what this one has published.
            talk.session_id = SessionId("fork")
            history = tuple(talk.tokens)
            name = talk.session_id
            stage.turn(talk, OpenSession(session_id=name, tenant_salt="t", tokens=history))
    talk.outputs.clear()
    stage.turn(talk)
    talk.pieces = talk.pieces[-1:]
    return talk
