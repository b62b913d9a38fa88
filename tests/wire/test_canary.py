"""A secret that clients send appears in answers to its owner and nowhere else: no log, metric,
error, report, file, command line or environment of a process.

Where a word of ours is expected (a type, a field's name, a schema), an error quotes what it found
to the client that wrote it; that word is in nothing else either.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from session_server.core.owner import KEY_VARIABLE
from session_server.demo import MODEL_DIR
from session_server.local_server import LocalServer
from tests.rig.processes import engine_pid
from tests.text.tool_templates import HERMES
from tests.wire.conftest import SMALL

ROOT = Path(__file__).resolve().parents[2]
CANARY = "plover7731xyzzy"
WORD = "quoted5519word"
KEY, OTHER_KEY = f"sk-{CANARY}", f"env-{CANARY}"


def spellings(secret: str) -> tuple[str, ...]:
    """A secret as it could be written down."""
    in_base64 = [base64.b64encode((" " * n + secret).encode()).decode()[4:-4] for n in range(3)]
    return (secret, secret[::-1], secret.encode().hex(), *in_base64)


LAUNCH = f"""
import os, sys
os.chdir(sys.argv[1])
os.environ.update(TMPDIR=sys.argv[1] + "/tmp", HOME=sys.argv[1], PYTHONPATH={str(ROOT)!r})
os.environ[{KEY_VARIABLE!r}] = sys.argv[2]
argv = [sys.executable, "-m", "session_server", "serve", *sys.argv[3:]]
os.execv(sys.executable, argv)
"""
Told = tuple[str, object] | tuple[str, object, str]
"""A text, where it was found, and what must not be in it, unless that is every secret."""

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": CANARY,
        "parameters": {"type": "object", "properties": {CANARY: {"type": "string"}}},
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "f", "arguments": json.dumps({CANARY: CANARY})},
}
OWN_CALL = {"id": "abcdefghi", "name": "f", "arguments": json.dumps({CANARY: CANARY})}


def messages(call: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation that calls a tool."""
    return [
        {"role": "system", "content": CANARY},
        {"role": "user", "content": CANARY},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": CANARY},
        {"role": "user", "content": CANARY},
    ]


SAMPLING = {"max_tokens": 3, "temperature": 0}


