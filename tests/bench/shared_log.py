"""`python -m tests.bench.shared_log`: what replicas ask of a PostgreSQL that they share.

Processes, each a replica with a lease, commit turns to sessions of their own as fast as the
database takes them, so many of them in a transaction. Nothing is computed and nobody is served: it
is the log alone. What a turn, a session and a renewal write is counted by PostgreSQL, so that it
depends on no other work of the machine; turns a second do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any, Final

import numpy as np
import psycopg
from msgspec import structs

from session_server.core.session_events import ConversationItem
from session_server.sessions.history_change import AnswersChange, HistoryChange, ItemsChange
from session_server.sessions.postgres.database import PostgresDatabase
from session_server.sessions.store.records import (
    EndRecord,
    LogEntry,
    SessionRow,
    StoredSettings,
    encode_entry,
    encode_settings,
)
from tests.rig.postgres import Postgres, running

LEASE_S: Final = 60.0
NUMBERS_OF_A_REPLICA: Final = 1 << 20
_WAIT_S: Final = 120.0
_SETTINGS: Final = encode_settings(
    StoredSettings(3600.0, {}, False, time.time(), b"digest", None, time.time(), 1)
)


@dataclass(frozen=True, slots=True)
class LogLoad:
    """Configure one measurement: every replica has so many sessions, each of which gets so many
    turns of `num_tokens` tokens, in and out together."""

    num_replicas: int
    num_sessions: int
    num_turns: int
    turns_per_commit: int
    num_tokens: int


def turn_entry(load: LogLoad, seed: int) -> bytes:
    """Return what the log keeps of one turn: its tokens, its two messages, four letters for each
    token, and how it ended."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 128_000, load.num_tokens).astype("<i4").tobytes()
    letters = "".join(random.Random(seed).choices("etaoin shrdlu", k=2 * load.num_tokens))
    items = tuple(
        ConversationItem(
            id=f"item_{seed}_{role}",
            turn_id=f"turn_{seed:032}",
            role=role,
            content=letters,
            end_len=load.num_tokens,
        )
        for role in ("user", "assistant")
    )
    change = HistoryChange(
        num_kept=seed % load.num_turns * load.num_tokens,
        tokens=tokens,
        items=ItemsChange(0, items, 2),
        answers=AnswersChange(0, (1,), (load.num_tokens,)),
        tools=None,
        answer_len=load.num_tokens // 2,
        is_end_replaced=False,
        num_open=0,
    )
    half = load.num_tokens // 2
    end = EndRecord(seed, b"f" * 16, "stop", "", 1, 1, half, 0, half, 0, 0, 12.5)
    return encode_entry(LogEntry(change, (end,)))


@dataclass(frozen=True, slots=True)
class Told:
    """Have replicas begin and end together, and tell when each of them did."""

    line: Barrier
    times: Queue[float]

    def wait(self) -> None:
        """Wait until all are here."""
        self.line.wait(_WAIT_S)


def commit_turns(url: str, place: int, load: LogLoad, told: Told) -> None:
    """Be one replica."""
    database = PostgresDatabase(url)
    database.join(f"http://replica-{place}", LEASE_S)
    numbers = [place * NUMBERS_OF_A_REPLICA + n for n in range(load.num_sessions)]
    rows = {
        n: SessionRow(n, "ada", f"s{n}", b"m" * 32, 4e9, _SETTINGS, 0, 0, 1, epoch=1)
        for n in numbers
    }
    with database.transaction():
        for row in rows.values():
            database.put(row)
    entries = [turn_entry(load, seed) for seed in range(load.num_turns)]
    order = [(n, turn) for turn in range(load.num_turns) for n in numbers]
    told.wait()
    told.times.put(time.time())
    for at in range(0, len(order), load.turns_per_commit):
        with database.transaction():
            for n, turn in order[at : at + load.turns_per_commit]:
                database.append(structs.replace(rows[n], num_entries=turn), entries[turn])
    told.times.put(time.time())
    told.wait()
    database.leave()
    database.close()


def measure(postgres: Postgres, load: LogLoad) -> dict[str, Any]:
    """Have replicas commit to a new database, and return what that took."""
    url = postgres.new_database()
    PostgresDatabase(url).close()  # makes the tables
    context = multiprocessing.get_context("spawn")
    told = Told(context.Barrier(load.num_replicas + 1), context.Queue())
    processes = [
        context.Process(target=commit_turns, args=(url, place, load, told), daemon=True)
        for place in range(load.num_replicas)
    ]
    for process in processes:
        process.start()
    told.wait()
    before = position(url)
    times = sorted(told.times.get(timeout=_WAIT_S) for _ in range(2 * load.num_replicas))
    num_wal_bytes = position(url) - before
    told.wait()
    for process in processes:
        process.join(_WAIT_S)
    num_turns = load.num_replicas * load.num_sessions * load.num_turns
    query = "SELECT pg_total_relation_size('session_server.entries')"
    (num_table_bytes,) = postgres.run(query, url)[0]
    postgres.drop(url)
    return asdict(load) | {
        "turns_per_s": round(num_turns / (times[-1] - times[0])),
        "commits_per_s": round(num_turns / load.turns_per_commit / (times[-1] - times[0])),
        "entry_bytes": len(turn_entry(load, 0)),
        "wal_bytes_per_turn": round(num_wal_bytes / num_turns),
        "table_bytes_per_turn": round(num_table_bytes / num_turns),
    }


def renewals(postgres: Postgres, num_renewals: int) -> dict[str, Any]:
    """Renew one lease again and again, and return what one renewal takes."""
    url = postgres.new_database()
    database = PostgresDatabase(url)
    database.join("http://replica", LEASE_S)
    before, started_s = position(url), time.perf_counter()
    for _ in range(num_renewals):
        database.renew(LEASE_S)
    seconds = time.perf_counter() - started_s
    figures = {
        "renewals_per_s": round(num_renewals / seconds),
        "wal_bytes_per_renewal": round((position(url) - before) / num_renewals),
    }
    database.leave()
    database.close()
    postgres.drop(url)
    return figures


def position(url: str) -> int:
    """Return how many bytes PostgreSQL has written to its own log so far."""
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
    assert found is not None
    return int(found[0])


def main() -> None:
    """Print a line of JSON for every measurement."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--turns-per-commit", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--turns", type=int, default=8000, help="of all replicas together")
    parser.add_argument("--tokens", type=int, default=400, help="of one turn, in and out together")
    given = parser.parse_args()
    with running() as postgres:
        print(json.dumps(renewals(postgres, 1000)), flush=True)
        for turns_per_commit in given.turns_per_commit:
            for num_replicas in given.replicas:
                num_sessions = max(turns_per_commit, given.turns // num_replicas // 16)
                load = LogLoad(num_replicas, num_sessions, 16, turns_per_commit, given.tokens)
                print(json.dumps(measure(postgres, load)), flush=True)


if __name__ == "__main__":
    main()
