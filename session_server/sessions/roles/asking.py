"""`Prefills`: have another replica compute a long prompt before its turn goes to the engine.

A turn that waits for this is not in the engine: it holds no pages and no place in a forward, and
nobody waits behind it. Whatever goes wrong, the turn goes on as if nobody had been asked, and what
is missing is computed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from session_server.core.commands import CoolSession, ExpectKV, OpenSession
from session_server.core.errors import EngineUnavailable, SessionServerError
from session_server.sessions.bugs import log_bug
from session_server.sessions.engine_link import EngineLink
from session_server.sessions.prompt import Prompt
from session_server.sessions.roles.messages import (
    PrefillRefused,
    PrefillRequest,
    PrefillWorking,
    PrefillWritten,
    Seal,
)
from session_server.sessions.roles.policy import Need, Outcome, Peer, PeerBook, is_long
from session_server.sessions.roles.transport import PrefillTransport, Unreachable

WAIT_S: Final = 60.0
"""How long a turn waits for its prompt to be computed elsewhere; then it is computed here."""

PEERS_S: Final = 1.0
"""For how long the replicas that were found are not asked for again."""


@dataclass(slots=True)
class SentCounts:
    """Count prompts that others were to compute: `done` by `done_tokens` and `done_bytes` in
    `done_s`; the others were computed here. `no_peer`: nobody was to be asked."""

    sent: int = 0
    done: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    no_peer: int = 0
    done_tokens: int = 0
    done_bytes: int = 0
    done_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Others:
    """Hold how others are found and asked. `model`: see `PrefillRequest`. `wall_s`: the store's
    clock."""

    find: Callable[[], Awaitable[Sequence[Peer]]]
    transport: PrefillTransport
    seal: Seal
    model: bytes
    wall_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """Describe a turn whose prompt may be computed elsewhere. `opening`: how its session is opened,
    with what the engine has of it. `name`: by which salts are made, with its owner's id."""

    opening: OpenSession
    owner_id: str
    name: str
    tokens: Sequence[int]
    is_known: bool

    @property
    def base_len(self) -> int:
        """Return the tokens that the engine has of the session."""
        return len(self.opening.tokens)


class Prefills:
    """Ask others to compute prompts. Call every method on the event loop's thread."""

    def __init__(
        self, link: EngineLink, others: Others, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._link, self._others, self._clock = link, others, clock
        self._book, self.counts = PeerBook(), SentCounts()
        self._peers: Sequence[Peer] = ()
        self._looked_s = -PEERS_S

    @property
    def num_sent(self) -> int:
        """Return how many prompts are being computed elsewhere."""
        counts = self.counts
        return counts.sent - counts.done - counts.refused - counts.failed - counts.cancelled

    def may_help(self, num_tokens: int) -> bool:
        """Return whether it is worth while to find out about a context of so many tokens that have
        to be computed at most."""
        ready = self._link.ready
        if ready is None or ready.kv_tiers != "disk":
            return False
        return is_long(Need(num_tokens, 0, ready.page_size))

    async def run(self, asked: AskedPrompt, outcome: Prompt) -> Prompt:
        """Return `outcome`, once another replica has computed what it can of a context, or will
        not."""
        try:
            # Where there is no engine, or no store, the turn finds out by itself.
            with contextlib.suppress(SessionServerError):
                await self._run(asked)
        except Exception as error:  # noqa: BLE001 - the turn is computed here
            log_bug("a prompt was not computed elsewhere", error)
        return outcome

    async def _run(self, asked: AskedPrompt) -> None:
        tokens = np.asarray(asked.tokens, "<i4")
        measured = await self._link.measure_kv(
            asked.opening, tokens=tokens.tobytes(), base_len=asked.base_len
        )
        ready = self._link.ready
        if ready is None:
            return
        need = Need(len(tokens), measured.held_len, ready.page_size)
        if not (is_long(need) and self._book.may_send(need.sent_len)):
            return
        peer = self._book.choose(await self._find(), asked.name, self._clock())
        if peer is None:
            self.counts.no_peer += 1
            return
        request = PrefillRequest(
            model=self._others.model,
            page_size=ready.page_size,
            owner_id=asked.owner_id,
            session=asked.name,
            weight=asked.opening.tenant_weight,
            tokens=tokens[: need.sent_len].tobytes(),
            cut=measured.copied_len,
        )
        written = await self._send(peer, request, need)
        if written is not None:
            self._expect(asked, written)

    async def _find(self) -> Sequence[Peer]:
        if self._clock() >= self._looked_s + PEERS_S:
            self._looked_s = self._clock()
            self._peers = await self._others.find()
        return self._peers

    async def _send(self, peer: Peer, request: PrefillRequest, need: Need) -> PrefillWritten | None:
        """Ask a replica, and count what comes of it; None where it has computed nothing."""
        counts, begun_s = self.counts, self._clock()
        outcome: Outcome = "failed"
        counts.sent += 1
        self._book.begin(peer, need.sent_len)
        try:
            async with asyncio.timeout(WAIT_S):
                news = await self._ask(peer, request)
            if isinstance(news, PrefillWritten) and news.num_tokens > need.held_len:
                outcome = "done"
                counts.done += 1
                counts.done_tokens += news.num_tokens
                counts.done_bytes += sum(num_bytes for _, num_bytes in news.files)
                counts.done_s += self._clock() - begun_s
                return news
            outcome = _outcome_of(news)
            counts.refused += outcome != "failed"
            counts.failed += outcome == "failed"
        except (Unreachable, TimeoutError):
            counts.failed += 1
        except BaseException:
            outcome = "done"  # nobody waits any more, which is not the replica's fault
            counts.cancelled += 1
            raise
        finally:
            self._book.end(peer, need.sent_len, outcome, self._clock())
        return None

    async def _ask(self, peer: Peer, request: PrefillRequest) -> PrefillWritten | PrefillRefused:
        others = self._others
        sealed = others.seal.seal(request, url=peer.url, now_s=others.wall_s())
        async with others.transport.ask(peer.url, sealed) as answer:
            async for news in answer:
                if not isinstance(news, PrefillWorking):
                    return news
        raise Unreachable("the answer has no end")

    def _expect(self, asked: AskedPrompt, written: PrefillWritten) -> None:
        """Tell the engine of the files. Of a session that is resident the KV goes to the tree, for
        the turn to restore what comes behind."""
        with contextlib.suppress(EngineUnavailable):  # the next engine looks for them by itself
            if asked.is_known:
                session_id = asked.opening.session_id
                self._link.send(CoolSession(session_id=session_id, is_ahead_of_turn=True))
            self._link.send(ExpectKV(files=written.files))


def _outcome_of(news: PrefillWritten | PrefillRefused) -> Outcome:
    if isinstance(news, PrefillRefused) and news.why in ("busy", "misfit"):
        return "busy" if news.why == "busy" else "misfit"
    return "failed"
