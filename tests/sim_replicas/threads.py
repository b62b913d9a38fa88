"""Threads of a replica, without threads: what waits for the database goes on when that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar, cast

from session_server.sessions.backlog import SLICE
from session_server.sessions.store.writer import (
    GATHER_S,
    GroupCommits,
    Told,
    Write,
    _Asked,
    _tell,
)
from tests.sim.loop import VirtualLoop
from tests.sim_replicas.database import SimDatabase
from tests.sim_replicas.link import Answer, Link

_T = TypeVar("_T")


class _Blocked(BaseException):
    """Stop a piece of work where its thread would wait for an answer."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call


class _Work:
    """A piece of work of a thread, which begins anew with every answer it gets: until there it does
    what it did before, by the clock as it was. What it does before its first question must be
    nothing but to look at the clock."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()
        self.answers: list[Answer] = []
        self.times: list[float] = []
        self.num_asked = self.num_looked = 0


class SimThreads(Executor):
    """Run work that asks the database, in virtual time. `clock`: of the replica."""

    def __init__(self, link: Link, clock: Callable[[], float]) -> None:
        self._link, self._clock = link, clock
        self._now: _Work | None = None

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Begin a piece of work at once."""
        work = _Work(partial(fn, *args, **kwargs))
        self._go_on(work)
        return work.future

    def clock(self) -> float:
        """Return the time, in a piece of work that begins anew the one that it was told first."""
        work = self._now
        if work is None:
            return self._clock()
        work.num_looked += 1
        if work.num_looked > len(work.times):
            work.times.append(self._clock())
        return work.times[work.num_looked - 1]

    def ask(self, call: Callable[[], object]) -> object:
        """Ask the database in a piece of work; or at once, where a server starts."""
        work = self._now
        if work is None:
            return call()
        work.num_asked += 1
        if work.num_asked > len(work.answers):
            raise _Blocked(call)
        return work.answers[work.num_asked - 1].get()

    def _go_on(self, work: _Work) -> None:
        work.num_asked = work.num_looked = 0
        outer, self._now = self._now, work
        try:
            work.future.set_result(work.run())
        except _Blocked as blocked:
            self._link.ask(blocked.call, partial(self._on_answer, work))
        except BaseException as error:  # noqa: BLE001 - the waiter gets it
            work.future.set_exception(error)
        finally:
            self._now = outer

    def _on_answer(self, work: _Work, answer: Answer) -> None:
        work.answers.append(answer)
        self._go_on(work)


class ReplicaLoop(VirtualLoop):
    """The event loop of one replica, whose time is its own clock. `wall_s` returns what that shows
    as the time of day."""

    def __init__(self, wall_s: Callable[[], float]) -> None:
        super().__init__(lambda: 0.0)
        self.wall_s = wall_s
        self.threads: SimThreads | None = None
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Those that are not done, in the order in which they were made."""

    def create_task(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """See `asyncio`."""
        task: asyncio.Task[Any] = super().create_task(*args, **kwargs)
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)
        return task

    def _write_to_self(self) -> None:
        """Wake nobody: nobody sleeps."""

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """Run work that asks the database, or that returns what is to be awaited."""
        assert self.threads is not None, "a loop without threads"
        return self.create_task(_whole(self.threads.submit(func, *args)))


async def _whole(future: Future[_T]) -> _T:
    found = await asyncio.wrap_future(future)
    return cast(_T, await found if isinstance(found, Awaitable) else found)


class SimCommits(GroupCommits):
    """`GroupCommits` whose thread is a task: a transaction begins at the database, and commits
    there some time later."""

    def __init__(
        self, database: SimDatabase, deliver: Callable[[Callable[[], None]], None], link: Link
    ) -> None:
        super().__init__(database, deliver)
        self._of, self._link = database, link
        self._is_asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to write."""

    def start_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to write, as a task of a loop."""
        self._task = loop.create_task(self._write_all(), name="store writer")

    def ask(self, write: Write | None, told: Told) -> None:
        """See `GroupCommits`."""
        super().ask(write, told)
        self._is_asked.set()

    def stop(self, wait_s: float) -> Any:
        """Return what waits for the end, and returns whether it came."""
        self._asked.put(None)
        self._is_asked.set()
        assert self._task is not None, "a writer that was not started"
        return _ends(self._task, wait_s)

    async def _write_all(self) -> None:
        """Do as `_run` does."""
        num_taken, gathers, is_over = 0, False, False
        while not is_over:
            while self._asked.empty() and not self._later:
                self._is_asked.clear()
                await self._is_asked.wait()
            if gathers and not self._asked.empty():
                await asyncio.sleep(GATHER_S)
            group, is_over = self._take(gathers=False)
            num_taken += len(group)
            gathers = sum(asked.write is not None for asked in group) > 1
            group += self._take_later(num_taken)
            errors = await self._commit_over(group)
            for start in range(0, len(group), SLICE):
                part = slice(start, start + SLICE)
                self._deliver(partial(_tell, group[part], errors[part]))

    async def _commit_over(self, group: Sequence[_Asked]) -> list[Exception | None]:
        """Do as `_commit` does."""
        writes = [asked for asked in group if asked.write is not None]
        if not writes:
            return [None] * len(group)
        error = await self._try_over(writes)
        errors: list[Exception | None] = [error] * len(writes)
        if error is not None and len(writes) > 1 and not self._is_of_all(error):
            errors = [await self._try_over([asked]) for asked in writes]
        self.counts.add(errors, 0.0)
        of_writes = iter(errors)
        return [None if asked.write is None else next(of_writes) for asked in group]

    async def _try_over(self, group: Sequence[_Asked]) -> Exception | None:
        """Do as `_try` does, with a way to the database before the transaction and within it."""
        server, me = self._of.server, self._of.replica_id
        try:
            begun = await self._answer(lambda: server.begin(me))
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            return error

        def commit() -> Exception | None:
            self._of.begun = begun
            return self._try(group)

        try:
            return cast("Exception | None", await self._answer(commit))
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            return error

    async def _answer(self, call: Callable[[], _T]) -> _T:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def told(answer: Answer) -> None:
            if not future.done():
                future.set_result(answer)

        self._link.ask(call, told)
        return cast(_T, (await future).get())


async def _ends(task: asyncio.Task[None], wait_s: float) -> bool:
    done, _ = await asyncio.wait([task], timeout=wait_s)
    return bool(done)
