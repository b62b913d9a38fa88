"""The glossary names every word of ours, and only words that the code uses."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "glossary.md"
SOURCES = sorted(
    path for room in ("cache", "session_server") for path in (ROOT / room).rglob("*.py")
)


def rows() -> Iterator[tuple[str, ...]]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| here "):
            yield tuple(cell.strip() for cell in line.strip("|").split(" | "))


def terms() -> list[str]:
    return [
        term
        for row in rows()
        for term in re.findall(r"\*\*(.+?)\*\*|`(.+?)`", row[0])
        for term in term
        if term
    ]


def source_words() -> set[str]:
    """Return every word of the code, its docstrings and its comments, in lower case."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    identifiers = set(re.findall(r"\w+", text))
    parts = {part for word in identifiers for part in re.split(r"_|(?<=[a-z])(?=[A-Z])", word)}
    return {word.lower() for word in identifiers | parts}


@pytest.fixture(scope="module")
def words() -> set[str]:
    return source_words()


def test_the_glossary_has_a_table() -> None:
    assert len(terms()) >= 40
    assert all(len(row) == 4 and all(row) for row in rows())


@pytest.mark.parametrize("term", terms())
def test_every_word_of_the_glossary_is_used_by_the_code(term: str, words: set[str]) -> None:
    unused = [word for word in re.findall(r"\w+", term.lower()) if not is_used(word, words)]
    assert not unused, f"{unused} of {term!r} stand in the glossary and nowhere in the code"


def is_used(word: str, words: set[str]) -> bool:
    return any(form in words for form in (word, f"{word}s", f"{word}ed", f"{word}d", f"{word}ing"))


def test_no_word_stands_in_the_glossary_twice() -> None:
    assert len(terms()) == len(set(terms()))


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}
