"""Contain bugs: what fails inside one turn ends that turn, and is logged; its session goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Final

from session_server.core.errors import INTERNAL_ERROR

BUG_CODE: Final = INTERNAL_ERROR.code
BUG_MESSAGE: Final = "the server failed in this turn; the session is as it was before"

_logger: Final = logging.getLogger("session_server.sessions")


def log_bug(what: str, error: Exception) -> None:
    """Log an exception that nobody expects, with its stack."""
    _logger.error("%s: a bug of ours", what, exc_info=error)


@contextlib.contextmanager
def contained(what: str, then: Callable[[], object] | None = None) -> Iterator[None]:
    """Log what the block raises, after `then` has put right what it has left undone."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - one turn fails, and no other waits for it
        if then is not None:
            then()
        log_bug(what, error)
