"""Speculation, the engine's part: which turns guess how far before each plan.

A guess is a luxury: it is verified by the forward its turn takes part in anyway, on tokens and
pages that nobody else has a use for (`plan.offer_drafts`). A turn whose next token is still in
flight cannot verify guesses behind it; if it has some, it waits for that token instead of being
launched ahead, because one forward that confirms several tokens beats two that give one each. And
everybody waits with it: a launch ahead without it would split the turns over two forwards.
"""

from __future__ import annotations

from collections.abc import Iterable

from cache.session_cache import SessionAwareCache
from session_server.engine.config import Drafter, Speculation
from session_server.engine.ngram import WINDOW, look_up
from session_server.engine.turn import Guess, Turn


class Drafting:
    """Chooses the guesses of running turns."""

    def __init__(self, cache: SessionAwareCache, speculation: Speculation) -> None:
        self._cache = cache
        self._drafter = speculation.drafter
        self._max_drafts = speculation.num_drafts

    def guess(self, turns: Iterable[Turn]) -> None:
        """Renew the guess of every turn that decodes."""
        if self._max_drafts == 0:
            return
        for turn in turns:
            turn.borrowed.guess = self._guess(turn) if turn.is_decoding else None

    def _guess(self, turn: Turn) -> Guess | None:
        """Nothing for a turn whose last token comes with the next forward anyway."""
        num_unseen = turn.borrowed.num_sampling
        # A verified row gives one token more than it has drafts.
        room = turn.max_new - len(turn.outputs) - num_unseen - 1
        num_drafts = min(turn.guess_len or self._max_drafts, self._max_drafts, room)
        if num_drafts <= 0:
            return None
        if self._drafter is Drafter.MODEL:
            return Guess(num_drafts, None)
        start = max(0, turn.known_len - WINDOW)
        tokens = self._cache.tokens(turn.request.session_id, start)
        guessed = look_up(tokens, num_unseen + num_drafts)[num_unseen:]
        return Guess(num_drafts, guessed) if len(guessed) else None
