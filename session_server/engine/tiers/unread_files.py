"""`UnreadFiles`: what the disk has from before, of which names alone are known."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, Final

from cache.tiers.segment import NAME_BYTES, Chain, chains_after
from cache.tiers.segment_tree import Path, SegmentTree
from cache.tiers.tier_account import TierAccount
from cache.types import Tokens
from session_server.engine.tiers.shared_index import SharedIndex

UNREAD_FILE_BYTES: Final = 640
"""Memory for what is known of a file that nobody has read: at most this much."""


class UnreadFiles:
    """Hold files that no segment stands for, of each tenant those used longest ago first.

    What a file is called says which chain it follows and whose it is. So it is known which files
    others build on, and who has most, before any is read. Their bytes count in the account.
    """

    def __init__(self, account: TierAccount) -> None:
        self._account = account
        self._files: dict[Chain, tuple[bytes, int]] = {}
        self._num_after: Counter[Chain] = Counter()
        self._oldest_first: dict[bytes, deque[Chain]] = {}
        """Per tenant; those that are not there any more too, until it is their turn."""

        self._num_of: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: Chain) -> bool:
        return name in self._files

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all; O(files), for audits."""
        return sum(num_bytes for _, num_bytes in self._files.values())

    def num_of(self, tag: bytes) -> int:
        """Return how many files a tenant has."""
        return self._num_of[tag]

    def size_of(self, name: Chain) -> int | None:
        """Return the bytes of a file; None if there is none of this name."""
        found = self._files.get(name)
        return None if found is None else found[1]

    def add(self, file_id: bytes, num_bytes: int) -> None:
        """Add a file as the one of its tenant that was used last."""
        name, chain, tag = _parts(file_id)
        self._files[name] = file_id, num_bytes
        self._num_after[chain] += 1
        self._oldest_first.setdefault(tag, deque()).append(name)
        self._num_of[tag] += 1
        self._account.change(tag, num_bytes)

    def expect(self, file_id: bytes, num_bytes: int) -> None:
        """Add a file that another engine has written, if it is not known."""
        if file_id[:NAME_BYTES] not in self._files:
            self.add(file_id, num_bytes)

    def oldest(self, tag: bytes) -> Chain | None:
        """Return the name of the file that a tenant has used longest ago; None if it has none."""
        names = self._oldest_first.get(tag)
        while names and names[0] not in self._files:
            names.popleft()
        return names[0] if names else None

    def pop(self, name: Chain) -> bytes | None:
        """Remove a file and return its id; None if there is none of this name."""
        found = self._files.pop(name, None)
        if found is None:
            return None
        file_id, num_bytes = found
        _, chain, tag = _parts(file_id)
        self._account.change(tag, -num_bytes)
        for counts, key in ((self._num_after, chain), (self._num_of, tag)):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
        if tag not in self._num_of:
            del self._oldest_first[tag]
        return file_id

    def clear(self) -> list[dict[Any, Any]]:
        """Remove all files at once, whose bytes the caller counts no more; return what was known of
        them, to be let go of a little at a time."""
        known: list[dict[Any, Any]] = [self._files, self._num_after, self._oldest_first]
        self._files, self._num_after, self._oldest_first = {}, Counter(), {}
        self._num_of.clear()
        return known

    def has_after(self, chain: Chain) -> bool:
        """Return whether a file follows this very page."""
        return chain in self._num_after


def names_behind(
    files: UnreadFiles | SharedIndex, tree: SegmentTree, path: Path, tokens: Tokens
) -> Iterator[tuple[int, Chain]]:
    """Yield the names of files of `tokens` behind a path, and where they would begin, as far as
    one may be there: a file begins within the one before it, or at its end.

    Only where somebody has removed a file there may be others behind the gap. They are found
    again if what is missing is written again, and else age out.
    """
    page_size = tree.page_size
    end = len(tokens) - len(tokens) % page_size
    names = chains_after(path.chain, tokens[path.length : end], page_size)
    reach = path.length
    for start, name in zip(range(path.length, end, page_size), names, strict=True):
        if start > reach:
            return
        yield start, name
        num_bytes = files.size_of(name)
        if num_bytes is not None:
            num_pages = num_bytes // tree.least_page_bytes
            reach = max(reach, start + num_pages * page_size)


def _parts(file_id: bytes) -> tuple[Chain, Chain, bytes]:
    """Return the name of a file, the chain that it follows, and whose it is."""
    return file_id[:NAME_BYTES], file_id[NAME_BYTES : 2 * NAME_BYTES], file_id[2 * NAME_BYTES :]
