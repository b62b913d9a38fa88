"""A little of everything that metrics count, over the sockets of a server."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import httpx

from tests.web.wire_client import Wire, greeted, http_client, turn

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LONG = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


async def work(url: str, *, said: str = "rivers") -> None:
    """Run turns that complete, are canceled, fail and are refused; draft, come back, close. `said`
    is in whatever is sent as content, and nowhere else."""
    async with http_client(url) as http, greeted(url) as wire:
        session_id, epoch = wire.hello["session_id"], wire.hello["epoch"]
        for number in range(3):
            await wire.turn(f"t{number}", text=f"Tell me of {said}.", sampling=LONG)
        await _draft(wire, said)
        await _cancel(wire, said)
        await wire.turn("odd", text=f"More {said}", max_tokens=10**9)
        await wire.send("turn.cancel", turn_id="nobody")
        await wire.until("error")
        for after in (1, 10**6):
            async with greeted(url, session_id, f"?after={after}&epoch={epoch}"):
                pass
        await _over_http(http, said)


async def _draft(wire: Wire, said: str) -> None:
    text = f"{said}: a long beginning of a question that is typed, word by word, and then sent"
    await wire.send("turn.draft", turn_id="d1", text=text)
    await wire.until("turn.drafted", "error")
    await wire.turn("d1", text=text, max_tokens=4)


async def _cancel(wire: Wire, said: str) -> None:
    await wire.send("turn.create", turn_id="long", **turn(f"Count {said}", max_tokens=400))
    await wire.until("turn.delta", "error")
    await wire.send("turn.cancel", turn_id="long")
    await wire.until("turn.cancelled", "turn.completed", "error")


async def _over_http(http: httpx.AsyncClient, said: str) -> None:
    session = (await http.post("/v1/sessions", json={"metadata": {"about": said}})).json()["id"]
    body = {"text": f"Hello {said}", "sampling": {"max_tokens": 8}}
    await http.post(f"/v1/sessions/{session}/turns", json=body)
    await http.get(f"/v1/sessions/{said}?x={said}")
    await http.post("/v1/sessions", content=f"{{{said}")
    fresh = {**SCHEMA, "title": f"{said} {secrets.token_hex(4)}"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": fresh}}
    messages = [{"role": "user", "content": f"{said}?"}]
    chat = {"messages": messages, "max_tokens": 16, "response_format": form}
    await http.post("/v1/chat/completions", json=chat)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2), http.stream("GET", f"/v1/sessions/{session}/events") as s:
            await anext(s.aiter_bytes())
    await http.delete(f"/v1/sessions/{session}")
    await http.post("/flush_cache")
