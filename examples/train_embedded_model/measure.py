"""Measure what the model recalls.

Greedy answers on seeds that training never saw. Three tables: recall at the end of a true
history of a given length; recall along long dialogues whose history holds the model's own
answers, as on the server; and all kinds of turns in short dialogues, own answers too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.train_embedded_model import exercises, tokenizer
from examples.train_embedded_model.network import Network, Shape
from session_server.demo import corpus

HISTORY_LENS: Final = (128, 512, 1024, 1536, 2048, 3072)
SHORT_TURNS: Final = (6, 7, 8, 9, 10)
MAX_ANSWER_LEN: Final = 96


class Spoken(NamedTuple):
    """Record a turn as the model answered it, after `history_len` tokens."""

    exchange: corpus.Exchange
    answer: str
    history_len: int

    def is_right(self) -> bool:
        """Return whether the answer is the one that the exchange asks for."""
        return corpus.is_right(self.answer, self.exchange.assistant)


class Respondent:
    """Answer greedily with the model, and keep what it said as history."""

    def __init__(self, model_dir: Path) -> None:
        self.encoder = tokenizer.ContentEncoder.load(model_dir)
        self.network = Network(Shape())
        weights = load_file(model_dir / "model.safetensors")
        self.network.load_state_dict({name: value.float() for name, value in weights.items()})
        self.network.requires_grad_(False)

    def answer(self, history: Sequence[corpus.Exchange], question: corpus.Exchange) -> str:
        """Answer one question after a history taken as given."""
        said = [token_id for exchange in history for token_id in self._ids(exchange)]
        asked, draft = self._asked(question), self._draft(question)
        greedy = self._predictions(said + asked + draft)[-len(draft) - 1 : -1]
        return question.assistant if greedy.tolist() == draft else self._generate(said + asked)

    def converse(self, turns: Sequence[corpus.Exchange]) -> list[Spoken]:
        """Answer the user turns one after another, each after its own earlier answers.

        All right answers are checked in one pass, as drafts: where greedy decoding would
        have said the same, nothing needs to be decoded. From the first turn that differs
        on, the history is another one and the rest is checked again.
        """
        spoken: list[Spoken] = []
        said: list[int] = []
        while len(spoken) < len(turns):
            rest = turns[len(spoken) :]
            drafted = said + [token_id for exchange in rest for token_id in self._ids(exchange)]
            greedy = self._predictions(drafted).tolist()
            for exchange in rest:
                draft = self._draft(exchange)
                history_len = len(said)
                said += self._asked(exchange)
                agrees = greedy[len(said) - 1 : len(said) - 1 + len(draft)] == draft
                answer = exchange.assistant if agrees else self._generate(said)
                said += [*self.encoder.encode(answer), tokenizer.END_ID]
                spoken.append(Spoken(exchange, answer, history_len))
                if not agrees:
                    break
        return spoken

    def _asked(self, exchange: corpus.Exchange) -> list[int]:
        """Return the user's message and the prompt for an answer."""
        return [*self.encoder.message(tokenizer.USER_ID, exchange.user), tokenizer.ASSISTANT_ID]

    def _draft(self, exchange: corpus.Exchange) -> list[int]:
        """Return the right answer and its end."""
        return [*self.encoder.encode(exchange.assistant), tokenizer.END_ID]

    def _ids(self, exchange: corpus.Exchange) -> list[int]:
        return self._asked(exchange) + self._draft(exchange)

    def _generate(self, ids: Sequence[int]) -> str:
        extended = list(ids)
        while len(extended) - len(ids) < MAX_ANSWER_LEN:
            token_id = int(self._predictions(extended, last_only=True)[-1])
            if token_id == tokenizer.END_ID:
                break
            extended.append(token_id)
        return self.encoder.decode(extended[len(ids) :])

    def _predictions(self, ids: Sequence[int], *, last_only: bool = False) -> Tensor:
        """Return the most likely next token after every id, or after the last: [positions]."""
        token_ids = torch.tensor([ids])
        chosen = torch.ones_like(token_ids, dtype=torch.bool)
        if last_only:
            chosen[:, :-1] = False
        logits: Tensor = self.network(token_ids, chosen)
        return logits.argmax(-1)


def recall_at(respondent: Respondent, history_len: int, seeds: Sequence[int]) -> list[Spoken]:
    """Ask one question after a true history, per seed."""
    spoken = []
    for seed in seeds:
        probe = exercises.recall_probe(seed, history_len, respondent.encoder.count)
        answer = respondent.answer(probe.history, probe.question)
        spoken.append(Spoken(probe.question, answer, history_len))
    return spoken


def share_right(spoken: Sequence[Spoken]) -> float:
    """Return the share of turns answered right; `spoken` must not be empty."""
    return sum(turn.is_right() for turn in spoken) / len(spoken)


def score(spoken: Sequence[Spoken]) -> str:
    """Format the share of turns answered right, and their number."""
    return f"{share_right(spoken):.4f}  of {len(spoken)}" if spoken else "none"


def short_dialogue(seed: int) -> tuple[corpus.Exchange, ...]:
    """Return the 6 to 10 turns of a seed's dialogue."""
    return corpus.dialogue(seed, SHORT_TURNS[seed % len(SHORT_TURNS)]).turns


def long_dialogue(respondent: Respondent, seed: int, max_len: int) -> tuple[corpus.Exchange, ...]:
    """Return the turns of a seed's dialogue that fit into `max_len` tokens."""
    turns = corpus.dialogue(seed, max_len // 8).turns
    total = 0
    for index, exchange in enumerate(turns):
        count = respondent.encoder.count
        total += exercises.exchange_len(exchange, count)
        if total > max_len:
            return turns[:index]
    return turns
