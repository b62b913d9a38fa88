"""What the cache refuses, and why. Nothing was changed by a call that raised.

CacheError
├── OutOfPages       a pool has fewer free and evictable pages than asked for
├── OutOfRows        every row of the page table is held
├── SlotBusy         the session is lent to another turn, or closing
├── UnknownSession   no slot has this id (or this turn borrows none)
├── SlotExists    a slot has this id already
├── HistoryMismatch  a turn builds on tokens the slot does not hold
├── NamespaceMismatch  the slot belongs to another tenant or model
├── PinQuotaExceeded   pinning this session would exceed the pinned quota
└── AuditFailed      the books and the structures disagree: a bug of ours
"""

from __future__ import annotations


class CacheError(Exception):
    """Root of everything `cache` raises on purpose."""


class OutOfPages(CacheError):
    """A pool has fewer free and evictable pages than asked for."""


class OutOfRows(CacheError):
    """Every row of the page table is held."""


class SlotBusy(CacheError):
    """The session is lent to another turn, or closing."""


class UnknownSession(CacheError):
    """No slot has this id, or this turn borrows none."""


class SlotExists(CacheError):
    """A slot has this id already."""


class HistoryMismatch(CacheError):
    """A turn builds on tokens the slot does not hold."""


class NamespaceMismatch(CacheError):
    """The slot belongs to another tenant or model."""


class PinQuotaExceeded(CacheError):
    """Pinning this session would exceed the quota of pinned pages."""


class AuditFailed(CacheError):
    """The books and the structures disagree. Always a bug of ours, never the caller's."""
