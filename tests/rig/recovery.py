"""What must hold after a fault or chaos: nobody waits, histories are exact, pages are back.

Histories are folded from how turns ended, as the journal or a client heard it; every token of every
answer is compared with what a lone turn on an infinite machine would say, so that a page that was
mixed up anywhere changes the comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from session_server.core.events import ACCOUNTS
from session_server.core.session_events import (
    Outcome,
    SessionEntry,
    SessionStateChanged,
    TokenInput,
    TurnCancelled,
    TurnCompleted,
    TurnCreated,
    TurnDelta,
    TurnFailedEntry,
    TurnProgress,
    TurnRequest,
)
from session_server.local_server import LocalServer
from session_server.sessions.manager import SessionManager
from tests.cache.audit import audit
from tests.cache.headroom import headroom
from tests.sessions.recount import recount
from tests.sim.echo import replay
from tests.sim.hand_engine import HandEngine

History = tuple[int, ...]


class Reckoning:
    """The history that a session must have, from how its turns ended, one after the other."""

    def __init__(self, salt: str = "a") -> None:
        self.tokens: History = ()
        self._salt = salt

    def end(
        self, context: Sequence[int], answer: Sequence[int], *, seed: int | None, is_kept: bool
    ) -> None:
        """Learn the end of a turn on this context; every token of its answer follows from it."""
        assert seed is not None, "turns of these tests name their seed"
        expected = replay(self._salt, context, seed=seed, max_new=len(answer))
        assert list(answer) == expected, "it was computed from another history"
        if is_kept:
            self.tokens = (*context, *answer)

    def hear(self, body: Mapping[str, Any], end: Mapping[str, Any]) -> None:
        """Learn the terminal frame of a turn of token ids, as its client asked for it."""
        if end["type"] == "turn.failed":
            return
        sampling, answer = body["sampling"], end["item"]["token_ids"]
        context = (*self.tokens, *body["input_ids"])
        is_kept = end["type"] == "turn.completed" or end["kept_partial"]
        self.end(context, answer, seed=sampling["seed"], is_kept=is_kept)
        # A turn cancelled in line has read nothing.
        num_read = end["usage"]["input_tokens"]
        assert num_read == len(context) or (num_read == 0 and not answer)
        if end["type"] == "turn.completed":
            assert len(answer) == sampling["max_tokens"]


def folded(
    entries: Iterable[SessionEntry],
    requests: Mapping[str, TurnRequest],
    salt: str,
    *,
    truth: History = (),
) -> History:
    """The history that a journal tells, its grammar and its answers checked.

    Of inputs that are no token ids, `truth` (the manager's history) says what became of them.
    """
    known = Reckoning(salt)
    created: dict[str, list[int]] = {}
    ended: set[str] = set()
    for entry in entries:
        match entry:
            case TurnCreated(turn_id=turn_id):
                assert turn_id not in created, f"{turn_id} was created twice"
                created[turn_id] = []
            case TurnDelta(turn_id=turn_id, token_ids=token_ids):
                assert turn_id in created.keys() - ended, entry
                created[turn_id].extend(token_ids)
            case TurnProgress(turn_id=turn_id, processed=processed, total=total):
                assert turn_id in created.keys() - ended, entry
                assert 0 <= processed <= total
            case TurnCompleted() | TurnCancelled() | TurnFailedEntry():
                turn_id = entry.turn_id
                assert turn_id in created.keys() - ended, f"{turn_id} ended twice"
                ended.add(turn_id)
                request = requests[turn_id]
                if isinstance(request.input, TokenInput):
                    prompt = known.tokens + request.input.token_ids
                elif _is_kept(entry):
                    prompt = truth[: entry.outcome.usage.input_tokens]
                else:
                    continue
                outputs, seed = created[turn_id], request.sampling.seed
                known.end(prompt, outputs, seed=seed, is_kept=_is_kept(entry))
                if _is_kept(entry):
                    _check_outcome(entry.outcome, outputs, prompt)
                else:
                    assert entry.outcome.token_ids == ()
            case SessionStateChanged(state=state):
                assert state in ("resident", "cold")
            case _:
                pass
    assert created.keys() == ended, f"turns without an end: {created.keys() - ended}"
    return known.tokens


def all_is_back(manager: SessionManager, hand: HandEngine) -> None:
    """Nobody runs, waits or is owed anything; every page and row is free, and a recount agrees.

    For a server whose sessions are closed and whose cache was flushed.
    """
    stats = manager.stats()
    assert (stats.sessions, stats.live_turns, stats.queued_turns) == (0, 0, 0)
    assert not manager._quotas.owners, "a quota was not given back"
    recount(manager)
    assert not manager._flow._sent, "the manager waits for turns that are no more"
    assert not manager._link._unsent, "commands wait for an engine that has nothing to do"
    audit(hand.cache)
    assert hand.engine.inspect().watch.num_violations == 0, "the checker had to repair something"
    for accounts in hand.cache.accounts().values():
        assert accounts.free == accounts.pages - 1, accounts
    assert headroom(hand.cache).free_rows == hand.cache.inspect().stores.rows.num_rows
    assert len(hand.cache) == 0, "the engine holds a session that the server forgot"


@contextlib.contextmanager
def well_kept(flags: Sequence[str]) -> Iterator[LocalServer]:
    """Run a server meanwhile; at its end its books balance, and it ends well."""
    with LocalServer(flags) as running:
        yield running
        assert_books_balance(running.url)
        assert running.stop() == 0


def assert_books_balance(url: str, *, is_running: bool = True, is_open: bool = True) -> None:
    """Over HTTP: a full recount finds nothing wrong, and the accounts of each pool add up.

    `is_running`, `is_open`: whether a turn may run, whether a session may be open.
    """
    report = httpx.get(f"{url}/v1/admin/memory", params={"full": 1}, timeout=60.0).json()
    assert report["checks"]["runs"] > 0
    assert report["checks"]["violations"] == 0, report["checks"]
    for pool in report["pools"].values():
        assert sum(pool[account] for account in ACCOUNTS) == pool["pages"], pool
        assert pool["quarantine"] == 0
        assert is_running or pool["active"] == 0
    assert is_open or report["sessions"] == []


def _is_kept(entry: TurnCompleted | TurnCancelled | TurnFailedEntry) -> bool:
    if isinstance(entry, TurnCancelled):
        return entry.kept_partial
    return isinstance(entry, TurnCompleted)


def _check_outcome(outcome: Outcome, outputs: list[int], prompt: History) -> None:
    assert outcome.token_ids == tuple(outputs), "the end tells of other tokens than the deltas"
    # A turn cancelled before it was sent keeps nothing and counts nothing.
    assert outcome.usage.input_tokens == len(prompt)
    assert outcome.usage.output_tokens == len(outputs)
