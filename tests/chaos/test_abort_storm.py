"""Thousands of aborts as fast as they can be sent: exact, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from session_server.local_server import LocalServer
from tests.chaos.test_slow_readers import other
from tests.rig.decisions import Decisions
from tests.rig.echo_server import echo_server
from tests.rig.history import ENDS
from tests.rig.recovery import Reckoning, assert_books_balance
from tests.rig.scene import echo_turn
from tests.web.wire_client import http_client, open_wire

NUM_STORMERS = 10
NUM_OTHERS = 4
ABORTS_EACH = 300
IN_LINE = 4
MAX_HISTORY = 300


async def stormer(url: str, number: int, saw: Counter[str]) -> None:
    """Asks for turns and aborts them, several in line; at the end every one of them is known."""
    chance, known = Decisions(11, number), Reckoning()
    async with open_wire(url) as wire:
        session_id = (await wire.receive())["session_id"]
        bodies: dict[str, dict[str, Any]] = {}
        num_refused = 0
        for index in range(ABORTS_EACH):
            body = echo_turn(chance, f"t{index}", max_tokens=30, max_inputs=3)
            bodies[body["turn_id"]] = body
            keep = len(known.tokens) < MAX_HISTORY and chance.happens(0.5)
            await wire.send("turn.create", **body)
            await wire.send("turn.cancel", turn_id=body["turn_id"], keep_partial=keep)
            # The beginning of a name, or the name of another session's turn, aborts nothing.
            await wire.send("turn.cancel", turn_id=body["turn_id"] + "x", keep_partial=False)
            is_last = index == ABORTS_EACH - 1
            # The end of a turn in line may come before the refusal of a cancel sent after it.
            while len(bodies) >= IN_LINE or (is_last and (bodies or num_refused <= index)):
                frame = await wire.receive()
                if frame["type"] in ENDS:
                    known.hear(bodies.pop(frame["turn_id"]), frame)
                    saw[frame["type"]] += 1
                elif frame["type"] == "error":
                    saw[frame["error"]["code"]] += 1
                    num_refused += frame["error"]["code"] == "turn_not_found"
                    assert frame["error"]["code"] in ("turn_not_found", "turn_not_active"), frame
    async with http_client(url) as http:
        assert (await http.get(f"/v1/sessions/{session_id}")).json()["tokens"] == len(known.tokens)
        await http.delete(f"/v1/sessions/{session_id}")


async def scenario(server: LocalServer) -> None:
    saw: Counter[str] = Counter()
    turns, is_over = list[int](), asyncio.Event()
    others = [asyncio.create_task(other(server.url, n, turns, is_over)) for n in range(NUM_OTHERS)]
    while len(turns) < NUM_OTHERS:
        await asyncio.sleep(0.01)
    before, started_s = Counter(turns), time.monotonic()
    await asyncio.gather(*(stormer(server.url, n, saw) for n in range(NUM_STORMERS)))
    seconds, progress = time.monotonic() - started_s, Counter(turns) - before
    is_over.set()
    await asyncio.gather(*others)
    num_aborts = NUM_STORMERS * ABORTS_EACH
    print(dict(saw), dict(progress), f"{2 * num_aborts / seconds:.0f} cancels/s")
    assert sum(saw[kind] for kind in ENDS) == num_aborts
    assert saw["turn.cancelled"] > num_aborts // 2
    assert saw["turn_not_found"] == num_aborts
    assert len(progress) == NUM_OTHERS, "nobody else was stopped"


def test_an_abort_storm_hits_what_it_names_and_nobody_else() -> None:
    with echo_server() as server:
        asyncio.run(asyncio.wait_for(scenario(server), 250))
        assert_books_balance(server.url, is_running=False)
        assert server.stop() == 0
