"""The program of a test engine's process: echo_child.py FD."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from session_server.engine_host.child import serve_engine
from tests.engine_host.live_echo import assemble

if __name__ == "__main__":
    sys.exit(serve_engine(int(sys.argv[1]), assemble))
