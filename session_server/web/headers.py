"""Name the request headers that routes read; pages of other origins may send only these."""

from __future__ import annotations

from typing import Final

ACCEPT: Final = "accept"
AUTHORIZATION: Final = "authorization"
CONTENT_TYPE: Final = "content-type"
IDEMPOTENCY_KEY: Final = "idempotency-key"
LAST_EVENT_ID: Final = "last-event-id"
REQUEST_ID: Final = "x-request-id"
"""In answers: what OpenAI's clients show as the id of a request."""

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
    AUTHORIZATION,
    CONTENT_TYPE,
    IDEMPOTENCY_KEY,
    LAST_EVENT_ID,
    *CONVERSATION_NAMES,
)
SHOWN_TO_PAGES: Final = ("location", "retry-after", REQUEST_ID)
"""Response headers that a page of another origin may read."""
