"""A manager over an engine stepped by hand, with no socket: every moment can be chosen.

A moment is half a step: after the engine took one, before the manager heard of it; or after it
heard. Moments of one exchange are numbered from 0, and `at_every_moment` plays the exchange once
for each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

from session_server.core.errors import SessionServerError
from session_server.core.owner import Owner
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import SessionEntry, TextOptions, TokenInput, TurnRequest
from session_server.sessions.manager import SessionManager
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.salts import TenantSalts
from session_server.sessions.views import OpenRequest, TurnView
from session_server.text.model_text import ModelText
from tests.faults.recovery import History, all_is_back, folded
from tests.sessions.world import model_text
from tests.sim.echo import EchoModel
from tests.sim.hand_engine import HandEngine, Sizes
from tests.sim.hosted_engine import HostedEngine

T = TypeVar("T")
OWNER = Owner("owner")
MAX_MOMENTS = 5000
SEED = 7


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward: deadlines pass without being waited for."""

    skipped_s = 0.0

    def time(self) -> float:
        """See `AbstractEventLoop.time`."""
        return super().time() + self.skipped_s


class Rig:
    """Everything on one event loop that only runs when asked to."""

    def __init__(
        self,
        sizes: Sizes | None = None,
        *,
        model: EchoModel | None = None,
        make_engine: Callable[[], HandEngine] | None = None,
        limits: SessionLimits | None = None,
        quotas: QuotaLimits | None = None,
        text: ModelText | None = None,
    ) -> None:
        self.now_s = 100.0
        self.loop = JumpingLoop()
        self.limits = limits or SessionLimits()
        echo = partial(HandEngine.of, sizes or Sizes(), model=model)
        self.engine = HostedEngine(make_engine or echo)
        self.manager = SessionManager(
            self.engine,
            text or model_text(),
            salts=TenantSalts(bytes(range(16))),
            limits=self.limits,
            quotas=quotas,
            clock=lambda: self.now_s,
        )
        self.requests: dict[str, dict[str, TurnRequest]] = {}
        self._is_step_next = True
        self._num_names = 0
        self.do(self.manager.start())

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self.manager.stop())
        self.loop.close()

    # -- time

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run one coroutine to its end."""
        return self.loop.run_until_complete(coroutine)

    def spin(self) -> None:
        """Let callbacks run that are ready."""
        self.do(_two_rounds())

    def moment(self) -> None:
        """Half a step."""
        if self._is_step_next:
            self.engine.step()
        else:
            self.engine.deliver()
            self.spin()
        self._is_step_next = not self._is_step_next

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing happens any more by itself."""
        return self.engine.is_resting

    def rest(self) -> None:
        """Go on until nothing happens any more."""
        for _ in range(MAX_MOMENTS):
            if self.is_at_rest:
                return
            self.moment()
        raise AssertionError("the server did not come to rest")

    # -- verbs

    def open(self, *, owner: Owner = OWNER, **options: Any) -> str:
        """A session, whose turns are remembered."""
        session_id = self.manager.open(owner, OpenRequest(**options)).session_id
        self.requests[session_id] = {}
        return session_id

    def submit(self, session_id: str, request: TurnRequest) -> TurnView:
        """Submit; what the server takes in is remembered."""
        view = self.do(self.manager.submit(OWNER, session_id, request))
        self.requests[session_id].setdefault(request.turn_id, request)
        return view

    def run(self, session_id: str, request: TurnRequest) -> History:
        """A turn to its end; the history behind it."""
        self.submit(session_id, request)
        self.rest()
        return self.manager.history(OWNER, session_id)

    def entries(self, session_id: str) -> list[SessionEntry]:
        """The whole journal."""
        return [found.entry for found in self.manager.journal(OWNER, session_id).read(0)]

    def new_turn(self, *tokens: int, max_tokens: int = 4, **sampling: Any) -> TurnRequest:
        """A turn of a name of its own."""
        self._num_names += 1
        return turn(f"n{self._num_names}", *tokens, max_tokens=max_tokens, **sampling)

    def salt(self, session_id: str) -> str:
        """What the session's chains of KV begin with."""
        return self.manager._salts.salt_of(OWNER, session_id)

    # -- checks

    def check_histories(self) -> None:
        """Every open session's history is what its journal told."""
        for session_id, requests in self.requests.items():
            history = self.manager.history(OWNER, session_id)
            salt = self.salt(session_id)
            assert history == folded(self.entries(session_id), requests, salt, truth=history)

    def forget_closed(self) -> None:
        """Leave out of the checks what the test has closed."""
        for session_id in list(self.requests):
            try:
                self.manager.get(OWNER, session_id)
            except SessionServerError:
                del self.requests[session_id]

    def assert_recovered(self) -> None:
        """No turn waits, histories are exact, sessions are usable, and every page comes back."""
        self.rest()
        self.check_histories()
        for session_id in self.requests:
            before = self.manager.history(OWNER, session_id)
            after = self.run(session_id, self.new_turn(3, 4))
            assert after[: len(before)] == before
            assert len(after) == len(before) + 2 + 4, "the session does not go on"
        self.check_histories()
        for session_id in self.requests:
            self.manager.close(OWNER, session_id)
        self.requests.clear()
        self.assert_empty()

    def assert_empty(self) -> None:
        """With every session closed nothing is left: no turn, no quota, no page."""
        self.rest()
        flush = self.loop.create_task(self.manager.flush())
        self.spin()
        self.rest()
        assert self.do(flush) is True
        all_is_back(self.manager, self.engine.hand)


async def _two_rounds() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def turn(
    turn_id: str, *tokens: int, max_tokens: int = 4, stop: tuple[str, ...] = (), **options: Any
) -> TurnRequest:
    """A turn of exact length with a seed of its own."""
    queue = options.pop("queue", True)
    sampling = SamplingParams(
        **({"max_tokens": max_tokens, "seed": SEED, "ignore_eos": True} | options)
    )
    text = TextOptions(stop=stop)
    return TurnRequest(turn_id, TokenInput(tokens), sampling, text=text, queue=queue)


def at_every_moment(rig: Rig, begin: Callable[[], None]) -> Iterator[int]:
    """Play the exchange that `begin` starts once for each of its moments.

    Each time the caller gets the number of the moment, with the exchange just there; it strikes,
    and checks what it wants before asking for the next.
    """
    moment = 0
    while True:
        begin()
        for _ in range(moment):
            rig.moment()
        if rig.is_at_rest and moment > 0:
            rig.assert_recovered()
            return
        yield moment
        moment += 1