def assert_clean(text: str, where: object, *secrets: str) -> None:
    for secret in secrets or (CANARY, WORD):
        found = [each for each in spellings(secret) if each in text]
        assert not found, (where, text[max(0, text.find(found[0]) - 200) :][:500])


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_secret_is_told_to_its_owner_alone(tmp_path: Path, log_format: str) -> None:
    (tmp_path / "tmp").mkdir()
    keys = tmp_path.with_suffix(".keys")  # beside what the server may write to
    keys.write_text(f"alice {KEY} admin=1\n", "utf-8")
    keys.chmod(0o600)
    lines: list[str] = []
    flags = [*SMALL, "--log-level", "debug", "--log-format", log_format]
    flags += ["--model-path", str(model_with_tools(tmp_path.with_suffix(".model")))]
    flags += ["--api-key-file", str(keys), "--throughput-interval", "0.5"]
    program = (sys.executable, "-c", LAUNCH, str(tmp_path), OTHER_KEY)
    with LocalServer(flags, program=program, on_line=lines.append) as server:
        for told in tell_everywhere(server):
            assert_clean(*told)
        for process in psutil.Process(server.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                assert_clean(str(process.cmdline()) + str(process.environ()), "a child process")
        assert server.stop() == 0
    assert any("turn finished" in line for line in lines)
    assert any("engine died" in line for line in lines)
    assert_clean("\n".join(lines), "the log")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert_clean(str(path) + path.read_bytes().decode("latin-1"), path)


def model_with_tools(path: Path) -> Path:
    """The embedded model with a template that takes tools."""
    shutil.copytree(MODEL_DIR, path)
    (path / "chat_template.jinja").write_text(HERMES, "utf-8")
    return path


def tell_everywhere(server: LocalServer) -> Iterator[Told]:
    """Send the secret in whatever takes one; yield every text that is no answer to it."""
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=60) as http:
        session_id = http.post("/v1/sessions", json={"metadata": {"said": CANARY}}).json()["id"]
        ask_all_dialects(http, session_id)
        yield from refusals(http, session_id)
        yield from raw_refusals(server)
        yield from asyncio.run(asyncio.wait_for(by_socket(server, http, session_id), 60))
        yield from crash(server, http)
        for path in (
            "/metrics",
            "/server_info",
            "/v1/admin/memory?full=1",
            "/health",
            "/v1/models",
        ):
            yield http.get(path).text, path
    audit = [sys.executable, "-m", "session_server", "audit", "--url", server.url]
    for more in ([], ["--full", "--trace", "--json"]):
        done = subprocess.run(
            [*audit, "--api-key", KEY, *more], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        yield done.stdout + done.stderr, "audit"
    wrong = subprocess.run(
        [*audit, "--api-key", f"no-{CANARY}"], capture_output=True, text=True, check=False
    )
    yield wrong.stdout + wrong.stderr, "audit with a wrong key"


def ask_all_dialects(http: httpx.Client, session_id: str) -> None:
    """One turn by each dialect, with the secret in every text."""
    functions = [{"type": "function", "name": "f", **TOOL["function"]}]  # type: ignore[dict-item]
    for path, body in (
        (f"/v1/sessions/{session_id}/turns", {"input": messages(OWN_CALL), "sampling": SAMPLING}),
        (f"/v1/sessions/{session_id}/draft", {"draft_id": "d", "text": CANARY}),
        ("/v1/chat/completions", {"messages": messages(CALL), "tools": [TOOL], **SAMPLING}),
        ("/v1/completions", {"prompt": CANARY, "stop": [CANARY], **SAMPLING}),
        ("/v1/responses", {"input": CANARY, "instructions": CANARY, "max_output_tokens": 3}),
        ("/v1/responses", {"input": CANARY, "tools": functions, "max_output_tokens": 3}),
        ("/v1/conversations", {"items": [{"role": "user", "content": CANARY}]}),
        ("/generate", {"text": CANARY, "sampling_params": {"max_new_tokens": 3}}),
    ):
        answer = http.post(path, json=body, params={CANARY: CANARY})
        assert answer.status_code == 200, (path, answer.text)


def refusals(http: httpx.Client, session_id: str) -> Iterator[Told]:
    """Requests that are refused."""
    turns, chat = f"/v1/sessions/{session_id}/turns", "/v1/chat/completions"
    schema = {"type": WORD, "pattern": f"({WORD}"}
    said = {"messages": messages(CALL)[1:2]}
    for path, body in (
        (turns, {"text": CANARY, "sampling": {"top_k": CANARY}}),
        (turns, {"text": [CANARY]}),
        (turns, {"text": CANARY, "on_disconnect": WORD}),
        (turns, {"text": CANARY, WORD: 1}),
        (turns, {"text": CANARY, "sampling": {"regex": f"({WORD}"}}),
        (turns, {"text": CANARY, "sampling": {"json_schema": schema}}),
        (turns, {"text": CANARY, "sampling": {"stop": [CANARY * 100]}}),
        (chat, {**said, "response_format": {"type": WORD}}),
        (chat, {**said, "response_format": json_format(schema)}),
        (chat, {**said, "tools": [{"type": WORD}]}),
        (chat, {**said, "tool_choice": WORD}),
        (chat, {"messages": [{"role": WORD, "content": CANARY}]}),
        (chat, {"messages": [{"role": "user", "content": [{"type": WORD}]}]}),
        ("/v1/responses", {"input": [{"type": WORD}]}),
        ("/v1/responses", {"input": CANARY, "text": {"format": {"type": WORD}}}),
        ("/v1/responses", {"input": CANARY, "tools": [{"type": WORD}]}),
        ("/v1/completions", {"prompt": {CANARY: CANARY}}),
        ("/generate", {"text": CANARY, "sampling_params": {"regex": f"({WORD}"}}),
        ("/v1/sessions", {"metadata": {CANARY: [CANARY]}}),
        ("/v1/sessions", {"history": WORD}),
        ("/v1/sessions", {"messages": [{"role": WORD, "content": CANARY}]}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code >= 400, (path, body, answer.text)
        yield answer.text, (path, body), CANARY
    for payload in (
        f'{{"text": "{CANARY}',
        CANARY,
        f'{{"{WORD}": {CANARY}}}',
        f'"{CANARY}"',
        f"[{CANARY}]",
    ):
        answer = http.post(turns, content=payload)
        assert answer.status_code == 400, payload
        yield answer.text, payload, CANARY
    for name, status in (
        ("content-type", 415),
        ("last-event-id", 400),
        ("origin", 403),
        ("host", 421),
        ("authorization", 401),
    ):
        path = f"/v1/sessions/{session_id}/events" if name == "last-event-id" else turns
        method = "GET" if name == "last-event-id" else "POST"
        answer = http.request(
            method, path, headers={name: CANARY, "connection": "close"}, content=b"{}"
        )
        assert answer.status_code == status, (name, answer.text)
        yield answer.text, name
    for path in (f"/v1/sessions?limit={CANARY}", f"/v1/sessions?after={CANARY}", f"/{CANARY}?"):
        answer = http.get(f"{path}&api_key={KEY}&{CANARY}={CANARY}")
        assert answer.status_code in (400, 404), path
        yield answer.text, path


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def raw_refusals(server: LocalServer) -> Iterator[Told]:
    """Bytes that are hardly HTTP."""
    host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
    for payload in (
        f"GET /{CANARY} HTTP/1.1\r\n{CANARY}\r\n\r\n",
        f"{CANARY} / HTTP/1.1\r\nhost: x\r\n\r\n",
        f"GET / HTTP/1.1\r\nhost: {CANARY}/health?\r\n\r\n",
        f"GET / HTTP/1.1\r\nhost: x\r\nx-{CANARY}: \x01{CANARY}\r\n\r\n",
        f"GET / {CANARY}\r\n\r\n",
        f"GET http://{CANARY}/ HTTP/1.1\r\nhost: x\r\n\r\n",
        f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {CANARY}\r\n\r\n",
        f"GET / HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nx: {'x' * 70_000}\r\n\r\n",
        f"GET /v1/realtime?{CANARY} HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\n"
        f"connection: upgrade\r\nsec-websocket-protocol: {CANARY},ticket.{CANARY}\r\n\r\n",
    ):
        with socket.create_connection((host, port), timeout=60) as raw:
            raw.sendall(payload.encode("latin-1"))
            with contextlib.suppress(ConnectionError):
                raw.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while chunk := raw.recv(65536):
                    answer += chunk
            assert answer.startswith(b"HTTP/1.1 4"), (payload[:80], answer[:80])
            yield answer.decode("latin-1"), payload[:80]


async def by_socket(server: LocalServer, http: httpx.Client, session_id: str) -> list[Told]:
    """Frames that are refused, wrong tickets and keys, and one good ticket; what is told of it."""
    told: list[Told] = []
    base = server.url.replace("http", "ws", 1)
    frames = (
        CANARY,
        f'{{"type": "{WORD}"}}',
        f'{{"type": "turn.create", "text": "{CANARY}", "top_k": 1}}',
        f'{{"type": "response.create", "input": "{CANARY}", "model": 1, "{WORD}": 2}}',
        f'{{"type": "conversation.item.create", "item": {{"type": "{WORD}"}}}}',
        f'{{"type": "session.update", "session": {{"tools": [{{"type": "{WORD}"}}]}}}}',
    )
    paths = (f"/v1/sessions/{session_id}/ws", "/v1/realtime", "/v1/responses")
    for path in paths:
        ticket = http.post("/v1/ws-ticket").json()["ticket"]
        offers = ("kvsession.v1", "realtime", "responses", f"ticket.{ticket}")
        url = f"{base}{path}?{CANARY}={CANARY}"
        async with connect(url, proxy=None, subprotocols=offers) as ws:  # type: ignore[arg-type]
            for frame in frames:
                await ws.send(frame)
                while '"error"' not in (text := str(await ws.recv())):
                    pass
                told.append((text, (path, frame), CANARY))
            await ws.send(CANARY.encode())
            with contextlib.suppress(ConnectionClosed):
                while True:
                    await ws.recv()
            told.append((f"{ws.close_reason} {ws.response}", path))
        for wrong in (f"ticket.{ticket}", f"ticket.{CANARY}", f"bearer.{CANARY}"):
            for origin in (None, server.url):
                outcome = await outcome_of(url, (wrong, "realtime"), origin)
                assert ticket not in outcome
                told.append((outcome, (path, wrong[:8])))
    return told


async def outcome_of(url: str, offers: tuple[str, ...], origin: str | None) -> str:
    """All that a handshake and what follows it tell."""
    told = ""
    try:
        async with connect(url, proxy=None, subprotocols=offers, origin=origin) as ws:  # type: ignore[arg-type]
            with contextlib.suppress(ConnectionClosed):
                if "/sessions/" in url and "bearer" not in offers[0] and "ticket" not in offers[0]:
                    await ws.send(json.dumps({"type": "session.auth", "token": CANARY}))
                while True:
                    told += str(await ws.recv())
            return f"{told} {ws.close_reason} {ws.response}"
    except InvalidStatus as refused:
        return f"{refused.response.headers} {(refused.response.body or b'').decode()}"


def crash(server: LocalServer, http: httpx.Client) -> Iterator[Told]:
    """Kill the engine under a turn that says the secret; yield how the turn's stream ends."""
    body = {"text": CANARY, "sampling": {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}}
    session_id = http.post("/v1/sessions", json={}).json()["id"]
    accept = {"accept": "text/event-stream"}
    path = f"/v1/sessions/{session_id}/turns"
    with http.stream("POST", path, json=body, headers=accept) as stream:
        lines = stream.iter_lines()
        while "turn.delta" not in next(lines):
            pass
        os.kill(engine_pid(server), signal.SIGKILL)
        events = list(lines)
    failed = [line for line in events if "engine_restarting" in line]
    assert failed
    yield "\n".join(failed), "a turn that failed"
    while http.get("/ready").status_code != 200:
        pass
