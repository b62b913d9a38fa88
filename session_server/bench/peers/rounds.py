"""Measure systems in turns: in every round each of them runs a cell while the others are stopped.

A machine whose speed drifts affects them alike, and a resting server, whose threads may spin, takes
nothing from the one that is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from session_server.bench.peers.cells import Cell, figure_of
from session_server.bench.peers.system import PeerConversation, System, TurnTrace, pause, resume

FIRST_TOKEN_ID: Final = 300
"""Ids below it are bytes and control tokens."""


@contextlib.contextmanager
def all_paused(systems: Sequence[System]) -> Iterator[None]:
    """Start systems one after the other, each with nothing running beside it, and leave all paused
    until the end, when they are stopped."""
    with contextlib.ExitStack() as stack:
        for system in systems:
            stack.enter_context(system)
            stack.callback(resume, system.pid)  # a paused process does not exit
            pause(system.pid)
        yield


class Tokens:
    """Make the same ordinary token ids for every system, different in every turn."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def draw(self, count: int, *where: object) -> list[int]:
        """Return `count` ids for the place `where`."""
        chosen = random.Random(repr(where))
        return [chosen.randrange(FIRST_TOKEN_ID, self._vocab_size) for _ in range(count)]


async def measure_cell(
    systems: Sequence[System],
    cell: Cell,
    tokens: Tokens,
    *,
    num_rounds: int,
    on_visit: Callable[[], None],
) -> Mapping[str, list[float]]:
    """Return the figure of every round, by the system's name. All systems are paused before and
    after; `on_visit` is called after each round of each of them."""
    figures: dict[str, list[float]] = {system.name: [] for system in systems}
    kept: dict[str, list[PeerConversation]] = {}
    for system in systems:
        with _awake(system):
            kept[system.name] = await _prepare(system, cell, tokens)
    for number in range(num_rounds):
        for i in range(len(systems)):
            system = systems[(number + i) % len(systems)]
            with _awake(system):
                turns = await _visit(system, cell, tokens, number, kept=kept[system.name])
            figures[system.name].append(figure_of(cell.figure, turns))
            on_visit()
    for system in systems:
        with _awake(system):
            await asyncio.gather(*(each.close() for each in kept[system.name]))
    return figures


async def _prepare(system: System, cell: Cell, tokens: Tokens) -> list[PeerConversation]:
    """Return conversations with the history of a cell; none if it needs none: a visit then goes
    before the rounds, so that none of them is the first."""
    if cell.history == 0:
        await _visit(system, cell, tokens, -1, kept=[])
        return []
    kept = [await system.open(slot) for slot in range(cell.num_sessions)]
    for slot, conversation in enumerate(kept):
        await conversation.prefill(tokens.draw(cell.history, cell.name, "history", slot))
    return kept


async def _visit(
    system: System, cell: Cell, tokens: Tokens, number: int, *, kept: list[PeerConversation]
) -> list[list[TurnTrace]]:
    """Run the turns of a cell once, in `kept` conversations or new ones."""
    conversations = kept or [await system.open(slot) for slot in range(cell.num_sessions)]

    async def converse(slot: int, conversation: PeerConversation) -> list[TurnTrace]:
        return [
            await conversation.turn(
                tokens.draw(cell.num_new, cell.name, number, slot, turn), cell.num_output
            )
            for turn in range(cell.num_turns)
        ]

    turns = await asyncio.gather(*(converse(*each) for each in enumerate(conversations)))
    if not kept:
        await asyncio.gather(*(each.close() for each in conversations))
    return turns


@contextlib.contextmanager
def _awake(system: System) -> Iterator[None]:
    resume(system.pid)
    try:
        yield
    finally:
        pause(system.pid)
