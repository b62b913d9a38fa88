"""Read a value as JSON or Python writes it, and write it as JSON, piece by piece.

Models are asked for one of the two and mix them: single quotes, `True`, a comma before the end,
line breaks and unknown escapes in strings. Valid JSON is written as it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from session_server.text.answer_source import AnswerSource, Reading

MAX_DEPTH: Final = 128
"""Of lists and objects in each other; clients' own parsers are recursive."""

MAX_SCALAR_CHARS: Final = 400
"""Of a number or word: a double written out has at most 310 digits before its point."""

SPACE: Final = re.compile(r"[ \t\r\n]*")
_IN_STRING: Final = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_IN_SCALAR: Final = re.compile(r"[-+.\w]")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS: Final = {
    **{word: word for word in ("true", "false", "null")},
    "True": "true",
    "False": "false",
    "None": "null",
}
_ESCAPE_CHARS: Final = {"x": 4, "u": 6, "U": 10}
_ESCAPE: Final = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U00((?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}))"
)
"""A character by its number; Python's are 8 digits of one up to 10FFFF."""
_CLOSERS: Final = {"{": "}", "[": "]", "(": ")"}

Emit = Callable[[str], None]


def read_value(source: AnswerSource, emit: Emit) -> Reading[bool]:
    """Read one value; emit it as JSON.

    Returns:
        Whether it is complete. If not, it was read up to what cannot follow.
    """
    closers: list[str] = []
    while True:
        yield from read_space(source, emit)
        opener = yield from source.peek()
        if opener in _CLOSERS:
            if len(closers) == MAX_DEPTH:
                return False
            source.take(1)
            emit("{" if opener == "{" else "[")
            closers.append(_CLOSERS[opener])
            is_whole = yield from _close_one(source, emit, closers)
            if not is_whole:
                if closers[-1] == "}" and not (yield from _read_key(source, emit)):
                    return False
                continue
        elif not (yield from _read_scalar(source, emit, opener)):
            return False
        while closers:
            if (yield from _close_one(source, emit, closers)):
                continue
            if not (yield from source.accept(",")):
                return False
            spaces = yield from source.run(SPACE)
            if (yield from source.peek()) == closers[-1]:
                continue  # as Python allows
            emit("," + spaces)
            if closers[-1] == "}" and not (yield from _read_key(source, emit)):
                return False
            break
        else:
            return True


def read_string(source: AnswerSource, emit: Emit) -> Reading[bool]:
    """Read a string in either quotes; emit it as JSON. Only the end of the answer breaks it off."""
    quote = yield from source.peek()
    if quote not in _IN_STRING:
        return False
    source.take(1)
    emit('"')
    while True:
        run = source.take_run(_IN_STRING[quote])
        if run:
            emit(json.dumps(run, ensure_ascii=False)[1:-1])
        following = yield from source.peek()
        if following == quote:
            source.take(1)
            emit('"')
            return True
        if not following or (following == "\\" and not (yield from _read_escape(source, emit))):
            return False


def read_space(source: AnswerSource, emit: Emit) -> Reading[None]:
    """Read white space, emit it."""
    spaces = yield from source.run(SPACE)
    if spaces:
        emit(spaces)


def _close_one(source: AnswerSource, emit: Emit, closers: list[str]) -> Reading[bool]:
    """Return whether the innermost list or object ends here."""
    yield from read_space(source, emit)
    if not (yield from source.accept(closers[-1])):
        return False
    emit("}" if closers.pop() == "}" else "]")
    return True


def _read_key(source: AnswerSource, emit: Emit) -> Reading[bool]:
    if not (yield from read_string(source, emit)):
        return False
    yield from read_space(source, emit)
    if not (yield from source.accept(":")):
        return False
    emit(":")
    return True


def _read_scalar(source: AnswerSource, emit: Emit, start: str) -> Reading[bool]:
    if start in _IN_STRING:
        return (yield from read_string(source, emit))
    word = yield from _read_word(source)
    written = word if _NUMBER.fullmatch(word) else _WORDS.get(word)
    if written is None:
        return False
    emit(written)
    return True


def _read_word(source: AnswerSource) -> Reading[str]:
    word = ""
    while len(word) < MAX_SCALAR_CHARS:
        char = yield from source.peek()
        if not _IN_SCALAR.match(char):
            break
        word += source.take(1)
    return word


def _read_escape(source: AnswerSource, emit: Emit) -> Reading[bool]:
    """Read a backslash and what belongs to it; one that escapes nothing stands for itself.

    Returns False if the answer ends with the backslash.
    """
    code = (yield from source.peek(2))[1:]
    if not code:
        source.take(1)
        return False
    if code in '"\\/bfnrt':
        emit(source.take(2))
    elif code == "'":
        source.take(2)
        emit("'")
    else:
        length = _ESCAPE_CHARS.get(code, 2)
        escape = _ESCAPE.fullmatch((yield from source.peek(length)))
        source.take(length if escape is not None else 1)
        emit(_written(escape[escape.lastindex or 0]) if escape is not None else "\\\\")
    return True


def _written(digits: str) -> str:
    """Return the character of this number as JSON writes it."""
    if len(digits) == 4:  # possibly half of a pair
        return f"\\u{digits}"
    return json.dumps(chr(int(digits, 16)))[1:-1]
