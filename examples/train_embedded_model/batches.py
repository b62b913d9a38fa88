"""Make training rows: dialogues as token ids of one length, with a loss on answers only."""

from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Final

import torch
from torch import Tensor

from examples.train_embedded_model import exercises, tokenizer
from session_server.demo import corpus

SYSTEM_SHARE: Final = 0.15
_SYSTEM_TEXTS: Final = (
    "You are a helpful assistant.",
    "You remember what the user tells you.",
    "Be brief.",
    "Answer in one sentence.",
)


@dataclass(frozen=True)
class Batch:
    """Hold rows of one length, without padding.

    Attributes:
        token_ids: [rows, length].
        chosen: [rows, length], the positions that predict a token of an answer.
        labels: [chosen], the tokens they predict.
        answer_of: [chosen], which answer of the batch that token belongs to.
        is_ask: [answers], whether the answer is to a question for a fact.
    """

    token_ids: Tensor
    chosen: Tensor
    labels: Tensor
    answer_of: Tensor
    is_ask: Tensor

    def shares_right(self, logits: Tensor) -> tuple[float, float]:
        """Return the share of answers with only most likely tokens: to questions, and of all."""
        wrong_tokens = torch.zeros(len(self.is_ask))
        wrong_tokens.index_add_(0, self.answer_of, (logits.argmax(-1) != self.labels).float())
        is_right = (wrong_tokens == 0).float()
        return is_right[self.is_ask].mean().item(), is_right.mean().item()


class BatchMaker:
    """Make batches from seeds; every row is a dialogue of its own."""

    def __init__(self, encoder: tokenizer.ContentEncoder, first_row: int) -> None:
        """Begin with row number `first_row`, so that a resumed run sees new rows."""
        self._encoder = encoder
        self._seeds = count(corpus.FIRST_TRAINING_SEED + 1 + first_row)

    def make(self, num_rows: int, length: int) -> Batch:
        """Make [num_rows, length] tokens; a row's last turn is cut where the row ends."""
        rows: list[list[int]] = []
        answers: list[list[int]] = []
        is_ask: list[bool] = []
        for _ in range(num_rows):
            ids, answer_of = self._row(length, is_ask)
            rows.append(ids[:length])
            answers.append(answer_of[:length])
        token_ids = torch.tensor(rows)
        next_answer = torch.tensor(answers)[:, 1:]
        chosen = torch.zeros_like(token_ids, dtype=torch.bool)
        chosen[:, :-1] = next_answer >= 0
        return Batch(
            token_ids=token_ids,
            chosen=chosen,
            labels=token_ids[:, 1:][chosen[:, :-1]],
            answer_of=next_answer[chosen[:, :-1]],
            is_ask=torch.tensor(is_ask),
        )

    def _row(self, length: int, is_ask: list[bool]) -> tuple[list[int], list[int]]:
        """Return ids and, per id, the number of the answer it belongs to or -1.

        Appends to `is_ask` for every answer it numbers.
        """
        random = Random(next(self._seeds))
        ids: list[int] = []
        answer_of: list[int] = []
        if random.random() < SYSTEM_SHARE:
            ids += self._encoder.message(tokenizer.SYSTEM_ID, random.choice(_SYSTEM_TEXTS))
            answer_of += [-1] * len(ids)
        for exchange in corpus.exchanges(random, exercises.TRAINING):
            asked = self._encoder.message(tokenizer.USER_ID, exchange.user)
            answered = self._encoder.message(tokenizer.ASSISTANT_ID, exchange.assistant)
            if len(ids) + len(asked) + 1 >= length:
                # Nothing of this answer would fit: fill up with the question alone.
                filling = (asked + answered)[: length - len(ids)]
                return ids + filling, answer_of + [-1] * len(filling)
            ids += asked + answered
            answer_of += [-1] * (len(asked) + 1) + [len(is_ask)] * (len(answered) - 1)
            is_ask.append(exchange.kind == "ask")
            if len(ids) >= length:
                break
        return ids, answer_of
