"""The wire front: clients on sockets, the real application and sessions, and the engine behind.

An operation is what a client, the network, the engine or the clock does next. After each, the
server runs until nothing is ready, the shadows read the journals, and the clients their frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from session_server.core.errors import (
    EngineUnavailable,
    SessionNotFound,
    SessionServerError,
)
from session_server.core.owner import Owner
from session_server.core.session_events import ItemEdited, SessionRewound, TurnEnd
from session_server.sessions.journal import Journal
from session_server.sessions.views import OpenRequest
from session_server.web.key_file import digest_of
from tests.sim.clients import Client
from tests.sim.context import SimContext
from tests.sim.conversation import Conversation
from tests.sim.draws import name_value
from tests.sim.failure import Broken, Layer
from tests.sim.faults import DOUBT_SITES
from tests.sim.history import DOUBT_FAILURES
from tests.sim.rewrites import Rewrites
from tests.sim.server import SimServer, embedded_text
from tests.sim.shadow import SessionShadow, SimText, World
from tests.sim.trace import Op

STEP_S: Final = 0.01
"""Virtual time one operation takes."""

MAX_QUIET: Final = 40
"""Rounds without any change, each of some seconds, after which what still waits waits for ever."""


@dataclass(slots=True, eq=False)
class OpenSession:
    """A session that is read by its shadow. `longest`: its most tokens so far."""

    owner: Owner
    session_id: str
    journal: Journal
    shadow: SessionShadow
    longest: int = 0


class WireWorld:
    """Applies operations. What refers to a client, session or turn that is not there does
    nothing."""

    def __init__(self, context: SimContext) -> None:
        config, reached = context.config, context.reached
        self._config = config
        self.reached = reached
        self.server = SimServer(context)
        keys = self.server.keys
        self.clients = [
            Client(f"c{index}", keys[index % len(keys)], reached)
            for index in range(config.habits.num_sessions)
        ]
        self._open_sessions: list[OpenSession] = []
        self._owners: dict[str, Owner] = {}
        pieces = {
            token: embedded_text().tokenizer.decode([token]) for token in self.server.model.alphabet
        }
        self._world = World(
            self.server.model,
            SimText(pieces, embedded_text().tokenizer.encode_control),
            self.server.engine.hand.engine.max_turn_len,
            {"context_too_long", "server_busy", "tokenize_failed"},
            reached,
        )
        self._verbs: dict[str, Callable[[Op], None]] = {
            "open": self._open,
            "connect": self._connect,
            "send": self._send,
            "drop": self._drop,
            "stall": self._stall,
            "step": self._step,
            "tick": self._tick,
            "die": self._die,
            "revive": self._revive,
            "flush": self._flush,
            "report": self._report,
            **Rewrites(self).verbs,
        }

    @property
    def num_steps(self) -> int:
        """Engine steps so far."""
        return self.server.engine.num_steps

    @property
    def max_turn_len(self) -> int:
        """Longest context of a turn."""
        return self._world.max_turn_len

    def apply(self, op: Op) -> None:
        """Do one operation, and hear what came of it."""
        self._verbs[op["op"]](op)
        if not op.get("hold"):
            self._settle()

    def finish(self) -> None:
        """Nothing new: let everything end, close all, empty the cache, see that nothing is left."""
        server = self.server
        self._calm()
        self._rest(lambda: all(not each.shadow.live for each in self._open_sessions))
        self._rest(lambda: not server.num_drafts)
        self._rest(lambda: all(client.is_current for client in self.clients))
        for each in self._open_sessions:
            each.shadow.is_close_asked = True  # turns may still arrive from sockets that were slow
        if self._config.seed % 3 == 0:
            self._ask(server.sessions.drain(5.0))
        else:
            for each in self._open_sessions:
                server.do(functools.partial(self._close, each))
        self._rest(lambda: not self._open_sessions)
        server.loop.create_task(self._flush_all())
        self._rest(lambda: server.num_tasks == 0)
        server.engine.hand.check_empty()
        server.check_empty()

    def close(self) -> None:
        """Let go of the loop."""
        self.server.close()

    # Operations

    def _open(self, op: Op) -> None:
        client = self.clients[op["c"]]
        if not client.is_free:
            return
        request = OpenRequest(session_id=op["s"], pinned=op["pinned"], ttl_s=op["ttl_s"])
        self.server.sessions.open(Owner(digest_of(client.key)), request)
        if op["pinned"]:
            self._world.allowed.add("quota_exceeded")
        self.begin(client, op["s"])

    def begin(self, client: Client, session_id: str, *, said: Conversation | None = None) -> None:
        """Give a client a session that was just opened, in which this was said already."""
        owner = Owner(digest_of(client.key))
        salt = self.server.salts.salt_of(owner, session_id)
        if self._owners.setdefault(salt, owner) != owner:
            raise Broken(Layer.SHADOW, f"{owner} shares a namespace with {self._owners[salt]}")
        shadow = SessionShadow(self._world, name_value(salt), said)
        journal = self.server.sessions.journal(owner, session_id)
        self._open_sessions.append(OpenSession(owner, session_id, journal, shadow))
        client.begin(session_id, shadow)
        self._attach(client)

    def session_of(self, client: Client) -> OpenSession | None:
        """The session that a client talks in, unless it has closed."""
        return next((s for s in self._open_sessions if s.shadow is client.shadow), None)

    def _connect(self, op: Op) -> None:
        client = self.clients[op["c"]]
        if client.session_id:
            self.reached["superseded itself"] += client.socket is not None
            client.forget(op["forgets"])
            self._attach(client)

    def _send(self, op: Op) -> None:
        client, frame = self.clients[op["c"]], op["frame"]
        if client.shadow is None:
            return
        if isinstance(frame, dict) and frame["type"] == "turn.create":
            known = client.shadow.asked.get(frame["turn_id"])
            if known is not None and known.created_seq is None:
                return  # it was lost on its way; another body would not be a conflict
            client.shadow.ask(frame["turn_id"], frame)
            client.drafts.typed = None
        if isinstance(frame, dict) and frame["type"] == "turn.draft":
            client.drafts.send(frame, client.shadow)
        if isinstance(frame, dict) and frame["type"] == "turn.cancel":
            client.shadow.cancel(frame.get("turn_id"))
        if isinstance(frame, dict) and frame["type"] == "session.close":
            client.shadow.is_close_asked = True
        client.send(frame)

    def _drop(self, op: Op) -> None:
        client = self.clients[op["c"]]
        if client.socket is not None:
            self.reached["fault net_drop"] += 1
            client.drop()

    def _stall(self, op: Op) -> None:
        client = self.clients[op["c"]]
        self.reached["fault net_stall"] += op["on"]
        client.is_stalled = op["on"]

    def _step(self, op: Op) -> None:
        engine = self.server.engine
        if "fault" in op and engine.is_alive:
            engine.hand.inject(op["fault"], op["which"])
            self._world.allowed.update(DOUBT_FAILURES if op["fault"] in DOUBT_SITES else ())
            self._world.allowed.update(("device_failed", "numerical_error"))
        for index in range(op["times"]):
            engine.play(self.server.loop.time() + index * STEP_S, op["results"])
        self._deliver(op["deliver"])

    def _tick(self, op: Op) -> None:
        self.read_journals()  # what was said before may be forgotten for its age
        self.server.wait(op["s"])

    def _die(self, op: Op) -> None:
        del op
        engine = self.server.engine
        self._world.allowed.add("engine_restarting")
        if engine.is_alive:
            self.reached["fault engine_death"] += 1
            self.reached["engine died under turns"] += bool(engine.hand.history.live)
            self.reached["engine died under drafts"] += bool(engine.hand.history.drafts.reach)
            engine.crash(is_heard=True)
            engine.tell_death()

    def _revive(self, op: Op) -> None:
        del op
        self.server.engine.revive()

    def _flush(self, op: Op) -> None:
        del op
        self._ask(self.server.sessions.flush())

    def _report(self, op: Op) -> None:
        self._ask(self.server.sessions.memory(full=op["full"]))

    def _deliver(self, num_events: int | None) -> None:
        self.server.do(functools.partial(self.server.engine.deliver, num_events))

    def _close(self, each: OpenSession) -> None:
        with contextlib.suppress(SessionNotFound):  # its client's own frame may come just before
            self.server.sessions.close(each.owner, each.session_id)

    # What follows an operation

    def _settle(self) -> None:
        self.server.run(STEP_S)
        self.read_journals()
        for client in self.clients:
            client.read()

    def read_journals(self) -> None:
        """Let the shadows learn what was told since."""
        for each in self._open_sessions:
            journal, shadow = each.journal, each.shadow
            has_news, has_ended = journal.last_seq > shadow.seq, False
            while journal.last_seq > shadow.seq:
                for found in journal.read(shadow.seq):
                    shadow.read(found)
                    has_ended |= isinstance(found.entry, TurnEnd | SessionRewound | ItemEdited)
            if shadow.closed_by is not None:
                continue
            if shadow.num_unended > 1:
                self._check_line(each)
            if has_news:
                self._check_bounds(each)
            if has_ended:
                self._check_history(each)
            if has_news:
                self.server.check_kv(each.owner, each.session_id, each.longest)
        self._open_sessions = [s for s in self._open_sessions if s.shadow.closed_by is None]

    def _check_bounds(self, each: OpenSession) -> None:
        """What is kept has the bounds it was given."""
        journal, limits = each.journal, self.server.limits
        num_entries = journal.last_seq - journal.first_seq + 1
        is_over = num_entries > limits.journal.max_entries
        is_over |= journal.num_bytes > limits.journal.max_bytes
        if is_over:
            raise Broken(Layer.SHADOW, f"{num_entries} entries of {journal.num_bytes} bytes kept")
        self.server.check_counts()
        if each.shadow.ended:
            oldest = each.shadow.asked[each.shadow.ended[0]].end
            assert oldest is not None
            is_told = each.shadow.said.holds_answer(oldest.turn_id)
            self.server.check_remembered(each.owner, each.session_id, oldest, is_told=is_told)

    def _check_line(self, each: OpenSession) -> None:
        """A closing session has nobody who waits."""
        view = self.server.sessions.get(each.owner, each.session_id)
        if view.state == "closing" and view.queued_turns:
            raise Broken(Layer.PROTOCOL, f"{each.session_id} closes, and turns of it wait")

    def _check_history(self, each: OpenSession) -> None:
        sessions = self.server.sessions
        each.shadow.learn_items(sessions.snapshot(each.owner, each.session_id).items)
        history = sessions.history(each.owner, each.session_id)
        if list(history) != each.shadow.tokens:
            raise Broken(
                Layer.SHADOW, f"{each.session_id} holds {history}, told was {each.shadow.tokens}"
            )
        each.longest = max(each.longest, len(history))

    def _attach(self, client: Client) -> None:
        client.attach(self.server.connect(client.session_id, client.key, client.resume_point()))

    def _ask(self, question: Awaitable[object]) -> None:
        async def ask() -> None:
            with contextlib.suppress(SessionServerError):
                await question

        self.server.loop.create_task(ask())

    async def _flush_all(self) -> None:
        """Until it is done: an engine that takes nothing more at the moment is asked again."""
        is_done = False
        while not is_done:
            with contextlib.suppress(EngineUnavailable):
                is_done = await self.server.sessions.flush()
            await asyncio.sleep(0.0 if is_done else 1.0)

    # Coming to rest

    def _calm(self) -> None:
        """No more faults: the engine is up, every client is there and reads."""
        self.server.engine.revive()
        self.server.engine.hand.calm()
        for client in self.clients:
            client.is_stalled = False

    def _rest(self, is_done: Callable[[], bool]) -> None:
        """Let the server and its engine go on until they have done what they must."""
        engine, num_quiet = self.server.engine, 0
        budget = self._rest_budget()
        while not (is_done() and engine.is_resting):
            before = self._progress()
            engine.play(self.server.loop.time(), 1 if engine.hand.is_blocked else 0)
            self._deliver(None)
            self._settle()
            self._reconnect()
            num_quiet = num_quiet + 1 if self._progress() == before else 0
            if num_quiet:
                self.server.wait(1.0)
            budget -= 1
            if num_quiet > MAX_QUIET or budget < 0:
                waiting = {s.session_id: s.shadow.live for s in self._open_sessions}
                raise Broken(Layer.LIVENESS, f"waits for ever: {waiting}")

    def _reconnect(self) -> None:
        for client in self.clients:
            shadow = client.shadow
            if shadow is None or shadow.closed_by is not None:
                client.shadow = None if client.socket is None else shadow
            elif client.socket is None:
                self._attach(client)

    def _progress(self) -> tuple[object, ...]:
        seqs = tuple(each.shadow.seq for each in self._open_sessions)
        heard = tuple(client.num_heard for client in self.clients)
        engine = self.server.engine
        # The chunks of a draft show nowhere else.
        num_forwards = len(engine.hand.batches) if self.server.num_drafts else 0
        hand = engine.hand
        num_copies = hand.carrier.num_carried if hand.carrier is not None else 0
        engine_state = (num_copies, hand.num_launched, engine.is_resting, hand.is_blocked)
        return seqs, heard, num_forwards, *engine_state

    def _rest_budget(self) -> int:
        num_live = sum(len(each.shadow.live) for each in self._open_sessions)
        num_live += self.server.num_drafts
        return 1000 + 12 * self._world.max_turn_len * num_live
