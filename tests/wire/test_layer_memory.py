"""What sessions over windows and latents hold, read from a real server over a real socket."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from cache.types import pages_for
from session_server.demo import MODEL_DIR
from session_server.local_server import LocalServer
from tests.models.raw_configs import WINDOW
from tests.oracle.checkpoints import write_checkpoint
from tests.rig.recovery import assert_books_balance
from tests.web.wire_client import greeted
from tests.wire.conftest import FLAGS
from tests.wire.test_session_semantics import ask, ids, run

PAGE_SIZE = 4
TURN_LEN = 40
NUM_TURNS = 20


@contextmanager
def served(family: str, directory: Path, **config: Any) -> Iterator[LocalServer]:
    """A random model of a family with the embedded tokenizer."""
    write_checkpoint(family, directory, vocab_size=1536, **config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIR / name, directory / name)
    flags = [*FLAGS, "--model-path", str(directory), "--page-size", str(PAGE_SIZE)]
    sizes = ["--max-total-tokens", "8192", "--chunked-prefill-size", "32"]
    with LocalServer([*flags, *sizes, "--max-resident-sessions", "8"]) as server:
        yield server
        assert_books_balance(server.url)
        assert server.stop() == 0


def memory(server: LocalServer) -> dict[str, Any]:
    """The server's books, recounted."""
    answer = httpx.get(f"{server.url}/v1/admin/memory", params={"full": 1}, timeout=60.0)
    books: dict[str, Any] = answer.raise_for_status().json()
    return books


def held_pages(books: dict[str, Any], pool: str) -> int:
    """Pages of one pool that the only session keeps, as it says and as the pool says."""
    (session,) = books["sessions"]
    pages = session["protected_pages"][pool] + session["private_pages"][pool]
    accounts = books["pools"][pool]
    assert pages == accounts["tree_protected"] + accounts["session_held"]
    assert accounts["active"] == 0
    return int(pages)


def talk_then(server: LocalServer, look: Any) -> None:
    """A session of `NUM_TURNS` turns; `look` is given the books after each."""

    async def scenario() -> None:
        async with greeted(server.url) as wire:
            for index in range(NUM_TURNS):
                tokens = [20 + (index * TURN_LEN + i) % 1000 for i in range(TURN_LEN - 4)]
                done = await ask(wire, f"t{index}", ids(*tokens, max_tokens=4))
                assert done["type"] == "turn.completed"
                look(memory(server))

    test: Awaitable[None] = scenario()
    run(test)


def test_a_session_of_fifty_windows_holds_one_and_two_pages_of_window_kv(tmp_path: Path) -> None:
    lengths: list[int] = []

    def look(books: dict[str, Any]) -> None:
        (session,) = books["sessions"]
        lengths.append(session["committed_len"])
        assert held_pages(books, "full") == pages_for(lengths[-1], PAGE_SIZE)
        assert held_pages(books, "window") <= pages_for(WINDOW, PAGE_SIZE) + 2

    with served("gemma3_text", tmp_path) as server:
        talk_then(server, look)
        pools = memory(server)["pools"]
    assert lengths[-1] >= 50 * WINDOW - 1
    assert pools["window"]["pages"] < pools["full"]["pages"], "windows are not given what they miss"
    # Five layers of six see a window; K and V of 2 heads of 16 floats.
    assert pools["full"]["page_bytes"] * 5 == pools["window"]["page_bytes"]
    assert pools["full"]["page_bytes"] == PAGE_SIZE * 2 * 2 * 16 * 4


def test_a_session_over_latents_holds_the_predicted_bytes(tmp_path: Path) -> None:
    kv_lora_rank, rope_dim, num_layers = 20, 8, 3

    def look(books: dict[str, Any]) -> None:
        (session,) = books["sessions"]
        page_bytes = books["pools"]["latent"]["page_bytes"]
        held = held_pages(books, "latent") * page_bytes
        per_token = num_layers * (kv_lora_rank + rope_dim) * 4
        assert held == pages_for(session["committed_len"], PAGE_SIZE) * PAGE_SIZE * per_token

    with served("deepseek_v2", tmp_path) as server:
        talk_then(server, look)
        assert set(memory(server)["pools"]) == {"latent"}


def test_the_split_of_memory_is_told_when_the_server_starts(tmp_path: Path) -> None:
    lines: list[str] = []
    write_checkpoint("gemma3_text", tmp_path, vocab_size=1536)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIR / name, tmp_path / name)
    flags = ["--model-path", str(tmp_path), "--max-total-tokens", "4096", "--threads", "1"]
    with LocalServer([*flags, "--swa-full-tokens-ratio", "0.25"], on_line=lines.append) as server:
        pools = memory(server)["pools"]
        assert server.stop() == 0
    for name, pool in pools.items():
        words = f"kv pool={name} pages={pool['pages']} tokens={(pool['pages'] - 1) * 16} mib="
        assert any(words in line for line in lines), lines
    assert pools["full"]["pages"] == 4096 // 16 + 1
    assert pools["window"]["pages"] == (4096 // 16 + 1) // 4
