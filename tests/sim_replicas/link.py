"""`Link`: the way between one replica and the database, which may be slow, cut or half open."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Literal, NamedTuple

from tests.sim.draws import Draws
from tests.sim_replicas.schedule import Schedule
from tests.sim_replicas.server import DatabaseServer, Waits

UNANSWERED_S: Final = 10.0
"""After how long a connection is given up on which nothing is answered; as in
`sessions.postgres.connections`."""

_REFUSED_S: Final = 0.01

Part = Literal["question", "answer"]
Mode = Literal["up", "refused", "silent", "deaf"]
"""Of a link: whether connections are refused at once, whether nothing arrives and nobody is told,
or whether questions arrive and answers do not."""


class Answer(NamedTuple):
    """Hold what a question was answered, or the error."""

    value: object
    error: BaseException | None = None

    def get(self) -> object:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


class Waiting:
    """Hold what waits at the database, by what it waits for."""

    def __init__(self, schedule: Schedule, server: DatabaseServer) -> None:
        self._schedule = schedule
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        server.on_ready = self._on_ready

    def add(self, waits: Waits, again: Callable[[], None], give_up: Callable[[], None]) -> None:
        """Ask again once that is there, or give up."""
        is_done = False

        def once(run: Callable[[], None]) -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                run()

        ready = partial(once, again)
        waiting = self._waiting.setdefault(waits.what, [])
        waiting.append(ready)

        def late() -> None:
            if ready in self._waiting.get(waits.what, ()):
                self._waiting[waits.what].remove(ready)
            once(give_up)

        self._schedule.after(waits.timeout_s, late)

    def _on_ready(self, what: str) -> None:
        for ready in self._waiting.pop(what, ()):
            self._schedule.after(0.0, ready)


class Link:
    """Carry questions to the database and answers back. `deliver` runs something in the process of
    the replica. `lossy`: of a thousand questions, how many meet each kind of misfortune. `late_s`:
    by how much all questions are late, or all answers."""

    def __init__(
        self,
        waiting: Waiting,
        schedule: Schedule,
        draws: Draws,
        deliver: Callable[[Callable[[], None]], None],
    ) -> None:
        self._waiting, self._schedule, self._draws = waiting, schedule, draws
        self._deliver = deliver
        self.mode: Mode = "up"
        self.slow = 1.0
        self.lossy = 0
        self.late_s: dict[Part, float] = {}

    @property
    def is_right(self) -> bool:
        """Return whether it carries what it should."""
        return self.mode == "up" and not self.lossy and not self.late_s

    def mend(self) -> None:
        """Carry everything, and in time."""
        self.mode, self.slow, self.lossy, self.late_s = "up", 1.0, 0, {}

    def ask(self, call: Callable[[], object], told: Callable[[Answer], None]) -> None:
        """Have something asked of the database; `told` is called in the process with the answer, if
        one arrives, or with an error some time later."""
        if self.mode == "refused":
            self._fail(told, _REFUSED_S, "connection refused")
        elif self.mode == "silent" or self._draws.happens("question is lost", self.lossy):
            self._fail(told, UNANSWERED_S, "nothing is answered")
        else:
            self._schedule.after(self._delay_s("question"), partial(self._arrive, call, told))

    def _arrive(self, call: Callable[[], object], told: Callable[[Answer], None]) -> None:
        try:
            answer = Answer(call())
        except Waits as waits:
            late = Answer(waits.otherwise)
            if waits.otherwise is None:
                late = Answer(None, ConnectionError("canceled due to lock timeout"))
            self._waiting.add(
                waits, partial(self._arrive, call, told), partial(self._answer, told, late)
            )
            return
        except Exception as error:  # noqa: BLE001 - it belongs to whoever has asked
            answer = Answer(None, error)
        self._answer(told, answer)

    def _answer(self, told: Callable[[Answer], None], answer: Answer) -> None:
        if self.mode != "up" or self._draws.happens("answer is lost", self.lossy):
            self._fail(told, UNANSWERED_S, "the answer is lost")
        else:
            run = partial(self._deliver, partial(told, answer))
            self._schedule.after(self._delay_s("answer"), run)

    def _fail(self, told: Callable[[Answer], None], after_s: float, why: str) -> None:
        answer = Answer(None, ConnectionError(why))
        self._schedule.after(after_s, partial(self._deliver, partial(told, answer)))

    def _delay_s(self, what: Part) -> float:
        delay_s = self.slow * self._draws.between(what, 100, 1500) / 1e6
        delay_s += self.late_s.get(what, 0.0)
        if self._draws.happens(f"{what} is late", self.lossy):
            delay_s += self._draws.between(f"how late {what} is", 1, 16_000) / 1e3
        return delay_s
