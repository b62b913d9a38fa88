"""Processes die, operators say stop: what clients see, and what is left."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from session_server.demo import MODEL_DIR
from session_server.local_server import LocalServer
from session_server.web.listener import bind
from tests.rig.processes import engine_pid
from tests.rig.recovery import assert_books_balance
from tests.web.wire_client import Wire, greeted, open_wire
from tests.wire.conftest import FLAGS, SMALL


def turn(*input_ids: int, max_tokens: int = 8) -> dict[str, Any]:
    """A greedy turn of exact length."""
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return {"input_ids": list(input_ids), "sampling": sampling}


async def ask(wire: Wire, turn_id: str, *input_ids: int, max_tokens: int = 8) -> dict[str, Any]:
    """One turn to its end."""
    return await wire.turn(turn_id, **turn(*input_ids, max_tokens=max_tokens))


def test_a_killed_engine_ends_its_turns_clearly_and_sessions_go_on_from_their_tokens() -> None:
    async def scenario(server: LocalServer) -> None:
        async with greeted(server.url) as quiet, greeted(server.url) as busy:
            first = await ask(quiet, "t0", 10, 11, 12)
            expected = await ask(busy, "t0", 10, 11, 12)
            await busy.send("turn.create", turn_id="t1", **turn(20, max_tokens=1500))
            await busy.until("turn.delta")
            await busy.send("turn.create", turn_id="t2", **turn(20))
            await busy.until("turn.created")
            os.kill(engine_pid(server), signal.SIGKILL)

            failed = await busy.until("turn.failed")
            assert failed["error"]["code"] == "engine_restarting"
            assert failed["retryable"] is True
            # The turn that waited runs on the new engine, as if the lost one had never been.
            waited = await busy.until("turn.completed")
            assert waited["turn_id"] == "t2"
            assert waited["usage"]["input_tokens"] == expected["usage"]["total_tokens"] + 1

            after = await ask(quiet, "t1", 13)
            assert after["usage"]["input_tokens"] == first["usage"]["total_tokens"] + 1
            assert after["usage"]["cached_tokens"] < first["usage"]["total_tokens"] - 1
            warm = await ask(quiet, "t2", 14)
            assert warm["usage"]["cached_tokens"] >= after["usage"]["total_tokens"] - 1
        async with greeted(server.url) as fresh:
            once = await ask(fresh, "t0", 10, 11, 12)
            assert once["item"]["token_ids"] == first["item"]["token_ids"]
            again = await ask(fresh, "t1", 13)
            assert again["item"]["token_ids"] == after["item"]["token_ids"]

    with LocalServer(SMALL) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 120))
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert_books_balance(server.url)
        assert server.stop() == 0


def test_E7_an_engine_given_up_takes_the_server_with_it_and_says_so_by_its_exit_status() -> None:
    async def scenario(server: LocalServer) -> None:
        async with greeted(server.url) as wire:
            await wire.send("turn.create", turn_id="t1", **turn(20, max_tokens=1500))
            await wire.until("turn.delta")
            os.kill(engine_pid(server), signal.SIGKILL)
            failed = await wire.until("turn.failed")
            assert failed["error"]["code"] == "engine_unavailable"

    with LocalServer([*SMALL, "--max-engine-restarts", "0"]) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 60))
        deadline = time.monotonic() + 30
        while server.returncode is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.returncode == 1
        assert "the engine failed for good" in server.last_lines


def test_sigterm_lets_running_turns_end_tells_everybody_and_leaves_with_zero() -> None:
    async def scenario(server: LocalServer) -> None:
        async with greeted(server.url) as busy, greeted(server.url) as idle:
            await busy.send("turn.create", turn_id="t0", **turn(10, max_tokens=600))
            await busy.until("turn.delta")
            os.kill(server.pid, signal.SIGTERM)
            await idle.until("session.draining")
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
                ready = await http.get("/ready")
                assert (ready.status_code, ready.json()["status"]) == (503, "draining")
                refused = await http.post("/v1/sessions", json={})
                assert refused.json()["error"]["code"] == "server_draining"
            await idle.send("turn.create", turn_id="late", **turn(10))
            refused_turn = await idle.until("error", "session.closed")
            assert refused_turn["error"]["code"] == "server_draining"
            with pytest.raises(InvalidStatus) as denied:
                async with open_wire(server.url):
                    pass
            assert denied.value.response.status_code == 503
            end = await busy.until("turn.completed")
            assert end["usage"]["output_tokens"] == 600
            assert await busy.close_code() == 1012
            assert await idle.close_code() == 1012

    lines: list[str] = []
    flags = [*SMALL, "--drain-timeout", "60", "--log-level", "info", "--log-format", "json"]
    with LocalServer(flags, on_line=lines.append) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 120))
        assert server.stop() == 0
    log = [json.loads(line) for line in lines if line.startswith("{")]
    # How many lines of progress follow depends on the machine.
    draining, *progress = (line for line in log if line["message"] == "draining")
    assert all(line["turns"] <= 1 for line in progress)
    assert (draining["sessions"], draining["turns"], draining["deadline_s"]) == (2, 1, 60)
    assert log[-1]["message"] == "stopped"


def test_an_address_in_use_is_one_line_and_exit_status_one(server: LocalServer) -> None:
    port = server.url.rpartition(":")[2]
    argv = [sys.executable, "-m", "session_server", "serve", "--port", port, *FLAGS]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "cannot listen" in done.stderr
    assert "Traceback" not in done.stderr
    assert "pass another --port" in done.stderr


def test_an_address_that_is_taken_while_the_engine_starts_is_one_line_too() -> None:
    with bind("127.0.0.1", 0) as other:
        argv = [sys.executable, "-m", "session_server", "serve", *FLAGS]
        argv += ["--log-level", "info", "--port", str(other.getsockname()[1])]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            log = list(
                itertools.takewhile(lambda line: "starting the engine" not in line, process.stderr)
            )
            other.listen()
            rest = process.stderr.read()
    assert process.returncode == 1, log
    assert "Traceback" not in rest
    assert "pass another --port" in rest.splitlines()[-1]


@pytest.mark.parametrize(
    ("config", "words"),
    [(None, "has no config.json"), ('{"model_type": "gpt2"}', "known: deepseek_v2, ")],
)
def test_a_checkpoint_that_cannot_be_served_is_one_line_and_exit_status_two(
    tmp_path: Path, config: str | None, words: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    argv = [sys.executable, "-m", "session_server", "serve", "--port", "0"]
    argv += ["--model-path", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_without_weights_is_said_without_a_stack(tmp_path: Path) -> None:
    for path in MODEL_DIR.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    argv = [sys.executable, "-m", "session_server", "serve", "--port", "0"]
    argv += ["--model-path", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "has no *.safetensors" in done.stderr
    assert "Traceback" not in done.stderr
