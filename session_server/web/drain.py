"""Finish what runs, close every socket, and say in the log how that goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from session_server.protocol.session_protocol import CloseCode
from session_server.web.services import AppServices
from session_server.web.sockets import Sockets

_logger: Final = logging.getLogger("session_server.web")

CLOSE_WAIT_S: Final = 2.0
TELL_INTERVAL_S: Final = 1.0
"""Seconds between two log lines of a drain that waits."""


async def drain(services: AppServices, sockets: Sockets) -> None:
    """Refuse new work, give running turns `drain_s`, and close all sockets with 1012.

    Takes `drain_s`, two seconds for an engine that confirms no cancel, and two for peers that do
    not answer the close, at most.
    """
    sessions, began_s = services.sessions, services.now_s()
    num_sockets = sockets.num_attached
    before = sessions.stats()
    _logger.info(
        "draining sessions=%d turns=%d waiting=%d sockets=%d deadline_s=%g",
        before.sessions,
        before.live_turns,
        before.queued_turns,
        num_sockets,
        services.settings.drain_s,
    )
    telling = asyncio.create_task(_tell(services, sockets, began_s), name="tell")
    try:
        await sessions.drain(services.settings.drain_s)
        await sockets.end_all(CloseCode.RESTART)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WAIT_S):
                while sockets.num_attached:
                    await asyncio.sleep(0.02)
    finally:
        telling.cancel()
    ended = sessions.stats().ended_turns
    completed, cancelled, failed = (
        ended.get(status, 0) - before.ended_turns.get(status, 0)
        for status in ("completed", "cancelled", "failed")
    )
    _logger.info(
        "drained completed=%d cancelled=%d failed=%d sockets_closed=%d unread=%d seconds=%.1f",
        completed,
        cancelled,
        failed,
        num_sockets - sockets.num_attached,
        sockets.num_attached,
        services.now_s() - began_s,
    )


async def _tell(services: AppServices, sockets: Sockets, began_s: float) -> None:
    while True:
        await asyncio.sleep(TELL_INTERVAL_S)
        stats = services.sessions.stats()
        _logger.info(
            "draining turns=%d waiting=%d sockets=%d seconds=%.1f",
            stats.live_turns,
            stats.queued_turns,
            sockets.num_attached,
            services.now_s() - began_s,
        )
