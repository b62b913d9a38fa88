"""Read an answer's text while it is still being written.

What reads it is a generator that yields where it needs more text, so that it is written as if all
of the text were there, and finds the same however the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

_T = TypeVar("_T")

Reading = Generator[None, None, _T]
"""Steps between pieces of text; their result is the generator's return value."""


class Markers:
    """Find the first of several strings, none of which begins with another one."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = tuple(texts)
        self.pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        prefixes = {text[:end] for text in texts for end in range(1, len(text))}
        self._prefixes = tuple(sorted(prefixes, key=len, reverse=True))

    def num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` that may become a marker."""
        if not text.endswith(self._prefixes):
            return 0
        return next(len(prefix) for prefix in self._prefixes if text.endswith(prefix))


class AnswerSource:
    """Hold the text that was not read yet, and what was read of something that may be no markup.

    The former is never longer than a marker and the last piece; the latter ends with `forget`,
    where it turned out to be markup, or with `take_back`.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._at = 0
        self._has_ended = False
        self._since: list[str] = []

    def add(self, text: str) -> None:
        """Add the next piece of the answer."""
        self._rest = self._rest[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Say that no piece follows."""
        self._has_ended = True

    @property
    def is_at_end(self) -> bool:
        """Return whether everything was read and nothing follows."""
        return self._has_ended and self._at == len(self._rest)

    def forget(self) -> None:
        """Let go of what was read: all of it has become something."""
        self._since.clear()

    def take_back(self) -> str:
        """Return what was read since the last `forget`, and forget it."""
        text = "".join(self._since)
        self._since.clear()
        return text

    def take(self, num_chars: int) -> str:
        """Read characters that are there."""
        text = self._rest[self._at : self._at + num_chars]
        self._at += len(text)
        self._since.append(text)
        return text

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Read as much as is there of a run that `pattern` matches, possibly nothing."""
        match = pattern.match(self._rest, self._at)
        return self.take(match.end() - self._at) if match is not None else ""

    def peek(self, num_chars: int = 1) -> Reading[str]:
        """Return the next characters without reading them; fewer only at the end."""
        while len(self._rest) - self._at < num_chars and not self._has_ended:
            yield
        return self._rest[self._at : self._at + num_chars]

    def accept(self, literal: str) -> Reading[bool]:
        """Read `literal` if it is what comes next."""
        while not self._rest.startswith(literal, self._at):
            there = self._rest[self._at : self._at + len(literal)]
            if self._has_ended or not literal.startswith(there):
                return False
            yield
        self.take(len(literal))
        return True

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read a whole run of characters that `pattern` matches, possibly none."""
        pieces = [self.take_run(pattern)]
        while self._at == len(self._rest) and not self._has_ended:
            yield
            pieces.append(self.take_run(pattern))
        return "".join(pieces)

    def until(self, markers: Markers, emit: Callable[[str], None]) -> Reading[str | None]:
        """Emit what comes before the first marker, and read that too.

        Returns:
            The marker; None if the answer ends without one.
        """
        while True:
            found = markers.pattern.search(self._rest, self._at)
            end = found.start() if found is not None else len(self._rest)
            if found is None and not self._has_ended:
                end = max(self._at, end - markers.num_held(self._rest))
            if end > self._at:
                emit(self.take(end - self._at))
            if found is not None:
                return self.take(len(found.group()))
            if self._has_ended:
                return None
            yield
