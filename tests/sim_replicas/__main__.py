"""`python -m tests.sim_replicas`: simulate replicas that share a database, see `command`."""

from __future__ import annotations

import sys

from tests.sim_replicas.command import main

if __name__ == "__main__":
    sys.exit(main())
