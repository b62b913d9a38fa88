"""Everything that is counted in bytes, counted again from what is really kept."""

from __future__ import annotations

from collections import Counter

from session_server.core.owner import Owner
from session_server.sessions.manager import SessionManager
from session_server.sessions.turn import SessionTurn, TurnPhase


def recount(manager: SessionManager) -> None:
    """Compare every budget with the sessions and turns there are.

    Raises:
        AssertionError: one of them disagrees.
    """
    quotas = manager._quotas
    sessions: Counter[Owner] = Counter()
    turns: Counter[Owner] = Counter()
    history_bytes: Counter[Owner] = Counter()
    kv_tokens: Counter[Owner] = Counter()
    turn_bytes: Counter[Owner] = Counter()
    for session in (*manager._sessions, *quotas.openings):
        sessions[session.owner] += 1
        assert session.counted_bytes == session.num_bytes, session.session_id
        history_bytes[session.owner] += session.num_bytes
        kv_tokens[session.owner] += session.copy.counted_tokens
        for turn in session.turns():
            turns[session.owner] += 1
            history_bytes[session.owner] += turn.reserved_bytes
            turn_bytes[session.owner] += turn.held_bytes
    drafts = manager.drafts
    held = {*drafts._newest.items(), *drafts._building.items()}
    for session, draft in held:
        turn_bytes[session.owner] += draft.held_bytes
    for session, tokens in drafts._sent.items():
        turn_bytes[session.owner] += tokens.nbytes
    # A turn that was canceled while its input is tokenized counts until that has ended.
    tasks = manager._flow.prompt_builder._tasks
    turns_in_work = (each for each in tasks if isinstance(each, SessionTurn))
    leaving = [turn for turn in turns_in_work if turn.phase is TurnPhase.ENDED]
    for budget, wanted, num_leaving in (
        (quotas.sessions, sessions, 0),
        (quotas.turns, turns, len(leaving)),
        (quotas.history_bytes, history_bytes, sum(turn.reserved_bytes for turn in leaving)),
        (quotas.turn_bytes, turn_bytes, sum(turn.held_bytes for turn in leaving)),
        (quotas.kv_tokens, kv_tokens, 0),
    ):
        counted = Counter({owner: budget.held_by(owner) for owner in budget.owners})
        assert budget.total == counted.total()
        counted.subtract(wanted)
        assert min(counted.values(), default=0) >= 0, (counted, wanted)
        assert counted.total() == num_leaving, (counted, wanted)
    counts = manager._flow.counts
    live = sum(session.live is not None for session in manager._sessions)
    queued = sum(len(session.queue) for session in manager._sessions)
    assert (counts.live, counts.queued) == (live, queued)
    # Journals of closed sessions live on with their readers.
    open_bytes = sum(session.journal.num_bytes for session in manager._sessions)
    assert open_bytes <= manager._maker.replay.num_bytes
