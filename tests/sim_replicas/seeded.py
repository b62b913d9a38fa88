"""Bugs in what replicas do with leases, epochs and sessions that move, for the simulator."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests.mutants.mutant import Edit, Mutant
from tests.sim_replicas.simulation import Failure, run

_SESSIONS: Final = "session_server.sessions."
_LEASE: Final = f"{_SESSIONS}store.lease:ReplicaLease."
_SHARED: Final = f"{_SESSIONS}shared_sessions:SharedSessions."
_LOGS: Final = f"{_SESSIONS}session_logs:SessionLogs."
_DELETIONS: Final = f"{_SESSIONS}store.deletions:Deletions."
_RESTORER: Final = f"{_SESSIONS}restoring:Restorer."


def _bug(sentence: str, where: str, was: str, becomes: str, *others: Edit) -> Mutant:
    return Mutant(sentence, "systematic", Edit(where, was, becomes), *others)


MUTANTS: Final[Mapping[str, Mutant]] = MappingProxyType(
    {
        "margin ignored": _bug(
            "A replica answers until the very end of its lease, by a clock that may be slow.",
            f"{_LEASE}_note",
            "- min(MARGIN_S, self._lease_s / RENEWALS)",
            "",
        ),
        "lease noted from the answer": _bug(
            "A lease is counted from when the database's answer came.",
            f"{_LEASE}_note",
            "asked_s + self._lease_s",
            "self._clock() + self._lease_s",
        ),
        "lease not checked": _bug(
            "A replica answers from memory whose lease is over.",
            f"{_SHARED}check",
            "self._lease.check()",
            "pass",
        ),
        "lost lease keeps sessions": _bug(
            "Sessions stay in memory when the lease is lost.",
            f"{_LEASE}_lose",
            "self.told.on_lost()",
            "pass",
        ),
        "only running sessions are lost": _bug(
            "Of a lost lease only sessions with a turn are given up.",
            f"{_SESSIONS}exits:SessionExits.lose_all",
            "if session.life.log is not None:",
            "if session.live is not None:",
        ),
        "asked for in vain": _bug(
            "Nobody hears what others ask for.",
            f"{_LEASE}_listen",
            "self.told.on_asked(number)",
            "pass",
        ),
        "released while it is read": _bug(
            "A session that is asked for while it is read is released under whoever reads it.",
            f"{_SHARED}_release_asked",
            "loading = self._loading.values()",
            "loading = ()",
        ),
        "read after the loss": _bug(
            "What was read while the lease was lost is kept.",
            f"{_SHARED}_restore",
            "self._lease.check()",
            "pass",
        ),
        "taken before it is released": _bug(
            "A session is taken again before it was released, and released then.",
            f"{_SHARED}_adopt",
            "if leaving is not None:",
            "if False:",
            Edit(
                f"{_SHARED}_take",
                "found.number in self._leaving or self._releasing[found.number]",
                "False",
            ),
        ),
        "release is forgotten": _bug(
            "What was asked to leave is in nobody's memory, and not released when asked for again.",
            f"{_SHARED}_release",
            "await self._lease.read(release, on_over=partial(self._note_released, numbers))",
            "self._note_released(numbers)",
        ),
        "lease of a take is a bug": _bug(
            "Who asks for a session while the lease is over is told of a bug.",
            f"{_SESSIONS}restoring:reading",
            'raise SessionMoved("this replica has lost its lease: ask again") from error',
            "raise",
        ),
        "silence is damage": _bug(
            "A database that does not answer is told to be damaged.",
            f"{_SHARED}_restore",
            "refusing(row), reading(self._store)",
            "reading(self._store), refusing(row)",
        ),
        "looked up for ever": _bug(
            "A session that did not exist once is never looked for again.",
            f"{_SHARED}_note_looked_up",
            "self._looked_up[key] = None if row is None else row.number",
            "self._looked_up.setdefault(key, None)",
        ),
        "epoch of the reader": _bug(
            "An adopted session is written in the epoch before it was taken.",
            f"{_RESTORER}finish",
            "Hold(row.epoch,",
            "Hold(row.epoch - 1,",
        ),
        "ends are not adopted": _bug(
            "Whoever adopts a session does not know which turns it has run.",
            f"{_RESTORER}read",
            "session.ended.restore(turn, is_durable=self.store.is_synced)",
            "pass",
        ),
        "ended turns run again": _bug(
            "A turn that has ended runs again when it is sent again.",
            f"{_SESSIONS}manager:SessionManager.submit",
            "if not ended.may_run_again:",
            "if False:",
        ),
        "refused is durable": _bug(
            "A turn is told to be durable whatever the database says.",
            f"{_SESSIONS}turn_conclusion:TurnConclusion.end",
            "durable = with_durability(end, is_durable=error is None)",
            "durable = with_durability(end, is_durable=True)",
        ),
        "moved turn is told": _bug(
            "A turn whose commit was refused is told as one that is durable.",
            f"{_SESSIONS}turn_conclusion:TurnConclusion.end",
            "self._conclude(session, turn, refused(turn, turn_moved()), None)",
            "self._conclude(session, turn, with_durability(end, is_durable=True), None)",
        ),
        "not ours is retried": _bug(
            "What another replica holds is written again and again.",
            f"{_LOGS}_on_written",
            "elif isinstance(error, NotOurs):",
            "elif False:",
        ),
        "failed write is forgotten": _bug(
            "What comes behind a write that has failed is written without it.",
            f"{_LOGS}_on_written",
            "place.is_behind = True",
            "place.is_behind = False",
        ),
        "behind is appended": _bug(
            "A session that is behind is written on instead of anew.",
            f"{_LOGS}_write",
            "is_full or is_long or place.is_behind",
            "is_full or is_long",
        ),
        "epoch of the first": _bug(
            "Every session is written in its first epoch.",
            f"{_LOGS}_row",
            "epoch=place.hold.epoch",
            "epoch=1",
        ),
        "written under the next lease": _bug(
            "What waited under a lease that was lost is written under the next one.",
            f"{_SESSIONS}store.session_store:SessionStore.put",
            "if replica_id != self.replica_id:",
            "if False:",
        ),
        "waiting turn begins": _bug(
            "A turn that is told to have moved begins when those before it are told.",
            f"{_SESSIONS}turn_flow:TurnFlow.start_next",
            "(TurnPhase.CHECKING, TurnPhase.ENDED)",
            "(TurnPhase.CHECKING,)",
        ),
        "refused deletion is retried": _bug(
            "A session that another replica holds is deleted again and again, and hidden here.",
            f"{_DELETIONS}_end",
            "if isinstance(error, NotOurs):",
            "if False:",
        ),
        "late refusal is not told": _bug(
            "A deletion that was not answered, and is refused when it is tried again, is durable.",
            f"{_DELETIONS}_end",
            "self._told_late.setdefault(number, on_told)",
            "pass",
        ),
        "opened without a lease": _bug(
            "A session is opened while the lease is over, and kept under the next one.",
            f"{_SESSIONS}manager:SessionManager._add",
            "self._sessions.on_disk.check()",
            "pass",
        ),
        "refused deletion is durable": _bug(
            "A deletion that was refused is told to be durable.",
            f"{_LOGS}close",
            "place.has_moved = True",
            "pass",
        ),
        "epoch is not raised": _bug(
            "Whoever takes a session writes in the epoch of the one before.",
            "tests.sim_replicas.server:DatabaseServer.take",
            "epoch=row.epoch + 1",
            "epoch=row.epoch",
        ),
        "live holder is passed over": _bug(
            "A session is taken whose holder lives.",
            "tests.sim_replicas.server:DatabaseServer.take",
            "if member is not None and self.is_live(holder):",
            "if False:",
        ),
    }
)
"""Most are in the server; two are in what stands for the SQL of `sessions.postgres.leases`."""

BUDGET_STEPS: Final = 5_000_000
"""Steps within which a bug has to be found."""

_RECORD: Final = Path(__file__).parent / "found.json"


@dataclass(frozen=True, slots=True)
class Found:
    """Where a bug showed: the first seed that finds it, by which rule, and steps until then."""

    seed: int
    rule: str
    steps: int


def search(
    mutant: Mutant, seeds: Iterable[int] | None = None, *, max_steps: int = BUDGET_STEPS
) -> Found | None:
    """Simulate with the bug until a rule does not hold, or so many steps were made."""
    num_steps = 0
    with mutant.apply():
        for seed in itertools.count() if seeds is None else seeds:
            try:
                num_steps += run(seed).steps
            except Failure as failure:
                return Found(seed, failure.rule, num_steps + failure.steps)
            if num_steps >= max_steps:
                break
    return None


def recorded() -> dict[str, Found]:
    """Return what the last full search has found, by the names of the bugs."""
    return {name: Found(**found) for name, found in json.loads(_RECORD.read_text("utf-8")).items()}


def record(found: Mapping[str, Found]) -> None:
    """Remember what was found, one line for each."""
    lines = (f" {json.dumps(name)}: {json.dumps(asdict(where))}" for name, where in found.items())
    _RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
