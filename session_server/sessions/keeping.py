"""Have the sessions of a manager kept in a store, of its own or shared with other replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from session_server.sessions.exits import SessionExits
from session_server.sessions.opening import SessionMaker
from session_server.sessions.place_counter import PlaceCounter
from session_server.sessions.restoring import Restorer
from session_server.sessions.shared_sessions import SharedSessions
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.stored_ends import StoredEnds
from session_server.sessions.stored_sessions import StoredSessions


def keep_sessions(
    store: SessionStore,
    *,
    exits: SessionExits,
    maker: SessionMaker,
    clock: Callable[[], float],
) -> None:
    """Write sessions to a store from now on, and find there those that are not in memory."""
    lease = store.lease
    parts, flow = exits.parts, exits.flow
    sessions, quotas, logs = parts.sessions, parts.quotas, parts.logs
    logs.keep_in(store)
    shared_by = () if lease is None else (lease.slot_now, lease.wall_s)
    sessions.number_by(PlaceCounter(store.last_number, *shared_by))
    ends = StoredEnds(store, parts, flow, clock)
    ends.count()
    restorer = Restorer(store, ends, sessions, quotas, maker, parts.link)
    if lease is None:
        stored = StoredSessions(restorer)
        sessions.on_disk = stored
        quotas.room_makers.delete = stored.make_room
        return
    shared = SharedSessions(restorer, lease)
    sessions.on_disk = shared
    lease.told.on_lost, lease.told.is_losing = exits.lose_all, lambda: exits.is_losing
    shared.give_up = partial(exits.give_up, is_lost=False)
    exits.on_left = partial(shared.on_left, logs=logs, written=flow.copies.written)
    logs.on_moved = partial(exits.give_up, is_lost=True)
