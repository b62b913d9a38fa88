"""Be one replica under Ray Serve: a whole server, without sockets of its own.

Ray imports this where a replica starts. Its proxies read requests, and `router` chooses the replica
for each. Everything here runs on the event loop that Ray gives to a replica's code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any, Final

import ray
from pydantic import SecretStr
from ray import serve

from session_server import serving
from session_server.config import Settings
from session_server.core.errors import EngineUnavailable
from session_server.deploy.autoscaling import KV_USE, TURNS
from session_server.deploy.options import (
    LAST_ANSWERS_S,
    MEMORY_DEADLINE_S,
    STALLED_LIMIT_S,
    TOLD_LOOK_S,
    UNREADY_LIMIT_S,
)
from session_server.deploy.routing import tag_of
from session_server.metrics.logging import LOGGER_NAME
from session_server.web.drain import drain
from session_server.web.relayed import RelayedRequests
from session_server.wiring import make_entrance

_logger: Final = logging.getLogger(LOGGER_NAME)


class Unhealthy(Exception):
    """Report why this replica should be replaced."""


@serve.ingress()
class Replica:
    """Run a server for as long as Ray runs this replica."""

    def __init__(self, settings: Settings, environment_key: SecretStr | None) -> None:
        self._settings = settings
        self._environment_key = environment_key
        self._tag = tag_of(serve.get_replica_context().replica_tag)
        self._unready_since_s: float | None = None
        self._resources = contextlib.AsyncExitStack()
        self._drainer: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> RelayedRequests:
        """Start the server, and return its application, whose lifespan Ray runs."""
        settings, key = self._settings, self._environment_key
        serving.start_log(settings)
        given = None if key is None else key.get_secret_value()
        entrance = make_entrance(settings.http, given, replica_tag=self._tag)
        self._server = await self._resources.enter_async_context(
            serving.running_server(settings, entrance)
        )
        max_bytes = settings.http.max_message_bytes
        self._requests = RelayedRequests(self._server.app, max_body_bytes=max_bytes)
        self._drainer = asyncio.create_task(self._drain_once_told(), name="drain")
        return self._requests

    async def __del__(self) -> None:
        """Stop the engine. Ray calls this when nothing is open any more."""
        if self._drainer is not None:
            self._drainer.cancel()
            await asyncio.gather(self._drainer, return_exceptions=True)
            await self._resources.aclose()
            if self._server.has_lost_sessions:
                _logger.error("sessions are lost that could not be written to the store")

    async def _drain_once_told(self) -> None:
        """Wait until Ray wants this replica to stop, then end what would keep it from that: Ray
        itself waits until no request is open, and tells nobody, and every socket is one."""
        while not _is_stopping():
            await asyncio.sleep(TOLD_LOOK_S)
        await drain(self._server.services, self._server.app.state.sockets)
        await asyncio.sleep(LAST_ANSWERS_S)
        self._requests.end_all()

    async def check_health(self) -> None:
        """Raise Unhealthy if this replica should be replaced: its engine is not started any more,
        or has made no progress for long."""
        sessions, now_s = self._server.services.sessions, self._server.services.now_s()
        if self._server.engine_failed.done():
            raise Unhealthy(f"the engine failed for good: {self._server.engine_failed.result()}")
        if sessions.engine_ready is not None:
            self._unready_since_s = None
        elif self._unready_since_s is None:
            self._unready_since_s = now_s
        elif now_s - self._unready_since_s > UNREADY_LIMIT_S:
            raise Unhealthy(f"there has been no engine for {UNREADY_LIMIT_S:g} s")
        if (sessions.engine_stalled_s or 0.0) > STALLED_LIMIT_S:
            raise Unhealthy(f"the engine has made no step for {STALLED_LIMIT_S:g} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `autoscaling` decides by."""
        stats = self._server.services.sessions.stats()
        share = (stats.live_turns + stats.queued_turns) / self._settings.engine.max_running_turns
        return {TURNS: share, KV_USE: await self._kv_use()}

    async def report(self, _: str) -> dict[str, Any]:
        """Return what this replica does now. The argument is its key: `router` finds it by that."""
        sessions = self._server.services.sessions
        stats, stalled_s = sessions.stats(), sessions.engine_stalled_s
        engine = "running" if sessions.engine_ready is not None else "starting"
        if self._server.engine_failed.done():
            engine = "failed"
        elif stalled_s is not None:
            engine = "stalled"
        return {
            "replica": self._tag,
            "pid": os.getpid(),
            "sessions": stats.sessions,
            "turns": stats.live_turns,
            "waiting": stats.queued_turns,
            "kv_use": round(await self._kv_use(), 3),
            "engine": engine,
        }

    async def _kv_use(self) -> float:
        """Return the share of the fullest pool that turns and sessions hold; 0 if the engine does
        not say it soon."""
        try:
            async with asyncio.timeout(MEMORY_DEADLINE_S):
                memory = await self._server.services.sessions.memory(max_sessions=0)
        except (TimeoutError, EngineUnavailable):
            return 0.0
        pools = memory.pools.values()
        return max(
            (1 - (pool.free + pool.tree_evictable) / pool.pages for pool in pools), default=0
        )


def _is_stopping() -> bool:
    """Return whether Ray has told the actor of this process to stop. There is no public word for
    it, and the destructor is called only once every request has ended."""
    actors = ray._private.worker.global_worker.actors.values()
    return any(each._replica_impl._shutting_down for each in actors)
