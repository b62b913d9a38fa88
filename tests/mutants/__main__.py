"""`python -m tests.mutants [--anew] [--steps N] [name ...]`: search for the seeded bugs that the
record lacks, or those named, from the first seed on that can find it, in two processes. Each that
is found is written down at once, so a search that was interrupted goes on where it was. `--anew`
forgets the record first; do that when the simulator draws its seeds otherwise than before. At the
end the table of `docs/testing.md` is written.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.docs import tables
from tests.mutants.registry import MUTANTS, SURVIVORS
from tests.mutants.search import BUDGET_STEPS, Found, record, recorded, search


def find(name: str, max_steps: int) -> Found | None:
    """Search for one bug; a function of the module, so that another process can do it."""
    logging.disable(logging.CRITICAL)  # what a mutant makes the server log is no news
    mutant = MUTANTS[name]
    return search(mutant, itertools.count(mutant.first_seed), max_steps=max_steps)


def search_all(names: Sequence[str], max_steps: int) -> None:
    """Search, say what was found as it is found, and write it down."""
    known, started_s = dict(recorded()), time.monotonic()
    with ProcessPoolExecutor(2) as pool:
        searches = {pool.submit(find, name, max_steps): name for name in names}
        for number, done in enumerate(as_completed(searches), 1):
            name, found = searches[done], done.result()
            known.pop(name, None)
            if found is not None:
                known[name] = found
            record({name: known[name] for name in MUTANTS if name in known})
            where = f"{found.steps:>7} steps, {found.layer}" if found else "not found"
            took_s = time.monotonic() - started_s
            print(f"{number:>4}/{len(searches)} {took_s:>6.0f} s  {name:<38} {where}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; return 1 if a bug is neither found nor explained."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--steps", type=int, default=BUDGET_STEPS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    if options.anew:
        record({})
    named = [name.replace("_", " ").lower() for name in options.names]
    lacking = [name for name in MUTANTS if name not in recorded() and name not in SURVIVORS]
    search_all(named or lacking, options.steps)
    tables.main()
    missed = [name for name in MUTANTS if name not in recorded() and name not in SURVIVORS]
    print(f"{len(recorded())} of {len(MUTANTS)} found; unexplained: {missed or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
