"""`session-server cluster` whose replicas have echo engines: quick to start, small, and their
answers can be told.

As a module it gives `PROGRAM`; as a program it is the command.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

from session_server import cli
from session_server.deploy import command
from session_server.deploy.head import Head

PROGRAM = (sys.executable, "-m", "tests.rig.echo_cluster")

_joined = command._joined


@contextlib.contextmanager
def joined_with_echoes(address: str, head: Head | None) -> Iterator[ModuleType]:
    """See `command._joined`: Ray must not be imported before that."""
    with _joined(address, head) as cluster:
        from session_server.deploy import application
        from tests.deploy.echo_replica import EchoReplica

        application.Replica = EchoReplica
        yield cluster


if __name__ == "__main__":
    command._joined = joined_with_echoes
    sys.exit(cli.main(["cluster", *sys.argv[1:]]))
