"""Real servers with roles: what a decode replica says is what a server says that does everything,
whatever becomes of the prefill replica; and nothing is left at either side of a prompt that nobody
waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from session_server.bench.checkpoint import Mixer, RandomModel, write_random_checkpoint
from session_server.client import Refused, connect
from session_server.core.session_events import TokenInput
from session_server.local_server import LocalServer
from session_server.sessions.roles.messages import PATH
from session_server.sessions.roles.policy import MIN_SENT_TOKENS
from tests.depth import IS_PROOF, at_depth
from tests.rig.postgres import Postgres, running
from tests.rig.processes import engine_pid
from tests.rig.recovery import assert_books_balance
from tests.wire.test_shared_kv import files_in

pytestmark = [
    pytest.mark.skipif(not IS_PROOF, reason="make everything: it starts many servers"),
    pytest.mark.timeout(400),
]
MIXERS = tuple(Mixer)
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SHAPE = RandomModel(hidden_size=256, num_hidden_layers=4)
LONG, SLOW = 2 * MIN_SENT_TOKENS + 77, 8 * MIN_SENT_TOKENS


def prompt(number: int, num_tokens: int) -> TokenInput:
    rng = random.Random(number)
    return TokenInput(tuple(rng.randrange(300, 1300) for _ in range(num_tokens)))


TURNS = (prompt(1, LONG), prompt(2, 50), prompt(3, 4 * LONG), prompt(4, 30))


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def prefills(url: str) -> dict[str, int]:
    """Of each outcome how many; "under way" among them."""
    text = httpx.get(f"{url}/metrics", timeout=30.0).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "session_server_prefills_total":
                found[sample.labels["outcome"]] = int(sample.value)
            elif sample.name == "session_server_prefills_under_way":
                found["under way"] = int(sample.value)
    return found


def until(condition: Callable[[], bool], wait_s: float = 60.0) -> None:
    until_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < until_s, "it does not come to that"
        time.sleep(0.02)


def open_named(url: str, session_id: str) -> None:
    httpx.post(f"{url}/v1/sessions", json={"id": session_id}).raise_for_status()


async def said(url: str, turns: Sequence[TokenInput], session_id: str | None = None) -> list[str]:
    """What is said in turns of one session, which stays open if it has an id."""
    if session_id is not None:
        open_named(url, session_id)
    session = await connect(url, session_id=session_id)
    texts = [(await session.ask(each, sampling=GREEDY)).text for each in turns]
    await (session.leave() if session_id else session.close())
    return texts


class Apart:
    """A prefill and a decode replica of one model, over one store and one directory."""

    def __init__(self, model: Path, store: str, kv: Path, stack: contextlib.ExitStack) -> None:
        self.kv = kv
        kv.mkdir()
        self._stack, self._port = stack, free_port()
        self.plain_flags = (
            *("--model-path", str(model), "--threads", "1", "--log-level", "warning"),
            *("--max-total-tokens", "65536", "--memory-check", "warn"),
        )
        self._flags = (*self.plain_flags, "--store", store, "--disk-kv-bytes", f"256MiB:{kv}")
        self.prefill = self.start_prefill()
        self.decode = stack.enter_context(LocalServer([*self._flags, "--role", "decode"]))

    def start_prefill(self, *flags: str) -> LocalServer:
        url = f"http://127.0.0.1:{self._port}"
        role = ("--role", "prefill", "--port", str(self._port), "--advertise-url", url)
        return self._stack.enter_context(LocalServer([*self._flags, *role, *flags]))

    def until_asked(self) -> None:
        until(lambda: prefills(self.prefill.url)["under way"] == 1)

    def assert_nothing_is_left(self) -> None:
        """No session is open, no page is held, and the books of both balance."""
        for server in (self.prefill, self.decode):
            until(lambda url=server.url: prefills(url)["under way"] == 0)  # type: ignore[misc]
            until(lambda url=server.url: not held_sessions(url))  # type: ignore[misc]
            assert_books_balance(server.url, is_running=False, is_open=False)
        until(lambda: not files_in(self.kv))


def held_sessions(url: str) -> list[object]:
    sessions = httpx.get(f"{url}/v1/admin/memory", timeout=60.0).json()["sessions"]
    assert isinstance(sessions, list)
    return sessions


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running(is_synced=False) as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model") / "m", SHAPE)


@pytest.fixture
def apart(model: Path, postgres: Postgres, tmp_path: Path) -> Iterator[Apart]:
    with contextlib.ExitStack() as stack:
        yield Apart(model, postgres.new_database(), tmp_path / "kv", stack)


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    """What is said behind the slow prompt."""
    with LocalServer(["--model-path", str(model), "--log-level", "warning"]) as server:
        (text,) = asyncio.run(said(server.url, [prompt(7, SLOW)]))
    return text


@pytest.mark.parametrize("mixer", at_depth(MIXERS[:1], proof=MIXERS))
def test_a_decode_replica_says_what_a_server_says_that_does_everything(
    mixer: Mixer, postgres: Postgres, tmp_path: Path
) -> None:
    model = write_random_checkpoint(tmp_path / "model", SHAPE, mixer)
    with contextlib.ExitStack() as stack:
        apart = Apart(model, postgres.new_database(), tmp_path / "kv", stack)
        texts = asyncio.run(said(apart.decode.url, TURNS, "kept"))
        sent, served = prefills(apart.decode.url), prefills(apart.prefill.url)
        assert (sent["done"], served["done"]) == (2, 2), (sent, served)
        told = httpx.get(f"{apart.decode.url}/metrics").text
        (restored,) = (
            float(line.split()[1])
            for line in told.splitlines()
            if line.startswith("session_server_kv_restored_tokens_total ")
        )
        assert restored >= LONG + 4 * LONG - 64
        assert files_in(apart.kv)
        httpx.delete(f"{apart.decode.url}/v1/sessions/kept").raise_for_status()
        apart.assert_nothing_is_left()
        with LocalServer([*apart.plain_flags]) as plain:
            assert texts == asyncio.run(said(plain.url, TURNS))


def test_a_prefill_replica_that_is_killed_is_not_missed(apart: Apart, expected: str) -> None:
    async def talk() -> str:
        asking = asyncio.create_task(said(apart.decode.url, [prompt(7, SLOW)]))
        await asyncio.to_thread(apart.until_asked)
        for pid in (engine_pid(apart.prefill), apart.prefill.pid):
            os.kill(pid, signal.SIGKILL)
        return (await asking)[0]

    assert asyncio.run(talk()) == expected
    assert prefills(apart.decode.url)["failed"] == 1
    apart.prefill.wait()
    apart.prefill = apart.start_prefill()

    numbers = itertools.count(100)

    def is_used() -> bool:
        # Another prompt each time: what was computed here is in the tree, and not asked for.
        asyncio.run(said(apart.decode.url, [prompt(next(numbers), LONG)]))
        return prefills(apart.decode.url)["done"] > 0

    until(is_used, wait_s=120.0)
    apart.assert_nothing_is_left()


def test_a_prefill_replica_that_says_nothing_is_not_waited_for(apart: Apart, expected: str) -> None:
    async def talk() -> str:
        asking = asyncio.create_task(said(apart.decode.url, [prompt(7, SLOW)]))
        await asyncio.to_thread(apart.until_asked)
        os.kill(apart.prefill.pid, signal.SIGSTOP)
        return (await asking)[0]

    try:
        assert asyncio.run(talk()) == expected
    finally:
        os.kill(apart.prefill.pid, signal.SIGCONT)
    assert prefills(apart.decode.url)["failed"] == 1
    apart.assert_nothing_is_left()


@pytest.mark.parametrize("how", ["cancel", "delete", "kill"])
def test_of_a_prompt_that_nobody_waits_for_nothing_is_left(apart: Apart, how: str) -> None:
    async def talk() -> None:
        open_named(apart.decode.url, "left")
        session = await connect(apart.decode.url, session_id="left")
        turn = await session.start(prompt(7, SLOW), sampling=GREEDY)
        await asyncio.to_thread(apart.until_asked)
        if how == "cancel":
            await turn.cancel(keep_partial=False)
            assert (await turn.result()).status == "cancelled"
            await session.close()
        elif how == "delete":
            async with httpx.AsyncClient() as http:
                await http.delete(f"{apart.decode.url}/v1/sessions/left")
        else:
            os.kill(apart.decode.pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            await session.leave()

    asyncio.run(talk())
    until(lambda: prefills(apart.prefill.url)["cancelled"] == 1)
    if how == "kill":
        apart.decode.wait()
        apart.decode = apart.prefill  # there is no other that could be looked at
    apart.assert_nothing_is_left()


def test_a_prefill_replica_takes_no_clients_and_no_strangers(apart: Apart) -> None:
    url = apart.prefill.url
    for path in ("/v1/sessions", "/v1/chat/completions", "/v1/responses", "/generate"):
        answer = httpx.post(url + path, json={})
        assert answer.status_code == 503, path
        assert "--role decode" in answer.json()["error"]["message"]
    with pytest.raises(Refused, match="--role decode"):
        asyncio.run(connect(url))
    assert httpx.get(f"{url}/ready").json() == {"status": "prefill"}
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.post(url + PATH, content=os.urandom(200)).status_code == 401
    assert httpx.post(url + PATH, content=b"").status_code == 401
    assert httpx.post(apart.decode.url + PATH, content=b"x" * 200).status_code == 404
    assert httpx.get(f"{apart.decode.url}/ready").status_code == 200
    assert prefills(url)["done"] == 0
