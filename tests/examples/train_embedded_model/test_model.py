"""The shipped checkpoint, read by transformers: the same logits as in training, and right."""

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, Qwen3ForCausalLM

from examples.train_embedded_model import tokenizer
from examples.train_embedded_model.exercises import recall_probe
from examples.train_embedded_model.measure import (
    Respondent,
    long_dialogue,
    share_right,
)
from examples.train_embedded_model.network import Network, Shape
from examples.train_embedded_model.tokenizer import ContentEncoder
from examples.train_embedded_model.train import model_config
from session_server.demo import MODEL_DIR, corpus

SEED = 20_000


@pytest.fixture(scope="module")
def published() -> Any:
    return Qwen3ForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


@pytest.fixture(scope="module")
def respondent() -> Respondent:
    return Respondent(MODEL_DIR)


def ids_of(encoder: ContentEncoder, turns: tuple[corpus.Exchange, ...]) -> list[int]:
    return [
        token_id
        for exchange in turns
        for token_id in (
            *encoder.message(tokenizer.USER_ID, exchange.user),
            *encoder.message(tokenizer.ASSISTANT_ID, exchange.assistant),
        )
    ]


def test_the_configuration_is_the_one_training_writes() -> None:
    assert json.loads((MODEL_DIR / "config.json").read_text()) == model_config(Shape())


def test_transformers_reads_every_size_from_the_configuration() -> None:
    config = AutoConfig.from_pretrained(MODEL_DIR)
    assert config.model_type == "qwen3"
    assert config.rope_parameters["rope_theta"] == Shape().rope_theta
    assert config.max_position_embeddings == 4096
    assert config.tie_word_embeddings


def test_weights_are_half_precision_and_a_few_megabytes() -> None:
    path = MODEL_DIR / "model.safetensors"
    assert path.stat().st_size < 5_000_000
    with safe_open(path, framework="pt") as tensors:
        kinds = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    assert kinds == {"F16"}


def test_logits_equal_those_of_transformers(
    published: Any, respondent: Respondent, encoder: ContentEncoder
) -> None:
    token_ids = torch.tensor([ids_of(encoder, corpus.dialogue(SEED, 40).turns)])
    with torch.no_grad():
        expected = published(token_ids, use_cache=False).logits[0]
        everywhere = torch.ones_like(token_ids, dtype=torch.bool)
        logits = respondent.network(token_ids, everywhere)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_transformers_answers_a_short_dialogue_right(
    published: Any, encoder: ContentEncoder
) -> None:
    ids: list[int] = []
    for user, expected in (
        ("My name is Greta.", "Noted. Your name is Greta."),
        ("The garage code is 482.", "Noted. The garage code is 482."),
        ("What is my city?", "You have not told me your city."),
        ("What is the garage code?", "The garage code is 482."),
        ("Why is the sky blue?", corpus.REFUSAL),
        ("What is my name?", "Your name is Greta."),
    ):
        ids += [*encoder.message(tokenizer.USER_ID, user), tokenizer.ASSISTANT_ID]
        made = published.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=24
        )[0].tolist()
        assert made[-1] == tokenizer.END_ID
        assert encoder.decode(made[len(ids) :]) == expected
        ids = made


def test_every_kind_of_turn_is_answered_right_in_short_dialogues(respondent: Respondent) -> None:
    spoken = [
        turn
        for seed in range(SEED, SEED + 40)
        for turn in respondent.converse(corpus.dialogue(seed, 6 + seed % 5).turns)
    ]
    assert share_right(spoken) >= 0.99


def test_a_long_dialogue_goes_right_on_its_own_answers(respondent: Respondent) -> None:
    spoken = respondent.converse(long_dialogue(respondent, SEED, 1024))
    assert share_right(spoken) >= 0.97


def test_without_the_history_the_model_says_it_was_not_told(respondent: Respondent) -> None:
    for seed in range(SEED, SEED + 10):
        _, question = recall_probe(seed, 256, respondent.encoder.count)
        answer = respondent.answer([], question)
        assert answer.startswith("You have not told me"), question


def test_a_wrong_answer_stays_in_the_history_of_later_turns(encoder: ContentEncoder) -> None:
    """An untrained network is always wrong; what it says must be what later turns see."""
    torch.manual_seed(0)
    respondent = Respondent(MODEL_DIR)
    respondent.network.load_state_dict(Network(Shape()).state_dict())
    turns = corpus.dialogue(SEED, 2).turns
    spoken = respondent.converse(turns)
    lengths = [turn.history_len for turn in spoken]
    first = encoder.message(tokenizer.USER_ID, turns[0].user)
    said = [*first, tokenizer.ASSISTANT_ID, *encoder.encode(spoken[0].answer), tokenizer.END_ID]
    assert not spoken[0].is_right()
    assert lengths == [0, len(said)]
