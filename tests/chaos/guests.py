"""Clients of a cluster that know one address for all its replicas, that of Ray's proxy.

They remember as those of `movers` and `responders` do. Which replica has a session they do not see,
only that another one has it: its epoch is another one then.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Any

import httpx
import openai

from tests.chaos.cluster import BUSY, Way
from tests.chaos.crashes import TOLD
from tests.chaos.movers import MODEL, Chatter, Mover, Requester, Waits, complete
from tests.chaos.responders import Responder, Told, text_of
from tests.web.wire_client import http_client

SEED = {"seed": 7}
"""An echo says other things with another one, whatever the temperature is."""

STAY_S = 12.0
"""How long a client stays about, before it connects again."""


class Guest(Mover):
    """A client over WebSocket."""

    def __init__(self, cluster: Way, number: int, waits: Waits) -> None:
        super().__init__(cluster, number, waits)
        self.came_s = 0.0
        self.patience_s = 3 * cluster.lease_s + 12.0

    async def place(self) -> str:
        return await self.cluster.place()

    async def _visit(self, url: str) -> None:
        self.came_s = time.monotonic()
        try:
            await super()._visit(url)
        finally:
            if self.session_id is not None and self.ended and self.left is None:
                self.left = self.epoch, time.monotonic()

    def _leaves(self) -> bool:
        return super()._leaves() or time.monotonic() > self.came_s + STAY_S

    def note_progress(self, frame: dict[str, Any]) -> None:
        if self.left is not None and self.left[0] != self.epoch:
            since_s = self.left[1]
            fate = self.cluster.fate_of("", since_s)
            self.waits.took_s[fate].append(time.monotonic() - since_s)
        self.left = None


class GuestOverRest(Guest, Requester):
    """A client over REST."""


class LibraryResponder(Responder):
    """A client of Responses through OpenAI's library: chains of `previous_response_id`, and a
    conversation. With an even number it names a replica's key in a header, as the library's users
    are told to; with an odd one each request goes to any replica."""

    def __init__(self, town: Way, number: int) -> None:
        super().__init__(town, number)
        self.way, self.came_s = town, 0.0
        self.past: list[Told] = []
        """All that it was told, in order."""

    async def visit(self, url: str) -> None:
        self.came_s = time.monotonic()
        await super().visit(url)

    def _leaves(self) -> bool:
        return self.chance.happens(0.1) or time.monotonic() > self.came_s + STAY_S

    def _http(self, url: str) -> httpx.AsyncClient:
        http = super()._http(url)
        http.event_hooks["response"].append(self._come_again)
        return http

    async def _come_again(self, answer: httpx.Response) -> None:
        if answer.status_code in BUSY:
            await answer.aread()
            self.report.saw[f"refused: {answer.json()['error']['code']}"] += 1
            if self.asked is not None and self.way.may_still_run():
                self._leave_conversation()
            raise ConnectionRefusedError(answer.json()["error"]["code"])

    def _leave_conversation(self) -> None:
        self.conversation, self.items, self.asked = None, [], None

    async def _answer(
        self, http: httpx.AsyncClient, said: str, **options: Any
    ) -> dict[str, Any] | None:
        await asyncio.sleep(self.way.think_s * self.chance.share())
        name = f"responder-{self.number}"
        body = await self._asked_of(
            http, said, {"x-session-id": name} if self.number % 2 else {}, options
        )
        if body is None or body["durable"] is not True:
            self.report.saw["told that it is not on disk"] += body is not None
            self._leave_conversation()
            return None
        self.report.saw["responses"] += 1
        self.report.saw[TOLD] += 1
        if "conversation" not in options:
            self.past.append(Told(body, said, options["previous_response_id"]))
        return body

    async def _asked_of(
        self, http: httpx.AsyncClient, said: str, headers: dict[str, str], options: dict[str, Any]
    ) -> dict[str, Any] | None:
        library = openai.AsyncOpenAI(
            base_url=f"{str(http.base_url).rstrip('/')}/v1",
            api_key="none",
            http_client=http,
            max_retries=0,
            timeout=http.timeout,
        )
        try:
            answer = await library.responses.with_raw_response.create(
                model=MODEL,
                input=said,
                max_output_tokens=6,
                temperature=0,
                extra_headers=headers,
                extra_body=SEED,
                **options,
            )
        except openai.APIStatusError as refusal:
            self._complain(f"{options} is refused: {refusal.message}")
            return None
        except openai.APIConnectionError as error:
            if self.asked is not None and self.way.may_still_run():
                self._leave_conversation()
            raise ConnectionError(str(error.__cause__)) from error
        body: dict[str, Any] = answer.http_response.json()
        if answer.parse().output_text != text_of(body):
            self._complain(f"the library reads {answer.parse().output_text!r} in {body}")
        return body

    def _complain(self, problem: str) -> None:
        super()._complain(problem)
        print(f"{time.strftime('%H:%M:%S')} {self.report.problems[-1][:600]}", flush=True)

    async def is_settled(self, url: str) -> bool:
        """Return whether all is as remembered."""
        async with self._http(url) as http:
            await self._is_as_remembered(http)
        return True


async def told_again(chatter: Chatter, url: str) -> None:
    """Say to a server that nothing befalls what a client of Chat Completions has said, and compare
    what it answers."""
    async with http_client(url) as http:
        library = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
        for number, said in enumerate((*chatter.past, chatter.said)):
            for at in range(0, len(said), 2):
                name = f"again-{chatter.number}-{number}"
                completion = await complete(library, name, said[:at], said[at]["content"])
                _compare(chatter, said[at + 1]["content"], completion.choices[0].message.content)
            await http.delete(f"/v1/sessions/again-{chatter.number}-{number}")


async def responded_again(responder: LibraryResponder, url: str) -> None:
    """As `told_again`, of Responses."""
    names: dict[str | None, str | None] = {None: None}
    async with http_client(url) as http:
        for told in responder.past:
            body = {
                "input": told.said,
                "max_output_tokens": 6,
                "temperature": 0,
                **SEED,
                "previous_response_id": names[told.previous],
            }
            found = await http.post("/v1/responses", json=body)
            assert found.status_code == HTTPStatus.OK, found.text
            answer = found.json()
            names[told.id] = answer["id"]
            _compare(responder, told.essence, (text_of(answer), answer["usage"]["input_tokens"]))


def _compare(client: Chatter | LibraryResponder, told: object, again: object) -> None:
    client.report.saw["answers that are the same elsewhere"] += 1
    if told != again:
        client._complain(f"was told {told!r}, and a server that nothing befalls says {again!r}")
