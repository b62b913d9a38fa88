"""One of several servers over the echo engine that share a store, with a lease as short as asked.

As a module it gives `echo_replica`; as a program it is the server. Its engine takes the token ids
of texts too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from session_server import cli, shared_store, wiring
from session_server.local_server import LocalServer
from session_server.sessions.store.lease import ReplicaLease
from tests.engine_host.live_echo import LiveStage
from tests.rig.echo_server import FORWARD_S, mortal_engine

VOCAB_SIZE = 1 << 16
"""More than the tokenizer of the embedded model has."""


def echo_replica(
    store_url: str,
    flags: Sequence[str] = (),
    *,
    lease_s: float,
    on_line: Callable[[str], None] | None = None,
) -> LocalServer:
    """A server process whose answers to token ids `replay` can tell."""
    program = (sys.executable, "-m", "tests.rig.echo_replica", str(lease_s), "serve")
    all_flags = ["--log-level", "warning", *flags, "--store", store_url]
    return LocalServer(all_flags, program=program, on_line=on_line)


if __name__ == "__main__":
    lease_of = partial(ReplicaLease, lease_s=float(sys.argv[1]))
    setattr(shared_store, ReplicaLease.__name__, lease_of)
    stage = LiveStage(FORWARD_S, is_device=True, max_running=16, vocab_size=VOCAB_SIZE)
    wiring.make_engine = lambda settings: mortal_engine(stage)
    sys.exit(cli.main(sys.argv[2:]))
