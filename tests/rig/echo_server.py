"""`session-server serve` over the echo engine: a real server and engine process, quick to start.

As a module it gives `echo_server`; as a program it is the server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from session_server import cli, wiring
from session_server.engine_host.process import EngineProcess, ProcessSettings
from session_server.engine_host.restarts import RestartPolicy
from session_server.local_server import LocalServer
from tests.engine_host.live_echo import LiveStage

PROGRAM = (sys.executable, "-m", "tests.rig.echo_server", "serve")
FORWARD_S = 0.003


def echo_server(
    flags: Sequence[str] = (), *, on_line: Callable[[str], None] | None = None
) -> LocalServer:
    """A server process whose answers `replay` can tell."""
    return LocalServer(["--log-level", "warning", *flags], program=PROGRAM, on_line=on_line)


def mortal_engine(stage: LiveStage) -> EngineProcess:
    """An echo engine in a child process, which is started again at once whenever it dies."""
    argv = (sys.executable, str(Path(__file__).parents[1] / "engine_host" / "echo_child.py"))
    return EngineProcess(
        ProcessSettings(
            argv,
            msgspec.msgpack.encode(stage),
            restarts=RestartPolicy(0.01, 0.05, max_failures=1_000_000),
        )
    )


if __name__ == "__main__":
    stage = LiveStage(forward_s=FORWARD_S, is_device=True, max_running=16)
    wiring.make_engine = lambda settings: mortal_engine(stage)
    sys.exit(cli.main(sys.argv[1:]))
