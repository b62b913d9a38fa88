"""Bound what a collector of traces can make this process keep, and what the log says of its URL.

`requests` reads an answer to its end, and errors quote the URL with its query, which may hold a
key. Imported only where traces are asked for: both come with the extra.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from requests import PreparedRequest, Response, Session
from requests.adapters import HTTPAdapter

MAX_ANSWER_BYTES: Final = 1 << 16
"""Maximum bytes that are read of an answer. Nothing in it is used but its head."""

_QUERY: Final = re.compile(r"\?[^\s)]+")


def collector_session() -> Session:
    """Return what sends requests, and reads no more of their answers than it may."""
    session = Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, _BriefAnswers())
    return session


def hide_queries(logger: logging.Logger) -> None:
    """Leave the queries of URLs out of a logger's lines."""
    logger.addFilter(_without_query)


class _BriefAnswers(HTTPAdapter):
    def send(self, request: PreparedRequest, *args: Any, **how: Any) -> Response:
        """Send a request; return its answer, of which the beginning was read."""
        answer = super().send(request, *args, **how)
        answer._content = answer.raw.read(MAX_ANSWER_BYTES, decode_content=False)
        answer.raw.close()  # an answer that has ended has given its connection back
        return answer


def _without_query(record: logging.LogRecord) -> bool:
    record.msg, record.args = _QUERY.sub("?...", record.getMessage()), ()
    return True
