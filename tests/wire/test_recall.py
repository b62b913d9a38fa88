"""The embedded model remembers: measured through the real server, on seeds nobody trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from examples.train_embedded_model.exercises import Probe, recall_probe
from session_server.client import connect
from session_server.core.session_events import ChatInput, Message
from session_server.demo import MODEL_DIR
from session_server.demo.corpus import is_right
from session_server.local_server import LocalServer
from tests.depth import at_depth
from tests.text.local_text import load_local_text

NUM_PROBES = at_depth(100, proof=150)
NUM_AT_ONCE = 8
FIRST_SEED = 777_000


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """The embedded model, as it is shipped."""
    with LocalServer(["--log-level", "warning"]) as running:
        yield running


async def _is_recalled(url: str, probe: Probe, gate: asyncio.Semaphore) -> bool:
    """Put the history and the question into a fresh session; judge the answer."""
    messages = []
    for exchange in probe.history:
        messages += [Message("user", exchange.user), Message("assistant", exchange.assistant)]
    messages.append(Message("user", probe.question.user))
    async with gate, await connect(url) as session:
        result = await session.ask(
            ChatInput(tuple(messages)), sampling={"temperature": 0, "max_tokens": 40}
        )
    return is_right(result.text, probe.question.assistant)


async def _recall(url: str, history_tokens: int) -> float:
    tokenizer = load_local_text(MODEL_DIR).tokenizer
    gate = asyncio.Semaphore(NUM_AT_ONCE)
    probes = [
        recall_probe(
            FIRST_SEED + history_tokens * NUM_PROBES + number,
            history_tokens,
            lambda text: len(tokenizer.encode_content(text)),
        )
        for number in range(NUM_PROBES)
    ]
    right = await asyncio.gather(*(_is_recalled(url, probe, gate) for probe in probes))
    return sum(right) / len(right)


@pytest.mark.parametrize(
    ("history_tokens", "wanted"),
    at_depth(
        [(128, 0.99), (512, 0.99)], proof=[(128, 0.99), (512, 0.99), (1024, 0.99), (2048, 0.97)]
    ),
)
def test_what_was_told_is_recalled(server: LocalServer, history_tokens: int, wanted: float) -> None:
    assert asyncio.run(_recall(server.url, history_tokens)) >= wanted
