"""Who reads on after a restart and names no epoch is told what was missed, and skips nothing."""

from __future__ import annotations

from pathlib import Path

from tests.web.serving import turn
from tests.web.test_admin_stored import run, served_from
from tests.web.test_rest import next_event


def test_no_number_of_an_entry_is_used_again(tmp_path: Path) -> None:
    async def check() -> None:
        async with served_from(tmp_path) as this:
            session_id = await this.open()
            path = f"/v1/sessions/{session_id}"
            await this.http.post(f"{path}/turns", json=turn(turn_id="before"))
            seen = (await this.http.get(path)).json()["seq"]
            assert seen > 2
        async with served_from(tmp_path) as this:
            for turn_id in ("after", "later"):  # as many entries as there were, and more
                await this.http.post(f"{path}/turns", json=turn(turn_id=turn_id))
            # As a browser does by itself; and as whoever keeps the number alone.
            for asked in ({"headers": {"last-event-id": str(seen)}}, {"params": {"after": seen}}):
                async with this.http.stream("GET", f"{path}/events", **asked) as answer:
                    lines = answer.aiter_lines()
                    failed = (await next_event(lines))["data"]
                    assert failed == {"type": "session.resume_failed", "reason": "offset_lost"}
                    snapshot = (await next_event(lines))["data"]
                    assert len(snapshot["items"]) == 6
            async with this.socket(session_id, f"?after={seen}") as wire:
                assert not wire.hello["resumed"]
                assert (await wire.receive())["reason"] == "offset_lost"
                assert (await wire.receive())["type"] == "session.snapshot"
            now = (await this.http.get(path)).json()["seq"]
            async with this.socket(session_id, f"?after={now - 1}") as wire:
                assert wire.hello["resumed"]
                assert (await wire.receive())["seq"] == now

    run(check)
