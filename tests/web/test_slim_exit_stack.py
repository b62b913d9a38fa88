"""A stack leaves what it holds: all of it, the last first, once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from session_server.web.slim_exit_stack import SlimExitStack


def test_everything_is_left_in_reverse_whatever_one_of_them_raises() -> None:
    left: list[str] = []

    @contextlib.contextmanager
    def held(name: str) -> Iterator[str]:
        try:
            yield name
        finally:
            left.append(name)
            if name == "bad":
                raise RuntimeError(name)

    stack = SlimExitStack()
    assert stack.enter_context(held("first")) == "first"
    stack.callback(left.append, "called")
    stack.enter_context(held("bad"))
    inner = stack.enter_context(SlimExitStack())
    inner.enter_context(held("last"))
    with pytest.raises(RuntimeError, match="bad"):
        stack.close()
    assert left == ["last", "bad", "called", "first"]
    stack.close()
    assert len(left) == 4, "once"
    stack.callback(left.append, "again")
    with pytest.raises(KeyError), stack:
        raise KeyError
    assert left[4:] == ["again"]


def test_what_cannot_be_entered_is_not_left() -> None:
    @contextlib.contextmanager
    def refused() -> Iterator[None]:
        raise ValueError("full")
        yield

    left: list[str] = []
    with SlimExitStack() as stack:
        stack.callback(left.append, "before")
        with pytest.raises(ValueError, match="full"):
            stack.enter_context(refused())
        assert not left
    assert left == ["before"]
