"""What the model is trained on and measured with never meet, and a probe can be answered."""

from random import Random

import pytest

from examples.train_embedded_model.batches import BatchMaker
from examples.train_embedded_model.exercises import exchange_len, recall_probe
from examples.train_embedded_model.tokenizer import ContentEncoder
from session_server.demo import corpus


def count_words(content: str) -> int:
    return len(content.split())


def test_training_draws_only_seeds_that_evaluation_refuses(
    monkeypatch: pytest.MonkeyPatch, encoder: ContentEncoder
) -> None:
    seeds: list[int] = []

    class Recorder(Random):
        def __init__(self, seed: int) -> None:
            seeds.append(seed)
            super().__init__(seed)

    monkeypatch.setattr("examples.train_embedded_model.batches.Random", Recorder)
    BatchMaker(encoder, first_row=0).make(num_rows=4, length=32)
    assert len(seeds) == 4
    assert min(seeds) >= corpus.FIRST_TRAINING_SEED


@pytest.mark.parametrize("seed", [-1, corpus.FIRST_TRAINING_SEED])
def test_seeds_of_training_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed must be in"):
        recall_probe(seed, 100, count_words)


@pytest.mark.parametrize("history_tokens", [1, 100, 1000])
def test_a_probe_asks_for_something_its_history_tells(history_tokens: int) -> None:
    for seed in range(20):
        history, question = recall_probe(seed, history_tokens, count_words)
        told = {e.assistant for e in history if e.kind == "tell"}
        assert f"Noted. {question.assistant}" in told


def test_the_history_of_a_probe_fills_the_length_asked_for() -> None:
    for seed in range(20):
        history, _ = recall_probe(seed, 1000, count_words)
        num_tokens = sum(exchange_len(e, count_words) for e in history)
        assert 920 < num_tokens <= 1000
