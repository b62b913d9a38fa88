"""An engine's events are handed on in slices, in order, and joined where the server is behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from session_server.core.events import EngineEvent, EnginePulse, TokensProduced
from session_server.core.ids import TurnId
from session_server.core.sampling import TokenLogprob
from session_server.engine_host.event_slices import EVENTS_AT_ONCE, EventSlices


class Heard:
    """What was handed on, iteration by iteration of the event loop."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.errors: list[Exception] = []
        self.num_emptied = 0
        self.slices = EventSlices(self.hear, on_failed=self.errors.append, on_empty=self.empty)

    def hear(self, event: EngineEvent) -> None:
        self.events.append(event)

    def empty(self) -> None:
        self.num_emptied += 1

    async def sizes(self) -> list[int]:
        """Events handed on in each iteration, until none is left."""
        sizes = []
        while self.slices:
            before = len(self.events)
            await asyncio.sleep(0)
            sizes.append(len(self.events) - before)
        return sizes

    def tokens_of(self, name: str) -> list[int]:
        of_turn = (each for each in self.events if isinstance(each, TokensProduced))
        return [token for each in of_turn if each.turn_id == name for token in each.token_ids]


def output(name: str, *token_ids: int, logprobs: Sequence[TokenLogprob] = ()) -> TokensProduced:
    return TokensProduced(turn_id=TurnId(name), token_ids=token_ids, logprobs=tuple(logprobs))


def step(num_turns: int, token: int = 7) -> list[EngineEvent]:
    return [output(f"t{number}", token) for number in range(num_turns)]


@pytest.mark.parametrize(
    ("num_turns", "sizes"),
    [
        (EVENTS_AT_ONCE - 1, [EVENTS_AT_ONCE - 1]),
        (EVENTS_AT_ONCE, [EVENTS_AT_ONCE]),
        (EVENTS_AT_ONCE + 1, [EVENTS_AT_ONCE, 1]),
        (200, [EVENTS_AT_ONCE] * (200 // EVENTS_AT_ONCE) + [200 % EVENTS_AT_ONCE]),
    ],
)
def test_a_step_of_many_turns_is_handed_on_in_slices(num_turns: int, sizes: list[int]) -> None:
    async def scenario() -> None:
        heard, events = Heard(), step(num_turns)
        heard.slices.add(events)
        assert await heard.sizes() == sizes
        assert heard.events == events
        assert heard.num_emptied == 1

    asyncio.run(scenario())


def test_a_step_behind_one_that_waits_joins_its_outputs_and_passes_nothing_else() -> None:
    async def scenario() -> None:
        heard, first, second = Heard(), TokenLogprob(1, -0.5), TokenLogprob(2, -0.25)
        heard.slices.add(step(EVENTS_AT_ONCE))
        heard.slices.add([*step(EVENTS_AT_ONCE), output("late", 1, logprobs=[first])])
        heard.slices.add([output("late", 2, logprobs=[second]), output("t0", 8)])
        heard.slices.add([EnginePulse(stalled_s=0.0), output("late", 3), output("late", 4)])
        assert await heard.sizes() == [EVENTS_AT_ONCE, 3]
        assert heard.tokens_of("t0") == [7, 7, 8]
        assert heard.events[0] == output("t0", 7, 7, 8)
        assert heard.events[-3:] == [
            output("late", 1, 2, logprobs=[first, second]),
            EnginePulse(stalled_s=0.0),
            output("late", 3, 4),
        ]

    asyncio.run(scenario())


def test_what_waits_is_handed_on_at_once_where_the_engine_has_ended() -> None:
    async def scenario() -> None:
        heard, events = Heard(), step(3 * EVENTS_AT_ONCE)
        heard.slices.add(events)
        heard.slices.finish()
        assert heard.events == events
        await asyncio.sleep(0)
        assert heard.events == events
        assert heard.num_emptied == 1

    asyncio.run(scenario())


def test_an_event_that_cannot_be_handled_drops_those_behind_it() -> None:
    async def scenario() -> None:
        heard = Heard()
        heard.slices = EventSlices(
            lambda event: heard.events.append(event) or 1 // (len(heard.events) != 40),
            on_failed=heard.errors.append,
        )
        heard.slices.add(step(200))
        await heard.sizes()
        assert len(heard.events) == 40
        assert [type(error) for error in heard.errors] == [ZeroDivisionError]

    asyncio.run(scenario())
