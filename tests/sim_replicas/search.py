"""`python -m tests.sim_replicas.search [name ...]`: search for the seeded bugs, in two processes,
and write down where each shows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.sim_replicas.seeded import MUTANTS, Found, record, recorded, search


def find(name: str) -> Found | None:
    """Search for one bug; a function of the module, so that another process can do it."""
    logging.getLogger("session_server").addHandler(logging.NullHandler())
    return search(MUTANTS[name])


def main(names: Sequence[str]) -> int:
    """Search for all bugs, or for some by name; return 1 if one is not found."""
    known = recorded()
    with ProcessPoolExecutor(2) as pool:
        searches = {pool.submit(find, name): name for name in names or MUTANTS}
        for done in as_completed(searches):
            name, found = searches[done], done.result()
            print(f"{name}: {found}", flush=True)
            known.pop(name, None)
            if found is not None:
                known[name] = found
            record({name: known[name] for name in MUTANTS if name in known})
    missed = [name for name in MUTANTS if name not in known]
    print(f"{len(known)} of {len(MUTANTS)} found; not found: {missed or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
