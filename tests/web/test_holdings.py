"""A place leaves what it holds: all of it, the last first, once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from session_server.web.holdings import Holdings


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

    place = Holdings()
    assert place.enter_context(held("first")) == "first"
    place.callback(left.append, "called")
    place.enter_context(held("bad"))
    inner = place.enter_context(Holdings())
    inner.enter_context(held("last"))
    with pytest.raises(RuntimeError, match="bad"):
        place.close()
    assert left == ["last", "bad", "called", "first"]
    place.close()
    assert len(left) == 4, "once"
    place.callback(left.append, "again")
    with pytest.raises(KeyError), place:
        raise KeyError
    assert left[4:] == ["again"]


def test_what_cannot_be_entered_is_not_left() -> None:
    @contextlib.contextmanager
    def refused() -> Iterator[None]:
        raise ValueError("full")
        yield

    left: list[str] = []
    with Holdings() as place:
        place.callback(left.append, "before")
        with pytest.raises(ValueError, match="full"):
            place.enter_context(refused())
        assert not left
    assert left == ["before"]
