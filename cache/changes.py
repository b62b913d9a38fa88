"""`Changes`: which sessions and edges changed while somebody watches.

A recount that is made in slices looks at a session or an edge, and must look again if it changes
before the recount is complete (`cache.recount`). Whoever changes one notes it here; without a
watcher that costs a comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.radix_node import RadixNode
from cache.types import SessionId


@dataclass(slots=True, eq=False)
class ChangeSet:
    """What changed since `Changes.watch`; the watcher takes out what it has looked at.

    Both are ordered: what a recount visits next must not depend on the hash of anything.
    """

    sessions: dict[SessionId, None] = field(default_factory=dict)
    nodes: dict[RadixNode, None] = field(default_factory=dict)


class Changes:
    """Tells every watcher.

    `version`: grows with every change of an edge; what a match finds depends on nothing else.
    """

    __slots__ = ("_watches", "version")

    def __init__(self) -> None:
        self._watches: list[ChangeSet] = []
        self.version = 0

    def watch(self) -> ChangeSet:
        """Begin to note changes for one more watcher."""
        watch = ChangeSet()
        self._watches.append(watch)
        return watch

    def unwatch(self, watch: ChangeSet) -> None:
        """Stop noting changes for a watcher."""
        self._watches.remove(watch)

    def record_session(self, session_id: SessionId) -> None:
        """A session's lease was taken, changed or given back."""
        for watch in self._watches:
            watch.sessions[session_id] = None

    def record_content(self, node: RadixNode) -> None:
        """An edge changed in a way that matches over it depend on: its tokens or pages, or which
        of them can be evicted."""
        self.record_node(node)
        node.version = self.version

    def record_node(self, node: RadixNode) -> None:
        """An edge was made, changed, locked, unlocked or removed."""
        self.version += 1
        for watch in self._watches:
            watch.nodes[node] = None
