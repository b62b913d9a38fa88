"""`python -m tests.sim`: simulate the whole server, see `command`."""

from __future__ import annotations

import sys

from tests.sim.command import main

if __name__ == "__main__":
    sys.exit(main())
