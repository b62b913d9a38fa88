"""`python -m tests.chaos --connections 5000`: the load of `test_connections`, as large as asked.

Flags of the server go behind `--`, as in `python -m tests.chaos -- --speculative-algorithm ngram`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pprint import pprint

from session_server.local_server import LocalServer
from tests.chaos.load import FLAGS, run_load


def main() -> int:
    """Run the load, print what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    args = parser.parse_args()
    lines: list[str] = []
    with LocalServer([*FLAGS, *args.flags], on_line=lines.append) as server:
        load = run_load(server, connections=args.connections, seed=args.seed)
        report = asyncio.run(load)
    pprint({**vars(report), "problems": len(report.problems)}, sort_dicts=False)
    print("\n".join(line[:600] for line in [*report.problems[:40], *lines[:40]]))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
