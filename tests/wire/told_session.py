"""A session over a socket beside what its history must be, written down by the rules of the docs.

The embedded template writes `<|role|>content<|end|>`. What a model has said stays as it was
sampled; messages that no answer follows are rendered behind it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from session_server.demo import MODEL_DIR
from session_server.text.tokenizer import Tokenizer
from tests.oracle.checkpoints import first_routing_tie, reference_logits
from tests.oracle.oracle import TOLERANCE
from tests.text.local_text import load_local_text
from tests.web.wire_client import Wire, greeted, http_client
from tests.wire.layered_models import EOS

ROUTING_TIE: Final = 1e-5
"""Experts so close are chosen one way in one batch and another way in the next."""

Tokens = tuple[int, ...]


@cache
def tokenizer() -> Tokenizer:
    """That of the embedded model, which all models of these tests have."""
    return load_local_text(MODEL_DIR).tokenizer


@dataclass(frozen=True)
class Item:
    """`end`: the history up to it, where a model or raw ids made it; None: rendered anew."""

    id: str
    role: str
    content: str
    end: Tokens | None = None


@dataclass(frozen=True)
class Said:
    """An answer, what it follows, and how likely each of its tokens was."""

    context: Tokens
    answer: Tokens
    logprobs: tuple[float, ...]


@dataclass
class ToldSession:
    """One session: its items, and all that was said in it, also what has gone since."""

    url: str
    wire: Wire
    items: list[Item] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)
    num_turns: int = 0

    @property
    def id(self) -> str:
        """Of the session."""
        session_id: str = self.wire.hello["session_id"]
        return session_id

    @property
    def tokens(self) -> Tokens:
        """The history up to the last answer or raw ids."""
        return next((item.end for item in reversed(self.items) if item.end is not None), ())

    async def ask(self, *texts: str, num_outputs: int) -> None:
        """Send messages of the user, none to have those answered that wait for it."""
        waiting = []
        for item in reversed(self.items):
            if item.end is not None:
                break
            waiting.insert(0, item)
        new = [Item("", "user", text) for text in texts]
        rendered = "".join(f"<|{each.role}|>{each.content}<|end|>" for each in (*waiting, *new))
        before = self.tokens
        closing = [EOS] if before and before[-1] != EOS else []
        ids = tokenizer().encode_control(f"{rendered}<|assistant|>")
        messages = [{"role": "user", "content": text} for text in texts]
        self.items += new
        await self._turn((*before, *closing, *ids), num_outputs, input=messages)

    async def feed(self, *ids: int, num_outputs: int = 0) -> None:
        """Send raw ids, whose answer has so many tokens; with none they are only read."""
        context = (*self.tokens, *ids)
        self.items.append(Item("", "raw", "", context))
        await self._turn(context, num_outputs, input_ids=ids, generate=num_outputs > 0)

    async def rewind(self, item: Item) -> None:
        """Go back to where an item was the last."""
        await self.wire.send("session.rewind", to_item=item.id)
        rewound = await self.wire.until("session.rewound", "error")
        del self.items[self.items.index(item) + 1 :]
        assert (rewound["to_item"], rewound["tokens"]) == (item.id, len(self.tokens)), rewound

    async def edit(self, item: Item, content: str) -> None:
        """Give an item another text."""
        await self.wire.send("item.edit", item_id=item.id, content=content)
        edited = await self.wire.until("item.edited", "error")
        self.items[self.items.index(item) :] = [replace(item, content=content, end=None)]
        assert (edited["item_id"], edited["tokens"]) == (item.id, len(self.tokens)), edited

    @asynccontextmanager
    async def fork(self, item: Item) -> AsyncIterator[ToldSession]:
        """Open a session with everything up to an item."""
        await self.wire.send("session.fork", at_item=item.id)
        forked = await self.wire.until("session.forked", "error")
        kept = self.items[: self.items.index(item) + 1]
        async with told_session(self.url, forked["session_id"]) as fork:
            fork.items = kept
            assert forked["tokens"] == len(fork.tokens), forked
            yield fork

    async def _turn(self, context: Tokens, num_outputs: int, **turn: Any) -> None:
        self.num_turns += 1
        sampling = {"temperature": 0, "max_tokens": num_outputs, "ignore_eos": True}
        turn_id = f"t{self.num_turns}"
        options = {**sampling, "logprobs": num_outputs > 0}
        await self.wire.send("turn.create", turn_id=turn_id, sampling=options, **turn)
        end = await self.wire.until("turn.completed", "turn.cancelled", "turn.failed", "error")
        assert end["type"] == "turn.completed", end
        answer = tuple(end["item"]["token_ids"])
        assert (end["usage"]["input_tokens"], len(answer)) == (len(context), num_outputs)
        self.num_cached.append(end["usage"]["cached_tokens"])
        if num_outputs:
            logprobs = tuple(each["logprob"] for each in end["item"]["logprobs"])
            self.said.append(Said(context, answer, logprobs))
            content = end["item"]["content"]
            self.items.append(Item("", "assistant", content, (*context, *answer)))
        await self._learn_ids()

    async def _learn_ids(self) -> None:
        """Learn how the server names the items, and that it has the same ones."""
        async with http_client(self.url) as http:
            listed = (await http.get(f"/v1/sessions/{self.id}/items")).json()["data"]
        held = [(item.role, item.content) for item in self.items]
        assert [(item["role"], item["content"]) for item in listed] == held
        pairs = zip(self.items, listed, strict=True)
        self.items = [replace(item, id=told["id"]) for item, told in pairs]


@asynccontextmanager
async def told_session(url: str, session_id: str = "new") -> AsyncIterator[ToldSession]:
    """Join a session, a new one without an id, and close it at the end."""
    async with greeted(url, session_id) as wire:
        yield ToldSession(url, wire)
        await wire.send("session.close")
        await wire.until("session.closed")


def assert_said_by(model: Path, said: Sequence[Said]) -> None:
    """Every token is what `transformers` chooses behind those before it, as likely as there."""
    for each in said:
        tokens = (*each.context, *each.answer)
        logprobs = reference_logits(model, tokens)[len(each.context) - 1 : -1].log_softmax(dim=-1)
        chosen = logprobs.gather(1, torch.tensor(each.answer)[:, None])[:, 0]
        unlike = torch.maximum(
            logprobs.amax(dim=1) - chosen, (chosen - torch.tensor(each.logprobs)).abs()
        )
        wrong = (unlike > TOLERANCE).nonzero().flatten().tolist()
        if wrong:
            tie = first_routing_tie(model, tokens, margin=ROUTING_TIE)
            assert tie < len(each.context) + wrong[0], each
