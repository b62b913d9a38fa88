from __future__ import annotations

import pytest

from session_server.core.owner import (
    ANONYMOUS,
    Owner,
    named_owner_id,
    owner_id_of,
    shown_owner,
)

_DIGEST = "0123456789abcdef" * 4


def test_owners_of_one_id_are_one_whatever_they_are_granted() -> None:
    granted = Owner("a", max_priority=5, share=0.5)
    assert granted == Owner("a")
    assert len({granted, Owner("a"), Owner("b")}) == 2


def test_an_owner_is_granted_what_an_equal_one_is() -> None:
    owner = Owner("a", share=0.5)
    owner.follow(Owner("a", max_priority=5, share=0.25, is_admin=False))
    assert (owner.max_priority, owner.share, owner.is_admin) == (5, 0.25, False)
    with pytest.raises(AssertionError):
        owner.follow(Owner("b"))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_is_a_part_of_the_whole(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        Owner("a", share=share)


@pytest.mark.parametrize(
    ("owner_id", "shown"),
    [
        (named_owner_id("alice"), "alice"),
        (ANONYMOUS.owner_id, "anonymous"),
        (_DIGEST, _DIGEST),
        (named_owner_id("anonymous"), "name:anonymous"),
        (named_owner_id(_DIGEST), f"name:{_DIGEST}"),
    ],
)
def test_an_owner_is_shown_as_it_is_asked_for(owner_id: str, shown: str) -> None:
    assert shown_owner(owner_id) == shown
    assert owner_id_of(shown) == owner_id
