"""`Drafting`: how many drafts each running turn proposes before each plan, and which.

Drafts only use spare capacity: the turn's next forward verifies them in token slots and pages that
no other turn needs (`plan._offer_drafts`).

A turn whose next token is in flight cannot have drafts verified behind that token. If it has some,
it waits for the token instead of being launched ahead, because one forward that confirms several
tokens is faster than two that give one each. The other turns wait with it, since a forward without
it would split the turns over two forwards.
"""

from __future__ import annotations

from collections.abc import Iterable

from cache.session_cache import SessionAwareCache
from session_server.engine.config import Drafter, Speculation
from session_server.engine.ngram import WINDOW, look_up
from session_server.engine.turn import Draft, Turn


class Drafting:
    """Propose drafts for running turns."""

    def __init__(self, cache: SessionAwareCache, speculation: Speculation) -> None:
        self._cache = cache
        self._drafter = speculation.drafter
        self._max_drafts = speculation.num_drafts

    def propose(self, turns: Iterable[Turn]) -> None:
        """Replace the draft of each turn: a turn that decodes gets a new one, others none."""
        if self._max_drafts == 0:
            return
        for turn in turns:
            turn.current_admission.draft = self._draft(turn) if turn.is_decoding else None

    def _draft(self, turn: Turn) -> Draft | None:
        """Return a new draft; None if the next forward already ends the turn or nothing matches."""
        num_unseen = turn.current_admission.num_sampling
        # A verified row gives one token more than it has drafts.
        room = turn.max_new - len(turn.outputs) - num_unseen - 1
        num_drafts = min(turn.draft_len or self._max_drafts, self._max_drafts, room)
        if num_drafts <= 0:
            return None
        if self._drafter is Drafter.MODEL:
            return Draft(num_drafts, None)
        start = max(0, turn.known_len - WINDOW)
        tokens = self._cache.tokens(turn.request.session_id, start)
        # Tokens in flight are not known yet: the lookup continues through them.
        continuation = look_up(tokens, num_unseen + num_drafts)[num_unseen:]
        return Draft(num_drafts, continuation) if len(continuation) else None
