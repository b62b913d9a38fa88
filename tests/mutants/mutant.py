"""A seeded bug: a few characters of one function replaced, while a `with` block lasts.

Product code has no switches for bugs. A mutant names the text it replaces, as it stands in the
source, so a mutant that the code has outgrown fails loudly instead of testing something else. The
function keeps its identity, only its code object changes: whoever holds a reference to it, by
whatever name it was imported, runs the wrong code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType


@dataclass(frozen=True, slots=True)
class Edit:
    """`was`, which stands exactly once in the function `where` ("module:Class.method"), becomes
    something else. A property is named like a method."""

    where: str
    was: str
    becomes: str

    @property
    def function(self) -> FunctionType:
        """What it changes."""
        return _function(self.where)

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Run the wrong code inside the block."""
        function = self.function
        right = function.__code__
        function.__code__ = _wrong_code(self)  # type: ignore[misc]  # of a function
        try:
            yield
        finally:
            function.__code__ = right  # type: ignore[misc]


class Mutant:
    """One bug somebody could make, or has made.

    `bug`: what is wrong, one sentence. `source`: whose bug it was and its scenario, as in
    "sglang#21875 (L1)", or "systematic". `edits`: each in another function. `first_seed`: the first
    of those that can find it.
    """

    __slots__ = ("bug", "edits", "first_seed", "source")

    def __init__(self, bug: str, source: str, *edits: Edit, first_seed: int = 0) -> None:
        self.bug = bug
        self.source = source
        self.edits = edits
        self.first_seed = first_seed

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Have the bug inside the block."""
        with ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(edit.apply())
            yield


def _function(where: str) -> FunctionType:
    module, _, qualname = where.partition(":")
    found: object = import_module(module)
    for name in qualname.split("."):
        found = inspect.getattr_static(found, name)
    match found:
        case property(fget=getter):
            found = getter
        case staticmethod() | classmethod():
            found = found.__func__
        case FunctionType():
            found = inspect.unwrap(found)  # of a context manager, the generator
        case _:
            pass
    assert isinstance(found, FunctionType), f"{where} is not a function of ours"
    return found


@cache
def _wrong_code(edit: Edit) -> CodeType:
    function = edit.function
    module = inspect.getmodule(function)
    assert module is not None
    lines, start = inspect.getsourcelines(function)
    body = "".join(lines)
    assert body.count(edit.was) == 1, f"{edit.where} has {body.count(edit.was)} times: {edit.was}"
    whole_lines = list(inspect.getsourcelines(module)[0])
    whole_lines[start - 1 : start - 1 + len(lines)] = [body.replace(edit.was, edit.becomes)]
    whole = compile("".join(whole_lines), function.__code__.co_filename, "exec")
    return next(code for code in _codes(whole) if code.co_qualname == function.__qualname__)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
