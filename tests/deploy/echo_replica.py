"""A replica under Ray Serve whose engine is an echo, which can be killed as often as one likes."""

from __future__ import annotations

from typing import Any

from session_server import wiring
from session_server.deploy.replica import Replica
from tests.engine_host.live_echo import LiveStage
from tests.rig.echo_replica import VOCAB_SIZE
from tests.rig.echo_server import FORWARD_S, mortal_engine


class EchoReplica(Replica):  # type: ignore[misc] # Ray is not there to check it
    """See `Replica`. Ray imports it by its name, in a process of its own."""

    async def __serve_build_asgi_app__(self) -> Any:
        stage = LiveStage(FORWARD_S, is_device=True, max_running=16, vocab_size=VOCAB_SIZE)
        wiring.make_engine = lambda settings: mortal_engine(stage)
        return await super().__serve_build_asgi_app__()
