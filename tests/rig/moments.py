"""A manager over an engine stepped by hand, with no socket: every moment can be chosen.

A moment is half a step: after the engine took one, before the manager heard of it; or after it
heard. Moments of one exchange are numbered from 0, and `at_every_moment` plays the exchange once
for each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from session_server.core.errors import SessionServerError
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import TextOptions, TokenInput, TurnRequest
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.salts import TenantSalts
from session_server.sessions.views import TurnView
from session_server.text.model_text import ModelText
from tests.rig.recovery import History, all_is_back, folded
from tests.sessions.world import OWNER, HeldManager, model_text
from tests.sim.echo import EchoModel
from tests.sim.hand_engine import HandEngine, Sizes
from tests.sim.hosted_engine import HostedEngine

MAX_MOMENTS = 5000
SEED = 7


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward: deadlines pass without being waited for."""

    skipped_s = 0.0

    def time(self) -> float:
        """See `AbstractEventLoop.time`."""
        return super().time() + self.skipped_s


class Rig(HeldManager[HostedEngine[HandEngine]]):
    """Everything on one event loop that only runs when asked to; `requests` are remembered."""

    loop: JumpingLoop

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
        echo = partial(HandEngine.of, sizes or Sizes(), model=model)
        self.limits = limits or SessionLimits()
        self.requests: dict[str, dict[str, TurnRequest]] = {}
        self._is_step_next = True
        self._num_names = 0
        super().__init__(
            HostedEngine(make_engine or echo),
            text or model_text(),
            salts=TenantSalts(bytes(range(16))),
            limits=self.limits,
            quotas=quotas,
            loop=JumpingLoop(),
        )

    # -- time

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

    def open(self, **options: Any) -> str:
        """A session, whose turns are remembered."""
        session_id = super().open(**options)
        self.requests[session_id] = {}
        return session_id

    def submit(self, session_id: str, request: TurnRequest, **options: Any) -> TurnView:
        """Submit; what the server takes in is remembered."""
        view = super().submit(session_id, request, **options)
        self.requests[session_id].setdefault(request.turn_id, request)
        return view

    def run(self, session_id: str, request: TurnRequest) -> History:
        """A turn to its end; the history behind it."""
        self.submit(session_id, request)
        self.rest()
        return self.history(session_id)

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
            history = self.history(session_id)
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
            before = self.history(session_id)
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
