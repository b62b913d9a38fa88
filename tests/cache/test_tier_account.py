"""The account of one tier, against one that is written down anew for each question."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.tiers.segment import Segment, SegmentContent
from cache.tiers.tier_account import TierAccount
from cache.types import Namespace

ROOM = 100


def segment_of(number: int, tenant: str, num_bytes: int) -> Segment:
    """A segment of which an account looks at no more than this."""
    content = SegmentContent(
        namespace=Namespace(tenant, "model", tenant),
        chain=b"",
        name=number.to_bytes(16, "little"),
        end_chain=b"",
        start=0,
        tokens=np.zeros(4, np.int32),
        spans={},
        num_bytes=num_bytes,
        num_token_bytes=0,
        tag=tenant.encode(),
    )
    return Segment(number, content)


class AccountMachine(RuleBasedStateMachine):
    """Segments come, are used and go; the model is a list, those used longest ago first."""

    def __init__(self) -> None:
        super().__init__()
        self.account = TierAccount(ROOM)
        self.model: list[Segment] = []
        self.num_made = self.num_uses = 0

    @rule(tenant=st.sampled_from("abc"), num_bytes=st.integers(1, ROOM))
    def add(self, tenant: str, num_bytes: int) -> None:
        self.num_made += 1
        segment = segment_of(self.num_made, tenant, num_bytes)
        assert segment not in self.account
        self.use(segment)
        if num_bytes <= ROOM - self.num_bytes():
            self.account.add(segment)
            self.model.append(segment)
        else:
            with pytest.raises(AssertionError, match="room is made"):
                self.account.add(segment)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(self.model))
        self.model.remove(segment)
        self.account.remove(segment)
        assert segment not in self.account

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        path = data.draw(st.lists(st.sampled_from(self.model), unique=True))
        for segment in reversed(path):
            self.use(segment)
        self.account.touch([*path, segment_of(0, "a", 1), segment_of(0, "nobody", 1)])
        for segment in reversed(path):
            self.model.remove(segment)
            self.model.append(segment)

    def use(self, segment: Segment) -> None:
        self.num_uses += 1
        segment.used_ns = self.num_uses

    @rule(num_tried=st.integers(1, 3), odd=st.booleans())
    def give(self, num_tried: int, odd: bool) -> None:
        def may_give(segment: Segment) -> bool:
            return segment.number % 2 == odd

        shares = self.shares()
        given = self.account.next_to_give(may_give, num_tried)
        if not shares:
            assert given is None
            return
        most = max(shares.values())
        expected = []
        for tenant in [each for each, share in shares.items() if share == most]:
            oldest = [s for s in self.model if s.content.namespace.tenant == tenant][:num_tried]
            expected.append(next(filter(may_give, oldest), None))
        assert given in expected

    @invariant()
    def counts(self) -> None:
        assert self.account.num_bytes == self.num_bytes() <= ROOM
        assert self.account.free_bytes == ROOM - self.num_bytes()
        assert self.account.num_segments == len(self.model)
        assert all(segment in self.account for segment in self.model)

    def num_bytes(self) -> int:
        return sum(each.content.num_bytes for each in self.model)

    def shares(self) -> dict[str, int]:
        shares: dict[str, int] = {}
        for each in self.model:
            tenant = each.content.namespace.tenant
            shares[tenant] = shares.get(tenant, 0) + each.content.num_bytes
        return shares


TestAccount = AccountMachine.TestCase
