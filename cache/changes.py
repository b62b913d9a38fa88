"""`Changes`: record which sessions and edges change, for recounts that are made in slices.

A recount (`cache.recount`) visits a session or an edge, and must visit it again if it changes
before the recount is complete. All code that changes one records it here. Without a recount that
costs one empty loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.radix_node import RadixNode
from cache.types import SessionId


@dataclass(slots=True, eq=False)
class ChangeSet:
    """Hold what changed since `Changes.watch`; the watcher removes what it has visited.

    Both are dicts because those are ordered: the order of visits must not depend on hashes.
    """

    sessions: dict[SessionId, None] = field(default_factory=dict)
    nodes: dict[RadixNode, None] = field(default_factory=dict)


class Changes:
    """Record changes in the change set of every watcher.

    `version`: grows with every change of an edge. The result of a match depends on nothing else.
    `turn_version`: grows with every change of a running turn, except by its `Lockstep`.
    """

    def __init__(self) -> None:
        self._watches: list[ChangeSet] = []
        self.version = 0
        self.turn_version = 0

    @property
    def is_watched(self) -> bool:
        """Return whether anybody is told of changes."""
        return bool(self._watches)

    def watch(self) -> ChangeSet:
        """Return a new change set and start to record changes in it."""
        watch = ChangeSet()
        self._watches.append(watch)
        return watch

    def unwatch(self, watch: ChangeSet) -> None:
        """Stop recording changes in a change set."""
        self._watches.remove(watch)

    def record_session(self, session_id: SessionId) -> None:
        """Record that a session's lease was created, changed or released."""
        for watch in self._watches:
            watch.sessions[session_id] = None

    def record_content(self, node: RadixNode) -> None:
        """Record that an edge changed in a way that matches over it depend on: its tokens, its
        pages, or which of them are evictable."""
        self.record_node(node)
        node.version = self.version

    def record_node(self, node: RadixNode) -> None:
        """Record that an edge was created, changed, locked, unlocked or removed."""
        self.version += 1
        for watch in self._watches:
            watch.nodes[node] = None
