"""`UnreadFiles`: what the disk has from before, of which names alone are known."""

from __future__ import annotations

from collections import Counter, OrderedDict

from cache.tiers.segment import NAME_BYTES, Chain


class UnreadFiles:
    """Hold files that no segment stands for, those used longest ago first. `num_bytes`: of all.

    What a file is called says which chain it follows. So it is known which files others build on,
    before any is read.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Chain, tuple[bytes, int]] = OrderedDict()
        self._num_after: Counter[Chain] = Counter()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: Chain) -> bool:
        return name in self._files

    def add(self, file_id: bytes, num_bytes: int) -> None:
        """Add a file as the one used last."""
        self._files[file_id[:NAME_BYTES]] = file_id, num_bytes
        self._num_after[file_id[NAME_BYTES:]] += 1
        self.num_bytes += num_bytes

    def oldest(self) -> Chain:
        """Return the name of the file used longest ago."""
        return next(iter(self._files))

    def take_all(self) -> set[bytes]:
        """Remove all files and return their ids."""
        file_ids = {file_id for file_id, _ in self._files.values()}
        self._files.clear()
        self._num_after.clear()
        self.num_bytes = 0
        return file_ids

    def pop(self, name: Chain) -> bytes | None:
        """Remove a file and return its id; None if there is none of this name."""
        found = self._files.pop(name, None)
        if found is None:
            return None
        file_id, num_bytes = found
        self.num_bytes -= num_bytes
        chain = file_id[NAME_BYTES:]
        self._num_after[chain] -= 1
        if not self._num_after[chain]:
            del self._num_after[chain]
        return file_id

    def has_after(self, chain: Chain) -> bool:
        """Return whether a file follows this very page."""
        return chain in self._num_after
