"""Route requests to replicas under Ray Serve: sticky, by `routing`.

Ray imports this by its path into its proxies, and wherever something holds a handle of the
replicas. `routing` says what the key of a request is.
"""

from __future__ import annotations

# Ray's proxy hands over the request as it has just pickled it, in the same process.
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from session_server.deploy.routing import routing_key, tag_in, tag_of


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc] # Ray is not there to check it
    """Send a session to the replica that opened it, and others to one that their key hashes to."""

    def update_replicas(self, replicas: Sequence[Any]) -> None:
        """Take over which replicas there are."""
        super().update_replicas(replicas)
        self._by_tag = {tag_of(each.replica_id.unique_id): each.replica_id for each in replicas}

    def _routing_key(self, pending_request: Any | None) -> str | None:
        key: str | None = super()._routing_key(pending_request)
        asked = next(iter(pending_request.args), None) if pending_request is not None else None
        if isinstance(asked, str):  # a call of `Replica.report`, which names its replica
            return asked
        if isinstance(asked, bytes):
            return routing_key(_scope_of(asked)) or key
        return key

    def _lookup_ranked_replicas(self, routing_key: str) -> list[Any]:
        ranked: list[Any] = super()._lookup_ranked_replicas(routing_key)
        named = self._by_tag.get(tag_in(routing_key) or "")
        return ranked if named is None else [named, *(each for each in ranked if each != named)]


def _scope_of(pickled_request: bytes) -> Mapping[str, Any]:
    scope: Mapping[str, Any] = pickle.loads(pickled_request)._asgi_scope  # noqa: S301 - see above
    return scope
