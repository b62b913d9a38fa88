"""A line of which half is dead, or all of it and nobody was told: the next turn sees the history.

Lines that are cut or reset at every byte are in `tests/faults`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from session_server.core.owner import ANONYMOUS
from tests.depth import at_depth
from tests.rig.decisions import Decisions
from tests.rig.history import ENDS
from tests.rig.proxy import CALM, ChaosProxy, Direction, Fate, Fault
from tests.rig.socket_client import LOST
from tests.sessions.paper_engine import PaperEngine
from tests.web.serving import Served, serving
from tests.web.wire_client import open_wire, turn

FIRST = turn(input_ids=[7, 8, 9], max_tokens=3)
STRUCK = turn(input_ids=[10, 11], max_tokens=3)
NEXT = turn(input_ids=[12], max_tokens=3)
FAULTS = (Fault.HALF_CLOSE, Fault.BLACKHOLE)
UP_STEP, DOWN_STEP = at_depth((8, 20), proof=(2, 5))
"""Between two bytes that are struck, of the words and of the longer answer."""

MIN_STRUCK = at_depth(25, proof=101)
"""Lines that each fault strikes, at least."""

PAST_END = 16
PATIENCE_S = 0.03
"""Of a client that hears nothing; it then comes back on another line, and the server still believes
in the first."""


@dataclass
class Blow:
    """Where the next connection is struck."""

    fault: Fault
    direction: Direction
    offset: int


class AimedProxy(ChaosProxy):
    """Strikes every connection where it is told to, instead of by chance."""

    blow: Blow | None = None

    def fate(self, number: int) -> Fate:
        """See `ChaosProxy.fate`."""
        blow = self.blow
        fault = None if blow is None else (blow.fault, blow.direction, blow.offset)
        return replace(super().fate(number), fault=fault)


def blows(num_up: int, num_down: int) -> Iterator[Blow]:
    ends: tuple[tuple[Direction, int, int], ...]
    ends = (("up", num_up, UP_STEP), ("down", num_down, DOWN_STEP))
    for direction, num_bytes, step in ends:
        for offset in range(0, num_bytes + PAST_END, step):
            yield Blow(Decisions(1, direction, offset).pick(FAULTS), direction, offset)


async def struck_turn(proxy: AimedProxy, session_id: str, **fields: Any) -> str:
    """A turn over a line that is struck; how it looked to the client."""
    kind = "nothing heard"
    is_dark = proxy.blow is not None and proxy.blow.fault is Fault.BLACKHOLE
    with contextlib.suppress(*LOST):
        async with (
            asyncio.timeout(PATIENCE_S if is_dark else None),
            open_wire(proxy.url, session_id, open_timeout=None) as wire,
        ):
            wire.hello = await wire.receive()
            await wire.send("turn.create", turn_id="struck", **STRUCK, **fields)
            while not kind.startswith("turn.c") or kind == "turn.created":
                kind = (await wire.receive())["type"]
    return kind


async def after_it(this: Served[PaperEngine], session_id: str, kind: str) -> str:
    """The next turn, at once; what must have become of the struck one."""
    async with this.socket(session_id) as wire:
        end = await wire.turn("next", **NEXT)
        while end["turn_id"] == "struck":  # what the lost connection left may end only now
            end = await wire.until(*ENDS, "error")
    view = this.sessions.get(ANONYMOUS, session_id)
    items = this.sessions.snapshot(ANONYMOUS, session_id).items
    ran = [item.turn_id for item in items if item.role == "assistant"]
    assert end["type"] == "turn.completed"
    assert end["usage"]["total_tokens"] == view.num_tokens
    assert ran in (["first", "next"], ["first", "struck", "next"])
    has_run = "struck" in ran
    # A turn that was to end with its connection may have kept less than all of it.
    history_len = [item.end_len for item in items if item.turn_id != "next"][-1]
    assert end["usage"]["input_tokens"] == history_len + 1
    assert history_len in (range(8, 12) if has_run else (6,))
    assert has_run or kind not in ("turn.delta", "turn.completed"), "it was told of its tokens"
    return "ran" if has_run else "never came"


def test_R3_a_line_half_dead_from_any_byte_on_leaves_an_exact_history() -> None:
    saw: Counter[str] = Counter()

    async def strike(this: Served[PaperEngine], proxy: AimedProxy, blow: Blow | None) -> None:
        session_id = await this.open()
        async with this.socket(session_id) as wire:
            await wire.turn("first", **FIRST)
        proxy.blow = blow
        on_disconnect = "cancel" if saw.total() % 2 else "detach"
        async with asyncio.timeout(60):
            kind = await struck_turn(proxy, session_id, on_disconnect=on_disconnect)
            became = await after_it(this, session_id, kind)
        if blow is not None:
            saw[f"{blow.fault.value}: heard {kind}, {became}"] += 1
        this.sessions.close(ANONYMOUS, session_id)

    async def test() -> None:
        dark = replace(CALM, blackhole_s=3600.0)
        async with serving() as this, AimedProxy(this.url, dark) as proxy:
            await strike(this, proxy, None)
            num_up, num_down = proxy.did["bytes_up"], proxy.did["bytes_down"]
            for blow in blows(num_up, num_down):
                await strike(this, proxy, blow)
            assert min(proxy.did[fault.value] for fault in FAULTS) >= MIN_STRUCK, (num_up, num_down)

    asyncio.run(test())
    for fault in FAULTS:
        assert len({what for what in saw if what.startswith(fault.value)}) >= 5, saw
