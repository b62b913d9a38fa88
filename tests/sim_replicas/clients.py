"""`Client`: asks one thing after another of replicas, and gives up on those that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Final, Protocol

from session_server.core.sampling import SamplingParams
from session_server.core.session_events import TokenInput, TurnRequest
from tests.sim.draws import Draws
from tests.sim_replicas.judge import Facts
from tests.sim_replicas.process import OWNER, Process
from tests.sim_replicas.requests import Requests
from tests.sim_replicas.schedule import Schedule

_PATIENCE_S: Final = (1.0, 1.0, 5.0, 30.0)
"""How long clients wait for an answer. Who waits does nothing else, so most do not wait long."""

_TTLS_S: Final = (3600.0, 3600.0, 3600.0, 60.0)
_VERBS: Final = ("turn", "again", "read", "list", "rewind", "fork", "delete", "create")
_WEIGHTS: Final = (520, 640, 820, 850, 880, 895, 935, 1000)
_OF_STRAYS: Final = (100, 150, 550, 750, 800, 830, 1000, 1000)
"""Running sums."""


class Town(Protocol):
    """Name what a client asks of its surroundings."""

    schedule: Schedule
    draws: Draws
    requests: Requests

    def processes(self) -> Sequence[Process]:
        """Return the replicas that are there to be asked."""

    max_sessions: int
    """How many sessions clients keep open at a time."""

    think_ms: int
    """How long a client waits between two requests, at most."""


class Client:
    """Ask for things at random. `turns`: those of all clients that may be sent again."""

    def __init__(self, town: Town, number: int, turns: dict[str, list[TurnRequest]]) -> None:
        self._town, self._number, self._turns = town, number, turns
        self._num_made = 0
        self._task: asyncio.Task[object] | None = None
        self.is_over = self.is_idle = False

    def begin(self) -> None:
        """Ask for the next thing, after a while."""
        self._task, self.is_idle = None, True
        if not self.is_over:
            think_s = self._town.draws.between("thinking", 1, self._town.think_ms) / 1e3
            self._town.schedule.after(think_s, self._next)

    def _next(self) -> None:
        processes = self._town.processes()
        if self.is_over or not processes:
            self.begin()
            return
        for process in processes:
            process.check_lease()
        draws, facts = self._town.draws, self._town.requests.judge.facts
        open_facts = [each for each in facts.values() if each.gone_s is None and not each.may_go]
        verb = draws.weighted("verb", _VERBS, _WEIGHTS)
        if len(open_facts) < 2:
            verb = "create"
        elif len(open_facts) >= self._town.max_sessions and verb in ("create", "fork"):
            verb = "delete"
        process = draws.pick("replica", processes)
        if verb != "create" and open_facts:
            verb, process, open_facts = self._interesting(verb, process, open_facts)
        self.is_idle = False
        self._serve(process, self._work(verb, process, draws.pick("session", open_facts or [None])))

    def _interesting(
        self, verb: str, process: Process, open_facts: list[Facts]
    ) -> tuple[str, Process, list[Facts]]:
        """Return what may go wrong sooner than what was drawn, now and then."""
        draws, processes = self._town.draws, self._town.processes()
        moving = [each for each in processes if each.migration]
        if moving and draws.happens("one that migrates", 800):
            meanwhile = self._meanwhile(draws.pick("which migrates", moving), open_facts)
            if meanwhile is not None:
                return meanwhile
        if draws.happens("a stray", 400):
            strays = [(p, f) for p in processes for f in open_facts if p.has_strayed(f.name)]
            if strays:
                where, facts = draws.pick("which stray", strays)
                if draws.happens("elsewhere first", 400):
                    return draws.pick("elsewhere", ("turn", "turn", "delete")), process, [facts]
                return draws.weighted("of a stray", _VERBS, _OF_STRAYS), where, [facts]
        if draws.happens("what is busy", 150):
            busy = [(p, f) for p in processes for f in open_facts if p.is_busy(f.name)]
            if busy:
                where, facts = draws.pick("which busy one", busy)
                return draws.pick("of a busy one", ("turn", "turn", "update")), where, [facts]
        if draws.happens("what is being read", 100):
            read = [(p, f) for p in processes for f in open_facts if f.name in p.being_read()]
            if read:
                where, facts = draws.pick("which is being read", read)
                others = [each for each in processes if each is not where] or [process]
                verb = draws.pick("of what is being read", ("turn", "turn", "delete"))
                return verb, draws.pick("who reads it too", others), [facts]
        if draws.happens("what is being deleted", 100):
            where = draws.pick("which deletes", processes)
            going = where.being_deleted()
            known = self._town.requests.judge.facts
            if going and (name := draws.pick("which goes", going)) in known:
                return "read", where, [known[name]]
        # One that the database may have given up is asked for what it still has in memory.
        doubtful = [each for each in processes if not each.is_right]
        if doubtful and draws.happens("a doubtful one", 300):
            process = draws.pick("which doubtful one", doubtful)
            here = {each.session_id for each in process.manager._sessions}
            open_facts = [each for each in open_facts if each.name in here] or open_facts
        return verb, process, open_facts

    def _meanwhile(
        self, moving: Process, open_facts: list[Facts]
    ) -> tuple[str, Process, list[Facts]] | None:
        """Return what may go wrong while a replica migrates: it has much to write, and what it has
        not written goes on elsewhere, or is deleted there; None if nothing may."""
        draws, server = self._town.draws, moving.site.server
        assert moving.migration is not None, "it stays where it is"
        unwritten = moving.migration.unwritten
        if unwritten is None:
            here = [each for each in open_facts if moving.has(each.name)]
            here = [each for each in here if moving.was_opened_here(each.name)] or here
            return ("update", moving, here) if here else None
        right = [each for each in self._town.processes() if each.is_right]
        free = [each for each in open_facts if each.name in unwritten]
        free = [each for each in free if not server.is_held(OWNER.owner_id, each.name)]
        if not free or not right:
            return None
        verb = draws.pick("meanwhile", ("turn", "delete", "delete"))
        return verb, draws.pick("elsewhere", right), free

    def _work(
        self, verb: str, process: Process, facts: Facts | None
    ) -> Coroutine[Any, Any, object]:
        requests, draws = self._town.requests, self._town.draws
        judge = requests.judge
        if verb == "list":
            return requests.list(process, [judge.begin(name) for name in judge.facts])
        if verb == "create" or facts is None:
            return self._create(process)
        begun = judge.begin(facts.name)
        match verb:
            case "turn" | "again":
                return self._turn(process, facts, is_new=verb == "turn")
            case "read":
                if draws.happens("deleted is read", 100):
                    begun = judge.begin(draws.pick("deleted", list(judge.facts)))
                return requests.read(process, begun)
            case "update":
                return requests.update(process, begun)
            case "rewind":
                return requests.rewind(process, begun, partial(draws.below, "answer"))
            case "fork":
                new = judge.opened(self._new_name(), facts.ttl_s)
                return requests.fork(process, begun, judge.begin(new.name))
            case _:
                return requests.delete(process, begun)

    def _new_name(self) -> str:
        self._num_made += 1
        return f"c{self._number}-{self._num_made}"

    def _create(self, process: Process) -> Coroutine[Any, Any, None]:
        draws, judge = self._town.draws, self._town.requests.judge
        name, ttl_s = self._new_name(), draws.pick("ttl", _TTLS_S)
        if judge.facts and draws.happens("one name twice", 200):
            facts = judge.facts[list(judge.facts)[-1]]
            if facts.gone_s is None and not facts.may_go:
                name, ttl_s, facts.is_opened_twice = facts.name, facts.ttl_s, True
        judge.opened(name, ttl_s)
        return self._town.requests.create(process, name, ttl_s)

    def _turn(self, process: Process, facts: Facts, *, is_new: bool) -> Coroutine[Any, Any, object]:
        draws, requests = self._town.draws, self._town.requests
        sent = self._turns.setdefault(facts.name, [])
        if sent and not is_new:
            request = draws.pick("turn", sent[-6:])
        else:
            self._num_made += 1
            is_long = draws.happens("long turn", 60)
            request = TurnRequest(
                f"{facts.name}/{self._number}-{self._num_made}",
                TokenInput(tuple(draws.between("token", 300, 310) for _ in range(3))),
                SamplingParams(max_tokens=60 if is_long else draws.between("length", 1, 6)),
            )
            sent.append(request)
        requests.judge.sent(facts.name, request.turn_id)
        return requests.turn(process, requests.judge.begin(facts.name), request)

    # -- asking

    def _serve(self, process: Process, work: Coroutine[Any, Any, object]) -> None:
        task = process.start(work, self._on_done)
        self._task = task

        def give_up() -> None:
            if self._task is task:
                process.deliver(lambda: _cancel(task))
                self.begin()

        patience_s = self._town.draws.pick("patience", _PATIENCE_S)
        self._town.schedule.after(patience_s, give_up)

    def _on_done(self, task: asyncio.Task[object]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            task.get_loop().call_exception_handler({"message": "broken", "exception": error})
        if task is self._task:
            self.begin()


def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
