"""Define what the model is trained on, and the questions that measure its recall."""

from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple

from session_server.demo import corpus

TRAINING: Final = corpus.Mixture(overwrite=0.2, unknown=0.14, pseudo_word=0.2, pseudo_key=0.05)
"""More overwritten and more absent facts than `corpus.dialogue` has: the last errors to go."""


class Probe(NamedTuple):
    """Hold a history, and a question about one of the facts told in it."""

    history: tuple[corpus.Exchange, ...]
    question: corpus.Exchange


def recall_probe(seed: int, history_tokens: int, count_tokens: Callable[[str], int]) -> Probe:
    """Make a history of about a given length and a question about a fact in it.

    The fact is drawn evenly from those told, so it may lie anywhere in the history.

    Args:
        seed: see `dialogue`.
        history_tokens: the history is the longest that does not exceed this length, but
            at least the one turn that tells something.
        count_tokens: length of one message's content; a message costs two tokens more,
            for its role and its end.
    """
    corpus.require_evaluation_seed(seed)
    speaker = corpus.Speaker(Random(seed))
    history = [speaker.tell()]
    num_tokens = exchange_len(history[0], count_tokens)
    while True:
        question = speaker.ask_known()
        exchange = speaker.exchange()
        num_tokens += exchange_len(exchange, count_tokens)
        if num_tokens > history_tokens:
            return Probe(tuple(history), question)
        history.append(exchange)


def exchange_len(exchange: corpus.Exchange, count_tokens: Callable[[str], int]) -> int:
    """Return the tokens an exchange adds to a history: both texts, two roles, two ends."""
    return count_tokens(exchange.user) + count_tokens(exchange.assistant) + 4
