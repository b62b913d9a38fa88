"""Define the errors of `cache`. A call that raises one of them has changed nothing."""

from __future__ import annotations


class CacheError(Exception):
    """Base class of all errors that `cache` raises."""


class OutOfPages(CacheError):
    """Report that a pool has fewer free and evictable pages than asked for."""


class NotWorthIt(CacheError):
    """Report that computing the tokens [start, end) takes no longer than copying their pages."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(f"{end - start} tokens are computed")
        self.start, self.end = start, end


class OutOfRows(CacheError):
    """Report that every row of the page table is held."""


class SlotBusy(CacheError):
    """Report that the session is lent to another turn, or closing."""


class UnknownSession(CacheError):
    """Report that no slot has this id, or that this turn borrows none."""


class SlotExists(CacheError):
    """Report that a slot has this id already."""


class HistoryMismatch(CacheError):
    """Report that a turn builds on tokens that the slot does not hold."""


class NamespaceMismatch(CacheError):
    """Report that the slot belongs to another tenant or model."""


class PinQuotaExceeded(CacheError):
    """Report that pinning this session would exceed the quota of pinned pages."""


class AuditFailed(CacheError):
    """Report that accounts and structures disagree: always a bug of the server."""
