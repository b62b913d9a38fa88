"""What clients, the network and the clock do next before the whole server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Final

from tests.sim.clients import Client
from tests.sim.context import SimContext
from tests.sim.draws import mix
from tests.sim.faults import Site
from tests.sim.network import SEND_TIMEOUT_S
from tests.sim.rewrite_ops import RewriteOps
from tests.sim.server import LETTERS
from tests.sim.shadow import SessionShadow
from tests.sim.trace import Op
from tests.sim.typing_ops import TypingOps
from tests.sim.wire import WireWorld

_LENGTHS: Final = (1, 1, 2, 3, 4, 5, 8, 13, 21, 40)


class WireOps:
    """Draws the next operation from the habits of the configuration and the state of the world."""

    def __init__(self, context: SimContext, world: WireWorld) -> None:
        config = context.config
        self._config = config
        self._draws = context.draws
        self._faults = context.faults
        self._world = world
        self._num_names = 0
        self._speaks_on: int | None = None
        """Who has closed a session and has something to say in it."""

        self._rewrites = RewriteOps(
            context.draws, world.clients, self._bare_turn, self._letters, self._name
        )
        self._typing = TypingOps(
            context.draws,
            world.clients,
            self._letters,
            lambda length: [
                context.draws.pick("typed id", world.server.model.alphabet[1:])
                for _ in range(length)
            ],
            self._name,
        )
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
            self._rewrites.next: habits.rewrite,
            self._draft: habits.draft,
            self._cool: habits.cool,
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
        if op is None and (index := self._speaks_on) is not None:
            self._speaks_on = None
            op = self._turn_of(index)
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
        return self._turn_of(self._draws.below("client", len(self._world.clients)))

    def _turn_of(self, index: int) -> Op | None:
        draws, habits = self._draws, self._config.habits
        client = self._world.clients[index]
        shadow = client.shadow
        if shadow is None or shadow.closed_by is not None:
            return self._open(index)
        if client.socket is None:
            return self._reconnect(index)
        room = self._room(client)
        if room < 8 and not draws.happens("overfull", 100):
            return {"op": "send", "c": index, "frame": {"type": "session.close"}}
        frame = self._bare_turn()
        if draws.happens("generates nothing", 60):
            frame["generate"] = False
        if (said := self._typing.said(client)) is not None:
            return {"op": "send", "c": index, "frame": frame | said}
        length = min(habits.max_input, draws.pick("length", _LENGTHS))
        if habits.rewrite and draws.happens("message", 600):
            frame["input"] = self._letters(min(length, 5))
        elif draws.happens("text", 400):
            frame["text"] = self._letters(length)
        else:
            frame["input_ids"] = self._new_tokens(shadow.tokens, length)
        return {"op": "send", "c": index, "frame": frame}

    def _draft(self) -> Op | None:
        return self._typing.next(lambda client: self._room(client) - 8)

    def _room(self, client: Client) -> int:
        """Tokens that its next turn may have."""
        said = client.shadow.tokens if client.shadow is not None else ()
        return self._world.max_turn_len - len(said)

    def _bare_turn(self) -> dict[str, Any]:
        """A turn without its input."""
        draws = self._draws
        return {
            "type": "turn.create",
            "turn_id": self._name("t"),
            "queue": draws.pick("queue", (True, True, True, False)),
            "priority": draws.pick("priority", (0, 0, 0, 1, 5)),
            "on_disconnect": draws.pick("on_disconnect", ("detach", "cancel")),
            "sampling": self._sampling(),
        }

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

    def _cool(self) -> Op | None:
        quiet = [
            index
            for index, client in enumerate(self._world.clients)
            if client.socket is not None and client.shadow is not None and not client.shadow.live
        ]
        if not quiet:
            return None
        index = self._draws.pick("who cools", quiet)
        verb = "warm" if self._draws.happens("warms", 300) else "cool"
        return {"op": "send", "c": index, "frame": {"type": f"session.{verb}"}}

    def _close(self) -> Op:
        index = self._draws.below("close", len(self._world.clients))
        if self._draws.happens("speaks on", 250):
            self._speaks_on = index
        return {"op": "send", "c": index, "frame": {"type": "session.close"}}

    def _misbehave(self) -> Op | None:
        draws = self._draws
        index = draws.below("misbehaving client", len(self._world.clients))
        shadow = self._world.clients[index].shadow
        what = draws.pick("misbehave", ("again", "conflict", "ping", "junk", "late", "vocab"))
        frame: Any = {"type": "ping", "t": 1.0}
        if what in {"again", "conflict", "late"}:
            frames = {} if shadow is None else {t: shadow.asked[t].frame for t in shadow.order}
            sent = [turn_id for turn_id in frames if frames[turn_id]["type"] == "turn.create"]
            if shadow is None or not sent:
                return None
            turn_id = draws.pick("which turn", sent[-6:])
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
