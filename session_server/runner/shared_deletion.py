"""`deleting`: find and remove the files of histories in a directory that others write too.

A file's name says what it holds first and what it follows. So one look at all names, with the pages
of all histories in one tree, tells which files lie on them and which others need what is before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from cache.tiers.segment import NAME_BYTES, chains_after, first_chain
from session_server.core.tier_orders import DroppedPath
from session_server.runner.kv_directory import SEGMENT

_PAGES_PER_STEP: Final = 1 << 12
"""Pages that are gone through between two yields."""


class _Pages:
    """Hold the pages of histories, those before others first. `numbers`: by the chain that ends
    with each; `goes`: whether a file that begins with it goes."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self._before: list[int] = []
        self.goes = bytearray()

    def add(self, path: DroppedPath, page_size: int) -> Iterator[None]:
        """Add a history, of which the first tokens stay."""
        chain, num_kept = first_chain(path.namespace), path.num_kept // page_size
        tokens = path.tokens[: len(path.tokens) // page_size * page_size]
        number = self._add(chain, 0)
        for num_before, each in enumerate(chains_after(chain, tokens, page_size)):
            number = self._add(each, number)
            self.goes[number] |= num_before >= num_kept
            if num_before % _PAGES_PER_STEP == 0:
                yield

    def _add(self, chain: bytes, before: int) -> int:
        number = self.numbers.setdefault(chain, len(self._before))
        if number == len(self._before):
            self._before.append(before)
            self.goes.append(False)
        return number

    def spread(self, is_needed: bytearray) -> Iterator[None]:
        """Have what is before each page that is needed be needed too."""
        for number in range(len(is_needed) - 1, 0, -1):
            if is_needed[number]:
                is_needed[self._before[number]] = True
            if number % _PAGES_PER_STEP == 0:
                yield


def deleting(
    directory: int, paths: Sequence[DroppedPath], page_size: int, remove: Callable[[bytes], object]
) -> Iterator[None]:
    """Remove the files of some histories, behind their first tokens and behind where another one
    leaves them that has files. Yields after a little work.

    Raises:
        OSError: the directory cannot be read.
    """
    pages, is_left = _Pages(), True
    for path in paths:
        yield from pages.add(path, page_size)
    # Of two servers that delete histories with a beginning in common, whoever looks last sees that
    # nobody else has it.
    while is_left:
        own, is_needed, num_gone = list[tuple[int, bytes]](), bytearray(len(pages.goes)), 0
        for file_id in _names(directory):
            yield
            before = pages.numbers.get(file_id[NAME_BYTES : 2 * NAME_BYTES])
            number = pages.numbers.get(file_id[:NAME_BYTES], 0)
            if before is not None and pages.goes[number]:
                own.append((number, file_id))
            elif before is not None:
                is_needed[before] = True
        yield from pages.spread(is_needed)
        for number, file_id in own:
            if not is_needed[number]:
                remove(file_id)
                num_gone += 1
                yield
        is_left = 0 < num_gone < len(own)


def _names(directory: int) -> Iterator[bytes]:
    """Yield what the files are called, by a descriptor whose place nobody else moves."""
    own = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
    try:
        with os.scandir(own) as entries:
            for entry in entries:
                match = SEGMENT.fullmatch(entry.name)
                if match is not None:
                    yield bytes.fromhex(match[1])
    finally:
        os.close(own)
