"""Bugs in what a session holds: leases, slots, the façade."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

RETRACT_DROPS_TAIL = Mutant(
    "A retracted turn gives up its row and forgets the pages it has not published.",
    "sglang#22862 (L2)",
    Edit(
        "cache.lease:KVLease.release",
        "self._drop_private(0)",
        "[pages.clear() for pages in self._private.values()]",
    ),
)

RELEASE_KEEPS_ROW = Mutant(
    "A lease is given back without its row.",
    "sglang#10871 (L5)",
    Edit(
        "cache.lease:KVLease.release",
        "self._stores.rows.free(self.row)",
        "pass",
    ),
)
