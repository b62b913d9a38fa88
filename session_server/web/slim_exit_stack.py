"""`SlimExitStack`: what a request or a socket holds while it is served, given back once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class SlimExitStack:
    """Hold context managers, and leave them when it is closed, the last first.

    Does for them what `contextlib.ExitStack` does, in a quarter of its bytes: every idle socket has
    one. None of them learns of an exception.
    """

    __slots__ = ("_exits",)

    def __init__(self) -> None:
        self._exits: list[Callable[[None, None, None], object]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def enter_context(self, context: AbstractContextManager[T]) -> T:
        """Enter a context manager, and leave it with the others. Raises what entering it does."""
        entered = context.__enter__()
        self._exits.append(context.__exit__)
        return entered

    def callback(self, function: Callable[..., object], *args: object) -> None:
        """Call a function when this is closed."""
        self._exits.append(lambda *_: function(*args))

    def close(self) -> None:
        """Leave everything that was entered, whatever one of them raises; nothing the second
        time."""
        try:
            while self._exits:
                self._exits.pop()(None, None, None)
        finally:
            if self._exits:
                self.close()
