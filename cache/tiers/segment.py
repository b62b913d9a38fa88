"""`Segment`: KV of consecutive whole pages of a path, outside of the pools.

A segment is written once and never changed. It follows another one, at any page of that, or begins
its namespace; so what two sessions have in common is stored once. Its *name* is a hash of all
tokens up to and including its first page: no two segments of a tree have the same, and a file of
that name is found without an index.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cache.types import Namespace, PoolName, Tokens

NAME_BYTES: Final = 16

TAG_BYTES: Final = 4
"""Of a tenant, in the name of a file: who has most is known before any is read."""

Chain = bytes
"""Hash of the tokens before a page boundary, in order, and of the namespace: `NAME_BYTES` bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentContent:
    """Describe what a segment holds.

    `start`: tokens before it; `tokens`: int32 [n], whole pages; `spans`: per pool, the pages that
    it has, as a range [first, end) of indices into the path; `chain`, `end_chain`: those of its
    beginning and its end; `num_bytes`: what it takes in host memory, or on disk;
    `num_token_bytes`: of its tokens, also once they are gone; `tag`: see `tenant_tag`.
    """

    namespace: Namespace
    chain: Chain
    name: Chain
    end_chain: Chain
    start: int
    tokens: Tokens
    spans: Mapping[PoolName, tuple[int, int]]
    num_bytes: int
    num_token_bytes: int
    tag: bytes

    def without_tokens(self) -> SegmentContent:
        """Return the same for a segment that nobody reads any more."""
        return dataclasses.replace(self, tokens=self.tokens[:0].copy())

    @property
    def end(self) -> int:
        """Return the tokens of the path up to its end."""
        return self.start + len(self.tokens)

    @property
    def file_id(self) -> bytes:
        """Return what its file is called: its name, the chain that it follows, and whose it is."""
        return self.name + self.chain + self.tag


class Segment:
    """Say where a segment is, and what follows it. Written by `SegmentTree` and the tiers only.

    `in_host`, `on_disk`: where it can be read. `is_writing`: it is being written to disk;
    `is_refused`: the disk did not take it. `num_sessions`: sessions whose history ends in it.
    `used_ns`: when it was used last, on the engine's clock.
    """

    __slots__ = (
        "children",
        "content",
        "in_host",
        "is_refused",
        "is_writing",
        "num_sessions",
        "number",
        "on_disk",
        "parent",
        "used_ns",
    )

    def __init__(self, number: int, content: SegmentContent) -> None:
        self.number = number
        self.content = content
        self.parent: Segment | None = None
        self.children: dict[Chain, Segment] = {}
        self.in_host = self.on_disk = self.is_writing = self.is_refused = False
        self.num_sessions = self.used_ns = 0

    @property
    def is_readable(self) -> bool:
        """Return whether it can be read."""
        return self.in_host or self.on_disk

    def unlink(self) -> None:
        """Let go of everything, once it was removed."""
        self.parent, self.children = None, {}
        self.content = self.content.without_tokens()

    def below(self) -> Iterator[Segment]:
        """Yield all segments that follow it, parents first."""
        pending = list(self.children.values())
        while pending:
            segment = pending.pop()
            pending.extend(segment.children.values())
            yield segment


def tenant_tag(tenant: str) -> bytes:
    """Return what the names of files say of whose they are."""
    return hashlib.blake2b(tenant.encode(), digest_size=TAG_BYTES).digest()


def first_chain(namespace: Namespace) -> Chain:
    """Return the chain of a namespace without tokens."""
    digest = hashlib.blake2b(digest_size=NAME_BYTES)
    # A length before each, so that no two namespaces give the same bytes.
    for part in (namespace.tenant_salt, namespace.model_fingerprint):
        text = part.encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return digest.digest()


def chains_after(chain: Chain, tokens: Tokens, page_size: int) -> Iterator[Chain]:
    """Yield the chain after each whole page of `tokens`, int32 [n]."""
    data, page_bytes = tokens.tobytes(), page_size * tokens.itemsize
    for at in range(0, len(data), page_bytes):
        chain = hashlib.blake2b(chain + data[at : at + page_bytes], digest_size=NAME_BYTES).digest()
        yield chain


def chain_after(chain: Chain, tokens: Tokens, page_size: int) -> Chain:
    """Return the chain after whole pages of `tokens`, int32 [n]."""
    for after in chains_after(chain, tokens, page_size):
        chain = after
    return chain
