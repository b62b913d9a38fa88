"""Measure the same next turn on a kept session, resent with a prefix-cache hit, and cold.

`kept` sends only the new tokens to a session that holds the history. `resent` sends history and new
tokens to a fresh session whose prefix is still in the radix tree; `typed` does so with text, as
clients do, which is tokenized again. `cold` resends tokens after the tree was emptied. Rounds are
interleaved, so that a machine whose speed drifts affects all alike.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from tokenizers import Tokenizer

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.bench.growth import ordinary_tokens
from session_server.bench.sheet import Sheet
from session_server.client import connect
from session_server.core.session_events import RawInput, TextInput, TokenInput
from session_server.local_server import LocalServer

WAYS: Final = ("kept", "resent", "typed", "cold")
_WORDS: Final = ("the", "turn", "of", "a", "session", "costs", "what", "its", "new", "words")
_ONE_TOKEN: Final = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class KeptWorkload:
    """Configure `num_rounds` rounds per history length, with `num_new` new tokens per turn."""

    histories: tuple[int, ...] = (512, 2048, 8192)
    num_new: int = 16
    num_rounds: int = 7

    @property
    def total_steps(self) -> int:
        """Return the number of timed turns."""
        return len(self.histories) * self.num_rounds * len(WAYS)


def measure(load: KeptWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Measure median milliseconds from sending a turn to its only token, by history and way."""
    shape = RandomModel(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=768,
    )
    with tempfile.TemporaryDirectory() as directory:
        model = write_random_checkpoint(Path(directory), shape)
        flags = ["--model-path", str(model), "--max-total-tokens", str(4 * max(load.histories))]
        with LocalServer([*flags, "--log-level", "warning"]) as server:
            tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
            return asyncio.run(_time_turns(server.url, tokenizer, load, on_step))


SHEETS: Final = (
    Sheet(
        "next turn, {num_new} new tokens: time to first token, ms",
        lambda report: report["histories"],
        ("history",),
        {way: f"{{median_ms[{way}]:.1f}}" for way in WAYS}
        | {
            "resent / kept": "{resent_over_kept:.2f}",
            "typed / kept": "{typed_over_kept:.2f}",
            "cold / kept": "{cold_over_kept:.2f}",
        },
    ),
)


class _Conversation(NamedTuple):
    """A history, the turn after it, and both in one."""

    history: RawInput
    turn: RawInput
    whole: RawInput


def _of_tokens(history: int, num_new: int, seed: int) -> _Conversation:
    tokens = ordinary_tokens(seed, history + num_new).token_ids
    return _Conversation(
        TokenInput(tokens[:history]), TokenInput(tokens[history:]), TokenInput(tokens)
    )


def _of_text(tokenizer: Tokenizer, history: int, num_new: int, seed: int) -> _Conversation:
    """Return text of about as many tokens, cut between words: what follows changes no token."""
    words = random.Random(seed).choices(_WORDS, k=history + num_new)
    text = "".join(f" {word}" for word in words)
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    begin, end = (text.index(" ", offsets[count][0]) for count in (history, history + num_new))
    return _Conversation(TextInput(text[:begin]), TextInput(text[begin:end]), TextInput(text[:end]))


async def _time_turns(
    url: str, tokenizer: Tokenizer, load: KeptWorkload, on_step: Callable[[], None]
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for history in load.histories:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(load.num_rounds):
            for way in WAYS:
                if way == "typed":
                    conversation = _of_text(tokenizer, history, load.num_new, number)
                else:
                    conversation = _of_tokens(history, load.num_new, number)
                times[way].append(await _turn_ms(url, way, conversation))
                on_step()
        medians = {way: statistics.median(values) for way, values in times.items()}
        figures[str(history)] = {
            "median_ms": medians,
            **{f"{way}_over_kept": medians[way] / medians["kept"] for way in WAYS[1:]},
        }
    return {"num_new": load.num_new, "histories": figures}


async def _turn_ms(url: str, way: str, conversation: _Conversation) -> float:
    """Prepare a server that has seen the history, then time the next turn sent as `way`."""
    clock = asyncio.get_running_loop().time
    async with httpx.AsyncClient(base_url=url) as http:
        (await http.post("/flush_cache")).raise_for_status()
        session = await connect(url)
        await (await session.start(conversation.history, generate=False)).result()
        turn = conversation.turn
        if way != "kept":
            await session.close()
            if way == "cold":
                (await http.post("/flush_cache")).raise_for_status()
            session, turn = await connect(url), conversation.whole
        begin = clock()
        result = await session.ask(turn, sampling=_ONE_TOKEN)
        elapsed_ms = (clock() - begin) * 1e3
        assert result.status == "completed", result.error
        await session.close()
    return elapsed_ms
