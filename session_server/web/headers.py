"""Name the request headers that routes read; pages of other origins may send only these."""

from __future__ import annotations

from typing import Final

ACCEPT: Final = "accept"
AUTHORIZATION: Final = "authorization"
CONTENT_TYPE: Final = "content-type"
IDEMPOTENCY_KEY: Final = "idempotency-key"
LAST_EVENT_ID: Final = "last-event-id"

READ_BY_ROUTES: Final = (ACCEPT, AUTHORIZATION, CONTENT_TYPE, IDEMPOTENCY_KEY, LAST_EVENT_ID)
SHOWN_TO_PAGES: Final = ("location", "retry-after")
"""Response headers that a page of another origin may read."""
