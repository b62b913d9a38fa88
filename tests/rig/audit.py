"""After a client has gone: the whole truth about its session, by a clean line, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from tests.rig.history import ENDS, End, Frame, SessionLog, violations
from tests.rig.scene import Scene
from tests.web.wire_client import Wire, greeted


async def audit(scene: Scene, http: httpx.AsyncClient, name: str, log: SessionLog) -> None:
    """Check what the session is against what its client was told; then close it.

    `http` and the sockets used here lead past the proxy.
    """
    path = f"/v1/sessions/{log.session_id}"
    while not _is_idle(view := (await http.get(path)).json()):
        await asyncio.sleep(0.02)
    items = (await http.get(f"{path}/items")).json()["data"]
    query = f"?after=0&epoch={view['epoch']}"
    async with greeted(scene.direct_url, log.session_id, query) as wire:
        journal: list[Frame] = []
        position = 0
        while position < view["seq"]:
            journal.append(await wire.receive())
            position = journal[-1]["seq"]
        found = [*violations(log, journal, items, view["tokens"])]
        found += await _repetitions(wire, log)
        await wire.send("session.close")
        if (code := await wire.close_code()) != 4410:
            found.append(f"closed with {code}")
    if (gone := await http.get(path)).status_code != 404:
        found.append(f"still there after its close: {gone.text}")
    _count(scene, log, journal)
    scene.problems += [f"{name} {log.session_id}: {line}" for line in found]


async def _repetitions(wire: Wire, log: SessionLog) -> list[str]:
    """Every turn whose end is known, asked for once more, is the same turn and not another one."""
    found = []
    known = [
        ask
        for ask in log.asks.values()
        if ask.end is not None and ask.end.status != "failed" and "input_ids" in ask.body
    ]
    for ask in known:
        await wire.send("turn.create", **{**ask.body, "turn_id": ask.turn_id})
        again = await wire.until(*ENDS, "error")
        if again["type"] not in ENDS or "seq" in again or End.of_frame(again) != ask.end:
            found.append(f"{ask.turn_id}: told {ask.end}, asked again {again}")
    if known:
        await wire.send("turn.create", turn_id=known[0].turn_id, text="other words")
        refused = await wire.until(*ENDS, "error")
        if refused["type"] != "error" or refused["error"]["code"] != "turn_conflict":
            found.append(f"{known[0].turn_id} with another body: {refused}")
    return found


def _is_idle(view: dict[str, Any]) -> bool:
    return view["running_turn"] is None and view["queued_turns"] == 0


def _count(scene: Scene, log: SessionLog, journal: Sequence[Frame]) -> None:
    scene.saw["sessions"] += 1
    scene.saw["unknown ends"] += len(log.unknown)
    for frame in journal:
        if frame["type"] in ENDS:
            kept = {None: "", True: " and kept", False: " and dropped"}[frame.get("kept_partial")]
            scene.saw[frame["type"] + kept] += 1
