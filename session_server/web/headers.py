"""Name the request headers that routes read; pages of other origins may send only these."""

from __future__ import annotations

from typing import Final

ACCEPT: Final = "accept"
ACCEPT_ENCODING: Final = "accept-encoding"
AUTHORIZATION: Final = "authorization"
CONTENT_TYPE: Final = "content-type"
IDEMPOTENCY_KEY: Final = "idempotency-key"
IF_NONE_MATCH: Final = "if-none-match"
LAST_EVENT_ID: Final = "last-event-id"
REQUEST_ID: Final = "x-request-id"
"""The id of a request; in answers, what OpenAI's clients show as such."""

TRACE_CONTEXT: Final = ("traceparent", "tracestate")
"""W3C Trace Context: the span of the client that a turn is part of."""

LEFT_OUT: Final = "x-left-out"
"""In answers, the field of the request that had no effect: `tools`, of a model that takes none."""

CONVERSATION_NAMES: Final = (
    "x-session-id",
    "x-conversation-id",
    "session-id",
    "thread-id",
    "x-session-affinity",
    "x-claude-code-session-id",
    "x-dynamo-session-id",
)
"""Headers in which clients name their conversation; the first that is there counts."""

SENT_BY_SDKS: Final = tuple(
    f"x-stainless-{name}"
    for name in (
        "arch",
        "async",
        "helper-method",
        "lang",
        "os",
        "package-version",
        "poll-helper",
        "raw-response",
        "read-timeout",
        "retry-count",
        "runtime",
        "runtime-version",
        "timeout",
    )
)
"""What OpenAI's clients say of themselves; nobody reads it."""

READ_BY_ROUTES: Final = (
    ACCEPT,
    ACCEPT_ENCODING,
    AUTHORIZATION,
    CONTENT_TYPE,
    IDEMPOTENCY_KEY,
    IF_NONE_MATCH,
    LAST_EVENT_ID,
    REQUEST_ID,
    *TRACE_CONTEXT,
    *CONVERSATION_NAMES,
)
SHOWN_TO_PAGES: Final = ("location", "retry-after", REQUEST_ID, LEFT_OUT)
"""Response headers that a page of another origin may read."""
