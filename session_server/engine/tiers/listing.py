"""`Listing`: what the disk has from before is entered a slice at a time."""

from __future__ import annotations

from collections.abc import Sequence

from session_server.engine.tiers.unread_files import UnreadFiles


class Listing:
    """Enter the files that the disk has from before. `is_over`: all of them are known."""

    def __init__(self, unread: UnreadFiles, *, is_over: bool) -> None:
        self._unread = unread
        self._listed: list[tuple[bytes, int]] | None = None
        """Those that were not entered yet, those used longest ago last; None until there is a
        list."""

        self._found: set[bytes] = set()
        """Files that were found by their names meanwhile. They may be gone by now."""

        self.is_over = is_over
        self.has_failed = False
        """Whether the disk did not say what it has."""

    @property
    def has_more(self) -> bool:
        """Return whether another slice can be entered."""
        return self._listed is not None

    def note_found(self, file_id: bytes) -> None:
        """Note that a segment stands for a file from now on, or has stood for it."""
        if not self.is_over:
            self._found.add(file_id)

    def take(self, listed: Sequence[tuple[bytes, int]]) -> None:
        """Take the list: of each file its id and bytes, those used longest ago first."""
        if not self.is_over:
            self._listed = list(reversed(listed))

    def enter(self, num_files: int, more_bytes: int) -> None:
        """Enter so many files, or end if there are no more. Each counts `more_bytes` more than it
        has."""
        if not self._listed:
            self.end()
            return
        for _ in range(min(num_files, len(self._listed))):
            file_id, num_bytes = self._listed.pop()
            if file_id not in self._found:
                self._unread.add(file_id, num_bytes + more_bytes)

    def end(self) -> None:
        """Enter nothing more."""
        self.is_over = True
        self._listed = None
        self._found.clear()
