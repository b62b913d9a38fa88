"""Clients of several replicas: each moves on to another one when it is refused, moved or cut off.

Sockets and requests remember as the clients of `crashes` do. Clients of OpenAI's library hold whole
conversations in sessions that they name. Onlookers only read, through whichever replica.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import openai
from openai.types.chat import ChatCompletion

from tests.chaos.cluster import BUSY, Way
from tests.chaos.crashes import LOST, TOLD, Client
from tests.rig.decisions import Decisions
from tests.sim.echo import replay
from tests.web.wire_client import Wire

MODEL = "session-server-embedded"
WORDS = ("red", "green", "blue", "seven", "eight", "north", "south")
MAX_SAID = 12
"""Messages of a conversation before another one begins."""


class Waits:
    """How long sessions took to go on elsewhere, in seconds to the next token, by what befell the
    replica that they left."""

    def __init__(self) -> None:
        self.took_s: defaultdict[str, list[float]] = defaultdict(list)

    def lines(self) -> Iterator[str]:
        """Say the median and the 95th percentile of each kind."""
        for kind, took_s in sorted(self.took_s.items()):
            took_s.sort()
            half, most = (took_s[int(len(took_s) * share)] for share in (0.5, 0.95))
            yield f"next token after {kind}: p50 {half:.2f} s, p95 {most:.2f} s, of {len(took_s)}"


class Mover(Client):
    """A client over WebSocket. One that is sticky stays where it is until it is sent away; others
    go from replica to replica. With an odd number it never rewinds, and onlookers may read it."""

    def __init__(self, cluster: Way, number: int, waits: Waits) -> None:
        super().__init__(cluster, number)
        self.cluster, self.waits = cluster, waits
        self.patience_s = cluster.lease_s + 6.0
        self.is_sticky = number % 4 < 2
        self.url = self.epoch = ""
        self.answers: dict[str, list[int]] = {}
        """The tokens that turns must have said, by the turn."""
        self.left: tuple[str, float] | None = None
        """The replica where its session was last, and since when the client waits for it."""

    @property
    def rewinds(self) -> bool:
        return self.number % 2 == 0

    async def _visit(self, url: str) -> None:
        try:
            await self._stay(url)
        except* LOST:
            if self.next_metadata is not None or self.rewound_to is not None or self.is_closing:
                # What was not answered may still be done, by a replica that was paused meanwhile.
                self._forget()
                self.report.saw["abandoned"] += 1
            raise

    async def _stay(self, url: str) -> None:
        await super()._visit(url)

    async def place(self) -> str:
        stays = self.is_sticky and self.url in self.cluster.urls and self.chance.happens(0.7)
        if not stays:
            before, self.url = self.url, await self.cluster.place()
            if before and before != self.url and self.left is None and self.session_id is not None:
                self.left = before, time.monotonic()
        return self.url

    def note_progress(self, frame: dict[str, Any]) -> None:
        if self.left is not None and self.left[0] != self.url:
            url, since_s = self.left
            fate = self.cluster.fate_of(url, since_s - self.cluster.lease_s - self.patience_s)
            self.waits.took_s[fate].append(time.monotonic() - since_s)
        self.left = None

    async def _is_as_remembered(self, http: httpx.AsyncClient) -> bool:
        """Compare as `Client` does what is on disk: what a replica has in memory alone, because it
        cannot reach the database, may be lost with it."""
        if self.session_id is not None:
            answer = await http.get(f"/v1/sessions/{self.session_id}")
            if answer.status_code == 200:
                self.epoch = answer.json()["epoch"]
                if answer.json()["durable"] is False:
                    self.report.saw["shown, and not on disk"] += 1
                    await asyncio.sleep(0.1)
                    return False
        return await super()._is_as_remembered(http)

    def _forget(self) -> None:
        super()._forget()
        self.left, self.answers = None, {}

    def _hear(self, end: dict[str, Any], body: dict[str, Any]) -> None:
        if end.get("durable") is False and not end.get("retryable"):
            # It may be lost with a replica that cannot reach the database: ask until it is not.
            self.report.saw["told that it is not on disk"] += 1
            return
        num_kept = len(self.kept)
        super()._hear(end, body)
        if len(self.kept) > num_kept:
            self._says_what_it_must(end)

    def _says_what_it_must(self, end: dict[str, Any]) -> None:
        """Compare the turn that is kept last with what an echo says to all before it."""
        turn_id, body = self.kept[-1].turn_id, self.kept[-1].body
        history = [
            token
            for turn in self.kept[:-1]
            for token in (*turn.body["input_ids"], *self.answers[turn.turn_id])
        ]
        answer = replay(
            "a",
            (*history, *body["input_ids"]),
            seed=body["sampling"]["seed"],
            max_new=end["usage"]["output_tokens"],
        )
        self.answers[turn_id] = answer
        told = end["item"].get("token_ids")
        if told:  # of one that had ended before, only its text is told again
            self.report.saw["answers that are an echo's"] += 1
            if list(told) != answer:
                self._complain(f"{turn_id} said {told}, and an echo says {answer}")

    async def think(self) -> None:
        """Say nothing for a while, unless something is waited for."""
        if self.left is None and self.unknown is None:
            await asyncio.sleep(self.cluster.think_s * self.chance.share())

    async def _talk_and_update(self, wire: Wire, http: httpx.AsyncClient) -> bool:
        await self.think()
        goes_on = await super()._talk_and_update(wire, http)
        if self.unknown is not None:
            await asyncio.sleep(0.1)
        return goes_on and not self._leaves()

    def _leaves(self) -> bool:
        return not self.is_sticky and self.chance.happens(0.15)

    async def _rewind(self, http: httpx.AsyncClient) -> None:
        if self.rewinds and self.unknown is None:
            await super()._rewind(http)

    async def is_settled(self, url: str) -> bool:
        """Return whether a replica has shown its session, and all as remembered."""
        async with self.cluster.http(url) as http:
            return self.session_id is None or await self._is_as_remembered(http)


class Requester(Mover):
    """A client over REST."""

    async def _stay(self, url: str) -> None:
        async with self.cluster.http(url) as http:
            if self.session_id is None:
                self._forget()
                answer = await http.post("/v1/sessions", json={})
                if answer.status_code != 201:
                    return
                self._hear_opened(answer.json())
            if not await self._is_as_remembered(http):
                return
            while not (self.town.is_over and self.unknown is None):
                if self._is_long:
                    await self._close(http)
                    return
                await self.think()
                body = self._next_turn()
                answer = await http.post(f"/v1/sessions/{self.session_id}/turns", json=body)
                if answer.status_code != 200:
                    self.report.saw[f"refused: {answer.json()['error']['code']}"] += 1
                    return
                self._hear_answer(answer.json(), body)
                if self._leaves():
                    return

    def _hear_answer(self, answer: dict[str, Any], body: dict[str, Any]) -> None:
        self.note_progress(answer)
        self.report.saw["turns over REST"] += 1
        error = answer["error"] or {}
        end = {"type": f"turn.{answer['status']}", "retryable": error.get("retryable"), **answer}
        self._hear(end, body)


async def complete(
    client: openai.AsyncOpenAI, session_id: str, said: list[dict[str, str]], asked: str
) -> ChatCompletion:
    """Ask something behind what was said in a session."""
    return await client.chat.completions.create(
        model=MODEL,
        messages=[*said, {"role": "user", "content": asked}],  # type: ignore[list-item]
        seed=7,
        temperature=1,
        max_tokens=12,
        extra_body={"session_id": session_id},
        extra_headers={"x-session-id": session_id},
    )


class Chatter:
    """A client of OpenAI's library, which names its session and sends the whole conversation."""

    def __init__(self, cluster: Way, number: int) -> None:
        self.cluster, self.report, self.number = cluster, cluster.report, number
        self.chance = Decisions(cluster.chance.below(1 << 30), "chat", number)
        self.num_held = 0
        self.said: list[dict[str, str]] = []
        self.past: list[list[dict[str, str]]] = []
        """The conversations before this one."""
        self._begin()

    def _begin(self) -> None:
        self.num_held += 1
        self.past.append(self.said)
        self.session_id = f"chat-{self.number}-{self.num_held}"
        self.said = []
        self.asked: str | None = None
        self.seen = ""
        """What was seen of an answer that nobody could be told of."""

    async def run(self) -> None:
        """Live until the last servers have begun."""
        while not (self.cluster.is_over and self.asked is None):
            url = await self.cluster.place()
            patience_s = 2 * self.cluster.lease_s + 8.0
            async with (
                self.cluster.http(url, timeout_s=patience_s) as http,
                openai.AsyncOpenAI(
                    base_url=f"{url}/v1",
                    api_key="none",
                    http_client=http,
                    max_retries=0,
                    timeout=patience_s,
                ) as client,
            ):
                try:
                    await self._visit(client, http)
                except (*LOST, openai.APIConnectionError) as error:
                    self.cluster.lost(error)
                    if self.asked is not None and self.cluster.may_still_run():
                        self._begin()

    async def _visit(self, client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
        if not await self._is_as_remembered(http):
            return
        while not (self.cluster.is_over and self.asked is None) and self.chance.happens(0.8):
            if len(self.said) >= MAX_SAID:
                self._begin()
            if self.asked is None:
                await asyncio.sleep(self.cluster.think_s * self.chance.share())
            try:
                await self._ask(client)
            except openai.APIStatusError as refusal:
                self.report.saw[f"chat refused: {refusal.code}"] += 1
                if refusal.status_code not in BUSY:
                    self._complain(f"refused: {refusal.message}")
                await asyncio.sleep(0.05)
                return

    async def _ask(self, client: openai.AsyncOpenAI) -> None:
        self.asked = self.asked or self.chance.pick(WORDS)
        completion = await complete(client, self.session_id, self.said, self.asked)
        answer = completion.choices[0].message.content or ""
        assert completion.model_extra is not None
        if completion.model_extra["durable"] is not True:
            self.report.saw["told that it is not on disk"] += 1
            self._begin()
            return
        if not answer.startswith(self.seen):
            self._complain(f"said {answer!r}, and {self.seen!r} when nobody could be told")
        self.said += [
            {"role": "user", "content": self.asked},
            {"role": "assistant", "content": answer},
        ]
        self.asked, self.seen = None, ""
        self.report.saw["chat completions"] += 1
        self.report.saw[TOLD] += 1

    async def _is_as_remembered(self, http: httpx.AsyncClient) -> bool:
        """Compare the session with what was said; a question whose answer is not known, and what
        was answered, may follow."""
        if not self.said:
            return True
        answer = await http.get(f"/v1/sessions/{self.session_id}/items")
        if answer.status_code == 404:
            self._complain(f"it is gone, with {len(self.said)} messages")
        if answer.status_code != 200:
            return False
        items = [{"role": at["role"], "content": at["content"]} for at in answer.json()["data"]]
        found, rest = items[: len(self.said)], items[len(self.said) :]
        if found != self.said:
            self._complain(f"told {self.said}, found {items}")
        if rest and (self.asked is None or rest[0] != {"role": "user", "content": self.asked}):
            self._complain(f"nobody asked for {rest}")
        if len(rest) > 1:
            self.report.saw["there, and not told of"] += 1
            self.seen = rest[1]["content"]
        return True

    async def is_settled(self, url: str) -> bool:
        """Return whether a replica has shown its session, and all as remembered."""
        async with self.cluster.http(url) as http:
            return await self._is_as_remembered(http)

    def _complain(self, problem: str) -> None:
        self.report.problems.append(f"{self.session_id}: {problem}")
        print(self.report.problems[-1][:600], flush=True)


class Onlooker:
    """A reader of sessions of others that never rewind: what it reads only grows at its end."""

    def __init__(self, cluster: Way, clients: list[Mover]) -> None:
        self.cluster, self.report = cluster, cluster.report
        self.clients = [client for client in clients if not client.rewinds]
        self.chance = Decisions(cluster.chance.below(1 << 30), "onlooker")
        self.seen: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)

    async def run(self) -> None:
        """Look now and then, until the last servers have begun."""
        while not self.cluster.is_over:
            session_id = self.chance.pick(self.clients).session_id
            if session_id is not None:
                url, patience_s = await self.cluster.place(), self.cluster.lease_s + 6.0
                async with self.cluster.http(url, timeout_s=patience_s) as http:
                    try:
                        await self._look(http, session_id)
                    except LOST:
                        self.report.saw["onlooker cut off"] += 1
            await asyncio.sleep(0.2 * self.chance.share())

    async def _look(self, http: httpx.AsyncClient, session_id: str) -> None:
        path = f"/v1/sessions/{session_id}"
        before = await http.get(path)
        answer = await http.get(f"{path}/items")
        after = await http.get(path)
        if not all(each.status_code == 200 for each in (before, answer, after)):
            return
        was_moved = before.json()["epoch"] != after.json()["epoch"]
        if was_moved or not after.json()["durable"]:
            return  # some of it may be lost with its replica
        items = answer.json()["data"]
        self.seen[session_id].append(
            tuple(f"{item['id']} {item['turn_id']} {item['content']}" for item in items)
        )
        self.report.saw["looked at"] += 1

    def problems(self) -> Iterator[str]:
        """Say where a session was shorter than before, or another one."""
        for session_id, histories in self.seen.items():
            for before, after in pairwise(histories):
                if after[: len(before)] != before:
                    yield f"{session_id}: seen {before[-4:]}, later {after[-4:]}"
