"""Decide which prompts are computed elsewhere, and by whom. Pure: time comes in."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

Role = Literal["both", "prefill", "decode"]
"""What a replica does: everything, prompts for others, or turns whose long prompts others
compute."""

MIN_SENT_TOKENS: Final = 1024
"""Tokens to be computed from which a prompt is sent: two forwards of the largest chunk or more.
Less holds up the others for a moment, and to send it takes some 10 ms beside a copy back."""

MAX_PROMPT_TOKENS: Final = 240_000
"""Tokens of the longest prompt that is sent: a request has them in a body of 1 MiB, which is what a
server takes by default."""

_HELD_DIVISOR: Final = 2
"""A prompt of which more than this part is held here is computed here: another replica has to
compute or read that part too."""

MAX_SENT: Final = 32
"""Prompts that one replica has others compute at the same time; another one is computed here."""

MAX_SENT_TOKENS: Final = 1 << 19
"""Tokens of those."""

BUSY_S: Final = 1.0
"""For how long a replica that was busy is not asked."""

FAILED_S: Final = 5.0
"""For how long one is not asked that could not be reached, was silent or has failed."""

MISFIT_S: Final = 60.0
"""For how long one is not asked that serves another model or other pages."""

_SLACK: Final = 1
"""Prompts that the replica which has computed for a session before may have more than another."""

Outcome = Literal["done", "busy", "failed", "misfit"]
_PAUSE_S: Final[Mapping[Outcome, float]] = {
    "done": 0.0,
    "busy": BUSY_S,
    "failed": FAILED_S,
    "misfit": MISFIT_S,
}


class Peer(NamedTuple):
    """Name a replica that computes prompts, and where it answers."""

    replica_id: int
    url: str


class Need(NamedTuple):
    """Say what of a context has to be computed. Lengths are tokens.

    `held_len`: has KV here, in the pools or outside; `context_len`: of all.
    """

    context_len: int
    held_len: int
    page_size: int

    @property
    def sent_len(self) -> int:
        """Return the tokens that another replica would compute: whole pages, and one token at least
        is left for a forward here."""
        return (self.context_len - 1) // self.page_size * self.page_size


def is_long(need: Need) -> bool:
    """Return whether to compute a context here would hold up others, and most of it is new."""
    missing = need.sent_len - need.held_len
    is_new = missing >= MIN_SENT_TOKENS and missing * _HELD_DIVISOR >= need.sent_len
    return is_new and need.sent_len <= MAX_PROMPT_TOKENS


@dataclass(slots=True)
class PeerBook:
    """Remember what replicas have been asked for and have answered. Times are monotonic seconds.

    `num_tokens`: of the prompts that are being computed elsewhere.
    """

    num_tokens: int = 0
    _num_asked: Counter[int] = field(default_factory=Counter)
    _not_before_s: dict[int, float] = field(default_factory=dict)

    def may_send(self, num_tokens: int) -> bool:
        """Return whether another prompt may be sent, to whomever."""
        is_within = self.num_tokens + num_tokens <= MAX_SENT_TOKENS
        return self._num_asked.total() < MAX_SENT and is_within

    def choose(self, peers: Sequence[Peer], session: str, now_s: float) -> Peer | None:
        """Return whom to ask for a session: whoever has computed for it before, which may still
        have the beginning, unless others have less to do; None if nobody is to be asked."""
        self._forget(peers)
        free = [each for each in peers if self._not_before_s.get(each.replica_id, 0.0) <= now_s]
        if not free:
            return None
        least = min(self._num_asked[each.replica_id] for each in free)
        near = [each for each in free if self._num_asked[each.replica_id] <= least + _SLACK]
        return max(near, key=lambda each: _weight(each, session))

    def begin(self, peer: Peer, num_tokens: int) -> None:
        """Note that a replica was asked."""
        self._num_asked[peer.replica_id] += 1
        self.num_tokens += num_tokens

    def end(self, peer: Peer, num_tokens: int, outcome: Outcome, now_s: float) -> None:
        """Note what came of it."""
        self._num_asked[peer.replica_id] -= 1
        if not self._num_asked[peer.replica_id]:
            del self._num_asked[peer.replica_id]
        self.num_tokens -= num_tokens
        if _PAUSE_S[outcome]:
            self._not_before_s[peer.replica_id] = now_s + _PAUSE_S[outcome]

    def _forget(self, peers: Sequence[Peer]) -> None:
        """Forget replicas that are gone; none comes back under its number."""
        known = {each.replica_id for each in peers}
        for replica_id in self._not_before_s.keys() - known:
            del self._not_before_s[replica_id]


def _weight(peer: Peer, session: str) -> bytes:
    """Rendezvous hashing: where replicas come and go, few sessions change theirs."""
    return hashlib.blake2b(f"{peer.url} {session}".encode(), digest_size=8).digest()
