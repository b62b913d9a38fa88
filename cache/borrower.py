"""`Borrower`: a turn that has borrowed a session."""

from __future__ import annotations

from dataclasses import dataclass

from cache.lease import KVLease
from cache.session_slot import SessionSlot
from cache.views import TurnLoan


@dataclass(slots=True)
class Borrower:
    """Describe a running turn, for ending it.

    `base_len`: tokens of the history before it; `prompt_len`: including its input.
    """

    slot: SessionSlot
    lease: KVLease
    base_len: int
    prompt_len: int
    loan: TurnLoan
    is_prompt_complete: bool = False
