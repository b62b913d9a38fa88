"""What must hold after every fault: nobody waits, the history is exact, every page is back.

Histories are folded from what the journal told and compared with the manager's; every token of
every answer is compared with what a lone turn on an infinite machine would say, so that a page
that was mixed up anywhere changes the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cache.checker import audit
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
from session_server.sessions.manager import SessionManager
from tests.cache.headroom import headroom
from tests.sessions.recount import recount
from tests.sim.echo import replay
from tests.sim.hand_engine import HandEngine

History = tuple[int, ...]


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
    history: History = ()
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
                    prompt = history + request.input.token_ids
                elif _is_kept(entry):
                    prompt = truth[: entry.outcome.usage.input_tokens]
                else:
                    continue
                _check_answer(created[turn_id], prompt, request, salt)
                if _is_kept(entry):
                    _check_outcome(entry.outcome, created[turn_id], prompt)
                    history = prompt + entry.outcome.token_ids
                else:
                    assert entry.outcome.token_ids == ()
            case SessionStateChanged(state=state):
                assert state in ("resident", "cold")
            case _:
                pass
    assert created.keys() == ended, f"turns without an end: {created.keys() - ended}"
    return history


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
    assert headroom(hand.cache).free_rows == hand.cache.stores.rows.num_rows
    assert len(hand.cache) == 0, "the engine holds a session that the server forgot"


def _is_kept(entry: TurnCompleted | TurnCancelled | TurnFailedEntry) -> bool:
    if isinstance(entry, TurnCancelled):
        return entry.kept_partial
    return isinstance(entry, TurnCompleted)


def _check_answer(outputs: list[int], prompt: History, request: TurnRequest, salt: str) -> None:
    seed = request.sampling.seed
    assert seed is not None, "turns of these tests name their seed"
    assert outputs == replay(salt, prompt, seed=seed, max_new=len(outputs)), request.turn_id


def _check_outcome(outcome: Outcome, outputs: list[int], prompt: History) -> None:
    assert outcome.token_ids == tuple(outputs), "the end tells of other tokens than the deltas"
    # A turn cancelled before it was sent keeps nothing and counts nothing.
    assert outcome.usage.input_tokens == len(prompt)
    assert outcome.usage.output_tokens == len(outputs)
