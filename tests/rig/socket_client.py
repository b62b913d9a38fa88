"""A chaotic client of `kvsession.v1`, by its own hands: no library between it and the frames."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from tests.rig.history import Ask
from tests.rig.scene import MAX_TURNS, QUIET_S, Client, Scene, long_turn, some_turn
from tests.web.wire_client import SUBPROTOCOL, narrow_socket

LOST = (OSError, TimeoutError, ConnectionClosed, InvalidHandshake, EOFError)


class SocketClient(Client):
    """Opens a session, does random things to it, and in the end knows how every turn ended."""

    def __init__(self, scene: Scene, number: int) -> None:
        super().__init__(scene, number)
        self._socket: ClientConnection | None = None
        self._last_seq = 0
        self._is_slow = self.chance.happens(0.1)

    async def run(self) -> None:
        """The whole life of the client."""
        deeds = (
            self.talk,
            self.cancel,
            self.speak_ahead,
            self.vanish,
            self.take_over,
            self.repeat_itself,
            self.hang_up,
            self.storm,
            self.babble,
        )
        try:
            await self.connected()
            for _ in range(self.chance.between(2, 3)):
                deed = self.chance.pick(deeds)
                if len(self.log.asks) < MAX_TURNS - 5:
                    self.scene.saw[deed.__name__] += 1
                    await deed()
            await self.listen(lambda: not self.log.unknown)
        finally:
            self.drop()

    # What it does

    async def talk(self) -> None:
        """A turn, its answer, and a cancel that comes too late."""
        ask = await self.ask(some_turn(self.chance))
        await self.until_end(ask)
        await self.say("turn.cancel", turn_id=ask.turn_id)

    async def cancel(self) -> None:
        """A turn that is cancelled somewhere, perhaps twice."""
        ask = await self.ask(long_turn(self.chance))
        await self.some_frames(ask)
        for _ in range(self.chance.between(1, 2)):
            await self.say_cancel(ask)
        await self.until_end(ask)

    async def speak_ahead(self) -> None:
        """Turns sent before the ones before them have ended; one of them is cancelled in line."""
        asks = [await self.ask(some_turn(self.chance)) for _ in range(3)]
        if self.chance.happens(0.5):
            await self.say_cancel(self.chance.pick(asks))
        for ask in asks:
            await self.until_end(ask)

    async def vanish(self) -> None:
        """Gone in the middle of a turn, and back for the rest of it."""
        ask = await self.ask(long_turn(self.chance))
        await self.some_frames(ask)
        self.drop()
        await asyncio.sleep(self.chance.share() / 5)
        await self.until_end(ask)

    async def take_over(self) -> None:
        """A second connection to the session while the first one listens."""
        ask = await self.ask(long_turn(self.chance))
        await self.some_frames(ask)
        first, self._socket = self._socket, None
        await self.until_end(ask)
        if first is None:
            return
        with contextlib.suppress(*LOST):
            async with asyncio.timeout(1.0):
                while True:
                    await first.recv()
        self.scene.saw[f"first connection closed {first.close_code}"] += 1
        first.transport.abort()

    async def repeat_itself(self) -> None:
        """One turn, asked for three times."""
        ask = await self.ask(some_turn(self.chance))
        for _ in range(2):
            await self.say("turn.create", turn_id=ask.turn_id, **ask.body)
        await self.until_end(ask)

    async def hang_up(self) -> None:
        """A turn that is to end with its connection, which ends."""
        ask = await self.ask(long_turn(self.chance, on_disconnect="cancel"))
        await self.some_frames(ask)
        self.drop()
        await self.until_end(ask)

    async def storm(self) -> None:
        """Turns that are cancelled as soon as they are asked for."""
        asks = []
        for _ in range(5):
            asks.append(await self.ask(long_turn(self.chance)))
            await self.say_cancel(asks[-1])
        for ask in asks:
            await self.until_end(ask)

    async def babble(self) -> None:
        """Words without meaning, which cost nothing but an error or the connection."""
        babble: tuple[str | bytes, ...] = ("{", '{"type":"turn.fly"}', "[" * 5000, b"\x00")
        with contextlib.suppress(*LOST):
            await (await self.connected()).send(self.chance.pick(babble))
        await self.talk()

    # How it speaks and listens

    async def ask(self, body: dict[str, Any]) -> Ask:
        """Ask for a turn of these words."""
        ask = self.new_ask(body)
        await self.say("turn.create", turn_id=ask.turn_id, **body)
        return ask

    async def say_cancel(self, ask: Ask) -> None:
        """Cancel by name: without one, a repeated message would hit whatever runs then."""
        ask.cancel = {"turn_id": ask.turn_id, "keep_partial": self.chance.happens(0.5)}
        await self.say("turn.cancel", **ask.cancel)

    async def say(self, kind: str, **fields: Any) -> None:
        """One frame, which may get lost; `connected` says again what matters."""
        if self._socket is None:
            return
        with contextlib.suppress(*LOST):
            await self._socket.send(json.dumps({"type": kind, **fields}))

    async def some_frames(self, ask: Ask) -> None:
        """Listen for a few frames, or until the turn has ended."""
        wanted = self.chance.magnitude(16)
        num_heard = 0

        def enough() -> bool:
            nonlocal num_heard
            num_heard += 1
            return num_heard > wanted or ask.end is not None

        await self.listen(enough)

    async def until_end(self, ask: Ask) -> None:
        """Listen until the turn's end is known."""
        await self.listen(lambda: ask.end is not None)

    async def listen(self, is_enough: Callable[[], bool]) -> None:
        """Receive frames until then, over as many connections as it takes."""
        while not is_enough():
            try:
                own = await self.connected()
                async with asyncio.timeout(QUIET_S):
                    payload = await own.recv()
            except LOST as error:
                self.scene.saw[f"lost by {type(error).__name__}"] += 1
                self.drop()
                continue
            if self._is_slow:
                await asyncio.sleep(0.005)
            self.hear(json.loads(payload))

    def hear(self, frame: dict[str, Any]) -> None:
        """Take in one frame."""
        kind, seq = frame["type"], frame.get("seq")
        ask = self.log.asks.get(frame.get("turn_id", ""))
        if seq is not None:
            is_next = seq == self._last_seq + 1 or (kind == "turn.delta" and seq > self._last_seq)
            if not is_next:
                self.problem(f"{kind} {seq} heard after {self._last_seq}")
            self._last_seq = seq
        if ask is not None:
            self.hear_turn(ask, frame)
        if kind == "error":
            self.hear_refusal(frame["error"])
        elif kind == "session.closed":
            self.problem("the session closed by itself")

    def hear_refusal(self, error: dict[str, Any]) -> None:
        """Of a cancel that came too late, or of words without meaning; nothing else is due."""
        self.scene.saw[f"refused {error['code']}"] += 1
        if error["code"] not in {"turn_not_active", "turn_not_found", "invalid_request"}:
            self.problem(f"refused: {error}")

    # How it connects

    async def connected(self) -> ClientConnection:
        """The present connection, or a new one that knows what is still wanted."""
        while self._socket is None:
            try:
                async with asyncio.timeout(QUIET_S):
                    self._socket = await self._greeted()
                for ask in self.log.unknown:
                    await self.say("turn.create", turn_id=ask.turn_id, **ask.body)
                    if ask.cancel is not None:
                        await self.say("turn.cancel", **ask.cancel)
            except LOST as error:
                self.scene.saw[f"no connection by {type(error).__name__}"] += 1
                if isinstance(error, InvalidStatus) and error.response.status_code < 500:
                    raise
                await asyncio.sleep(0.02)
        return self._socket

    async def _greeted(self) -> ClientConnection:
        base, query = self.scene.url.replace("http://", "ws://"), ""
        port = int(base.rpartition(":")[2])
        if self.log.session_id:
            query = f"?after={self._last_seq}&epoch={self.log.epoch}"
        narrow = await narrow_socket(port) if self._is_slow else None
        own: dict[str, Any] = {"sock": narrow} if narrow is not None else {}
        try:
            connection = await connect(
                f"{base}/v1/sessions/{self.log.session_id or 'new'}/ws{query}",
                subprotocols=[SUBPROTOCOL],
                compression=None,
                proxy=None,
                close_timeout=0.2,
                ping_interval=None,
                max_queue=1 if self._is_slow else 16,
                **own,
            )
        except BaseException:
            if narrow is not None:
                narrow.close()
            raise
        try:
            hello = json.loads(await connection.recv())
        except BaseException:
            connection.transport.abort()
            raise
        self.scene.saw["resumed" if hello["resumed"] else "greeted"] += 1
        if self.log.session_id and not hello["resumed"]:
            self.problem(f"not resumed after {self._last_seq}: {hello}")
        self.log.session_id, self.log.epoch = hello["session_id"], hello["epoch"]
        self._last_seq = hello["seq"]
        return connection

    def drop(self) -> None:
        """Lose the connection as a cable would."""
        if self._socket is not None:
            self._socket.transport.abort()
            self._socket = None
