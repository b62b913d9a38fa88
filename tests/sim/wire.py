"""The wire front: clients on sockets, the real application and sessions, and the engine behind.

An operation is what a client, the network, the engine or the clock does next. After each, the
server runs until nothing is ready, the shadows read the journals, and the clients their frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from session_server.core.errors import (
    EngineUnavailable,
    SessionNotFound,
    SessionServerError,
)
from session_server.core.owner import Owner
from session_server.core.session_events import TurnEnd
from session_server.sessions.journal import Journal
from session_server.sessions.views import OpenRequest
from session_server.web.keys import digest_of
from tests.sim.clients import Client
from tests.sim.context import SimContext
from tests.sim.draws import mix, name_value
from tests.sim.failure import Broken, Layer
from tests.sim.faults import Site
from tests.sim.network import SEND_TIMEOUT_S
from tests.sim.server import LETTERS, SimServer, embedded_text
from tests.sim.shadow import SessionShadow, SimText, World
from tests.sim.trace import Op

STEP_S: Final = 0.01
"""Virtual time one operation takes."""

MAX_QUIET: Final = 40
"""Rounds without any change, each of some seconds, after which what still waits waits for ever."""

_LENGTHS: Final = (1, 1, 2, 3, 4, 5, 8, 13, 21, 40)


@dataclass(slots=True, eq=False)
class OpenSession:
    """A session that is read by its shadow."""

    owner: Owner
    session_id: str
    journal: Journal
    shadow: SessionShadow


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
        if client.shadow is not None and client.shadow.closed_by is None:
            return
        owner, session_id = Owner(digest_of(client.key)), op["s"]
        request = OpenRequest(session_id=session_id, pinned=op["pinned"], ttl_s=op["ttl_s"])
        self.server.sessions.open(owner, request)
        salt = self.server.salts.salt_of(owner, session_id)
        if self._owners.setdefault(salt, owner) != owner:
            raise Broken(Layer.SHADOW, f"{owner} shares a namespace with {self._owners[salt]}")
        root = name_value(salt)
        shadow = SessionShadow(self._world, root)
        journal = self.server.sessions.journal(owner, session_id)
        self._open_sessions.append(OpenSession(owner, session_id, journal, shadow))
        if op["pinned"]:
            self._world.allowed.add("quota_exceeded")
        client.begin(session_id, shadow)
        self._attach(client)

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
            self._world.allowed.update(("device_failed", "numerical_error"))
        for index in range(op["times"]):
            engine.play(self.server.loop.time() + index * STEP_S, op["results"])
        self._deliver(op["deliver"])

    def _tick(self, op: Op) -> None:
        self._read_journals()  # what was said before may be forgotten for its age
        self.server.wait(op["s"])

    def _die(self, op: Op) -> None:
        del op
        engine = self.server.engine
        self._world.allowed.add("engine_restarting")
        if engine.is_alive:
            self.reached["fault engine_death"] += 1
            self.reached["engine died under turns"] += bool(engine.hand.history.live)
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
        self._read_journals()
        for client in self.clients:
            client.read()

    def _read_journals(self) -> None:
        for each in self._open_sessions:
            journal, shadow = each.journal, each.shadow
            has_news, has_ended = journal.last_seq > shadow.seq, False
            while journal.last_seq > shadow.seq:
                for found in journal.read(shadow.seq):
                    shadow.read(found)
                    has_ended |= isinstance(found.entry, TurnEnd)
            if shadow.closed_by is not None:
                continue
            if shadow.num_unended > 1:
                self._check_line(each)
            if has_news:
                self._check_bounds(each)
            if has_ended:
                self._check_history(each)
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
            self.server.check_remembered(each.owner, each.session_id, oldest)

    def _check_line(self, each: OpenSession) -> None:
        """A closing session has nobody who waits."""
        view = self.server.sessions.get(each.owner, each.session_id)
        if view.state == "closing" and view.queued_turns:
            raise Broken(Layer.PROTOCOL, f"{each.session_id} closes, and turns of it wait")

    def _check_history(self, each: OpenSession) -> None:
        history = self.server.sessions.history(each.owner, each.session_id)
        if list(history) != each.shadow.tokens:
            raise Broken(
                Layer.SHADOW, f"{each.session_id} holds {history}, told was {each.shadow.tokens}"
            )

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
        return seqs, heard, engine.hand.num_launched, engine.is_resting, engine.hand.is_blocked

    def _rest_budget(self) -> int:
        num_live = sum(len(each.shadow.live) for each in self._open_sessions)
        return 1000 + 12 * self._world.max_turn_len * num_live


class WireOps:
    """Draws the next operation from the habits of the configuration and the state of the world."""

    def __init__(self, context: SimContext, world: WireWorld) -> None:
        config = context.config
        self._config = config
        self._draws = context.draws
        self._faults = context.faults
        self._world = world
        self._num_names = 0
        habits = config.habits
        makers: dict[Callable[[], Op | None], int] = {
            self._turn: habits.submit,
            self._cancel: habits.cancel,
            self._close: habits.close,
            self._misbehave: habits.misbehave,
            self._network: habits.net,
            self._tick: 10,
            self._flush: habits.flush,
            self._report: habits.report,
        }
        self._makers = list(makers)
        self._weights = list(accumulate(makers.values()))
        letters = world.server.model.alphabet[1:]
        self._documents = [
            [letters[mix(config.seed, which, at) % len(letters)] for at in range(80)]
            for which in range(3)
        ]

    def next(self) -> Op:
        """The next operation."""
        draws = self._draws
        if not self._world.server.engine.is_alive and draws.happens("revive", 200):
            return {"op": "revive"}
        op = self._struck()
        if op is None:
            if draws.happens("patient", self._config.habits.patient):
                return self._engine_op()
            op = draws.weighted("op", self._makers, self._weights)() or self._engine_op()
        return {**op, "hold": True} if draws.happens("hold", 100) else op

    def _struck(self) -> Op | None:
        """What befalls the engine or a connection, if anything does."""
        draws, strikes, clients = self._draws, self._faults.strikes, self._world.clients
        if self._world.server.engine.is_alive and strikes(Site.ENGINE_DEATH):
            return {"op": "die"}
        connected = [index for index, client in enumerate(clients) if client.socket is not None]
        if connected and strikes(Site.NET_DROP):
            return {"op": "drop", "c": draws.pick("unlucky client", connected)}
        reading = [index for index in connected if not clients[index].is_stalled]
        if reading and strikes(Site.NET_STALL):
            return {"op": "stall", "c": draws.pick("tired client", reading), "on": True}
        return None

    def _engine_op(self) -> Op:
        draws = self._draws
        if self._world.server.engine.is_resting:
            return self._turn() or {"op": "tick", "s": 1.0}
        return {
            "op": "step",
            "times": draws.pick("times", (1, 1, 2, 4, 8)),
            "results": draws.pick("results", (0, 1, 1, 1, 1, 1, 2)),
            "deliver": draws.pick("deliver", (None, None, None, None, None, 0, 1, 3)),
            **self._world.server.engine.hand.draw_fault(),
        }

    def _turn(self) -> Op | None:
        """Some client says something; it opens a session or connects first where it must."""
        draws, habits = self._draws, self._config.habits
        index = draws.below("client", len(self._world.clients))
        client = self._world.clients[index]
        shadow = client.shadow
        if shadow is None or shadow.closed_by is not None:
            return self._open(index)
        if client.socket is None:
            return self._reconnect(index)
        room = self._world.max_turn_len - len(shadow.tokens)
        if room < 8 and not draws.happens("overfull", 100):
            return {"op": "send", "c": index, "frame": {"type": "session.close"}}
        frame: dict[str, Any] = {
            "type": "turn.create",
            "turn_id": self._name("t"),
            "queue": draws.pick("queue", (True, True, True, False)),
            "priority": draws.pick("priority", (0, 0, 0, 1, 5)),
            "on_disconnect": draws.pick("on_disconnect", ("detach", "cancel")),
            "sampling": self._sampling(),
        }
        if draws.happens("generates nothing", 60):
            frame["generate"] = False
        length = min(habits.max_input, draws.pick("length", _LENGTHS))
        if draws.happens("text", 400):
            frame["text"] = self._letters(length)
        else:
            frame["input_ids"] = self._new_tokens(shadow.tokens, length)
        return {"op": "send", "c": index, "frame": frame}

    def _open(self, index: int) -> Op:
        draws = self._draws
        is_pinned = self._config.sizes.pinned_quota_pages > 0 and draws.happens("pinned", 400)
        ttl_s = draws.pick("ttl", (None, None, 20.0))
        return {"op": "open", "c": index, "s": self._name("s"), "pinned": is_pinned, "ttl_s": ttl_s}

    def _new_tokens(self, history: list[int], length: int) -> list[int]:
        draws, start = self._draws, len(history)
        if draws.happens("shared", self._config.habits.shared):
            for document in self._documents:
                if start + length <= len(document) and history == document[:start]:
                    return document[start : start + length]
        letters = self._world.server.model.alphabet[1:]
        return [draws.pick("token", letters) for _ in range(length)]

    def _letters(self, length: int) -> str:
        return "".join(self._draws.pick("letter", LETTERS) for _ in range(length))

    def _sampling(self) -> dict[str, Any]:
        draws = self._draws
        lengths = (1, 2, 5, 9, 17, 30, 40)
        max_tokens = min(self._config.habits.max_new, draws.pick("max_tokens", lengths))
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "seed": draws.below("seed", 4)}
        if draws.happens("min_tokens", 250):
            sampling["min_tokens"] = min(max_tokens, draws.pick("min", (2, 6)))
        if draws.happens("ignore_eos", 600):
            sampling["ignore_eos"] = True
        if draws.happens("stops", 250):
            length = draws.pick("stop length", (1, 2, 2, 3))
            sampling["stop"] = [self._letters(length) for _ in range(3)]
        if draws.happens("stop_token_ids", 150):
            sampling["stop_token_ids"] = [
                draws.pick("stop id", self._world.server.model.alphabet) for _ in range(2)
            ]
        return sampling

    def _cancel(self) -> Op | None:
        index, shadow = self._pick_talking()
        if shadow is None:
            return None
        turn_id = self._draws.pick("cancel", (None, shadow.live[0], shadow.live[-1]))
        keep = self._draws.pick("keep", (True, True, False))
        frame = {"type": "turn.cancel", "keep_partial": keep}
        return {
            "op": "send",
            "c": index,
            "frame": frame | ({"turn_id": turn_id} if turn_id else {}),
        }

    def _close(self) -> Op:
        index = self._draws.below("close", len(self._world.clients))
        return {"op": "send", "c": index, "frame": {"type": "session.close"}}

    def _misbehave(self) -> Op | None:
        draws = self._draws
        index = draws.below("misbehaving client", len(self._world.clients))
        shadow = self._world.clients[index].shadow
        what = draws.pick("misbehave", ("again", "conflict", "ping", "junk", "late", "vocab"))
        frame: Any = {"type": "ping", "t": 1.0}
        if what in {"again", "conflict", "late"}:
            if shadow is None or not shadow.order:
                return None
            turn_id = draws.pick("which turn", shadow.order[-6:])
            frame = dict(shadow.asked[turn_id].frame)
            if what == "conflict":
                frame["priority"] = 77
            if what == "late":
                # Of a turn that has most likely ended, or of none: an id that only begins like one.
                turn_id = draws.pick("late id", (turn_id, turn_id[:-1]))
                frame = {"type": "turn.cancel", "turn_id": turn_id}
        elif what == "junk":
            frame = draws.pick("junk", ("", "{", '{"type":"no"}', '{"type":"ack","seq":-1}'))
        elif what == "vocab":
            frame = {"type": "turn.create", "input_ids": [10**6], "turn_id": self._name("bad")}
        return {"op": "send", "c": index, "frame": frame}

    def _network(self) -> Op:
        """Somebody reads again, or connects anew."""
        index = self._draws.below("restless client", len(self._world.clients))
        if self._world.clients[index].is_stalled and self._draws.happens("reads on", 400):
            return {"op": "stall", "c": index, "on": False}
        return self._reconnect(index)

    def _reconnect(self, index: int) -> Op:
        """Where it was, or from further back: a page that was loaded again, another tab."""
        forgets = self._draws.pick("forgets", (0, 0, 0, 3, 40, 200))
        return {"op": "connect", "c": index, "forgets": forgets}

    def _tick(self) -> Op:
        lengths = (1.0, 1.0, SEND_TIMEOUT_S + 1, 30.0, 130.0, 400.0)
        return {"op": "tick", "s": self._draws.pick("tick", lengths)}

    def _flush(self) -> Op:
        return {"op": "flush"}

    def _report(self) -> Op:
        return {"op": "report", "full": self._draws.pick("full", (True, False))}

    def _pick_talking(self) -> tuple[int, SessionShadow | None]:
        talking = list(self._talking())
        return self._draws.pick("talking", talking) if talking else (0, None)

    def _talking(self) -> Iterator[tuple[int, SessionShadow]]:
        for index, client in enumerate(self._world.clients):
            if client.shadow is not None and client.shadow.live and client.socket is not None:
                yield index, client.shadow

    def _name(self, prefix: str) -> str:
        self._num_names += 1
        return f"{prefix}{self._num_names}"
