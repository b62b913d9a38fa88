"""Suggest the name that somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like `word`; None where none is."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str | None) -> str:
    """Return the end of an error message that suggests `name`; nothing without one."""
    return f"; did you mean {name}?" if name else ""
