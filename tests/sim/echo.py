"""What the fake model says, and what a lone turn would say on an infinite machine.

A cell of KV is the tag of a chain (namespace, tokens so far, position). What the model says is a
function of all cells it read, of the sampler's seed and of the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from session_server.core.sampling import TokenLogprob
from tests.sim.draws import name_value, scramble

VOCAB_SIZE: Final = 32
EOS: Final = 0


_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def tag_after(before: int, token: int, position: int) -> int:
    """The tag of a cell from the one before it.

    Another token or another position always gives another tag, which a sum or an exclusive or of
    the two would not promise.
    """
    value = (before + (position << 40 | token + 1) * _GOLDEN) & _MASK
    return ((value ^ (value >> 29)) * 0xBF58476D1CE4E5B9 + _GOLDEN) & _MASK


@dataclass(frozen=True, slots=True)
class EchoModel:
    """What the fake model says. `alphabet`: the token ids it knows to say; the first ends a turn.
    Ids from `vocab_size` on are none.

    `num_repeats` of 4 tokens follow from the token before alone, so that an answer repeats itself
    and drafting from history is worth something. `window`: the last cells that an answer depends
    on; 0 for all of them.
    """

    alphabet: tuple[int, ...] = tuple(range(VOCAB_SIZE))
    num_repeats: int = 0
    vocab_size: int = VOCAB_SIZE
    window: int = 0

    def total(self, tags: Sequence[int]) -> int:
        """The sum of the cells that the token after `tags` depends on."""
        return sum(tags[-self.window :] if self.window else tags)

    def passed(self, tags: Sequence[int]) -> int:
        """The cell that is no longer among them when one more follows; 0 if none goes."""
        return tags[-self.window] if 0 < self.window <= len(tags) else 0

    def choose(self, total: int, position: int, seed: int, last: int) -> int:
        """The token at `position` after cells that sum to `total`, the last of token `last`."""
        draw = scramble(total + position * _GOLDEN + seed * 0xD1B54A32D192ED03)
        alphabet = self.alphabet
        if draw >> 60 & 3 < self.num_repeats:
            return alphabet[(last * 5 + 3) % len(alphabet)]
        return alphabet[draw % len(alphabet)]


class Truth:
    """What one turn would hold and say on an infinite machine, alone: found as far as asked for."""

    __slots__ = ("_model", "_seed", "_total", "tags", "tokens")

    def __init__(
        self,
        model: EchoModel,
        root: int,
        prompt: Sequence[int],
        *,
        seed: int,
        known: Sequence[int] = (),
    ) -> None:
        """`root` is the namespace; `known` are tags of a beginning of the prompt."""
        self._model = model
        self._seed = seed
        self.tokens = list(prompt)
        self.tags = list(known)
        tag = self.tags[-1] if self.tags else root
        for position in range(len(self.tags), len(self.tokens)):
            tag = tag_after(tag, self.tokens[position], position)
            self.tags.append(tag)
        self._total = model.total(self.tags)

    def reach(self, num_tags: int) -> None:
        """Find the cells of positions [0, num_tags)."""
        while len(self.tags) < num_tags:
            position = len(self.tags)
            self._say(position)
            tag = tag_after(self.tags[-1], self.tokens[position], position)
            if self._model.window:
                self._total -= self._model.passed(self.tags)
            self.tags.append(tag)
            self._total += tag

    def context(self, length: int) -> list[int]:
        """The first `length` tokens: the prompt, then what the turn says."""
        self.reach(length - 1)
        self._say(length - 1)
        return self.tokens[:length]

    def _say(self, position: int) -> None:
        if position == len(self.tokens):
            last = self.tokens[-1]
            self.tokens.append(self._model.choose(self._total, position, self._seed, last))


def score_of(cell: int, target: int) -> float:
    """The "logprob" of a target after the cell of the position before it."""
    return -float(tag_after(cell, target, 0) % 1000) / 100.0


def replay(
    salt: str, prompt: Sequence[int], *, seed: int, max_new: int, model: EchoModel | None = None
) -> list[int]:
    """The first `max_new` outputs of a lone turn on an infinite machine, stopping at nothing."""
    truth = Truth(model or EchoModel(), name_value(salt), prompt, seed=seed)
    return truth.context(len(prompt) + max_new)[len(prompt) :]


def replay_scores(salt: str, prompt: Sequence[int], start: int) -> list[TokenLogprob]:
    """Prompt logprobs from position `start` on, as a lone turn would have them."""
    tags = Truth(EchoModel(), name_value(salt), prompt, seed=0).tags
    return [
        TokenLogprob(token, score_of(tags[position - 1], token) if position else None)
        for position, token in enumerate(prompt)
        if position >= start
    ]
