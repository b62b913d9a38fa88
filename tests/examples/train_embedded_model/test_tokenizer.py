"""The tokenizer and the chat format of the shipped checkpoint."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from examples.train_embedded_model import tokenizer
from examples.train_embedded_model.tokenizer import ContentEncoder
from session_server.demo import MODEL_DIR
from session_server.demo.corpus import dialogue

ENCODER = ContentEncoder.load(MODEL_DIR)


@pytest.fixture(scope="module")
def published() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=300)
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert ENCODER.decode(ENCODER.encode(text)) == text


@given(st.text(max_size=30), st.sampled_from(tokenizer.SPECIAL_TOKENS), st.text(max_size=30))
@settings(deadline=None, max_examples=200)
def test_text_never_becomes_control_tokens(before: str, special: str, after: str) -> None:
    assert min(ENCODER.encode(before + special + after)) >= len(tokenizer.SPECIAL_TOKENS)


def test_every_byte_and_every_digit_is_a_token(encoder: ContentEncoder) -> None:
    every_byte = [encoder.encode(bytes([byte]).decode("latin-1")) for byte in range(256)]
    assert len({token_id for ids in every_byte for token_id in ids}) >= 128
    assert all(encoder.encode(digit) != [] for digit in "0123456789")
    assert encoder.count("4821") == 4


def test_special_tokens_have_the_first_ids() -> None:
    published = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    assert [published.token_to_id(token) for token in tokenizer.SPECIAL_TOKENS] == list(range(5))


def test_the_template_renders_roles_contents_and_ends_and_nothing_else(published: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    rendered = published.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|system|>Be brief.<|end|><|user|> Hi\n<|end|><|assistant|>Hello!<|end|>"
        "<|user|>Bye<|end|><|assistant|>"
    )


def test_training_ids_equal_those_of_the_rendered_template(
    published: Any, encoder: ContentEncoder
) -> None:
    messages = []
    ids: list[int] = []
    for exchange in dialogue(5, 30).turns:
        messages.append({"role": "user", "content": exchange.user})
        messages.append({"role": "assistant", "content": exchange.assistant})
        ids += encoder.message(tokenizer.USER_ID, exchange.user)
        ids += encoder.message(tokenizer.ASSISTANT_ID, exchange.assistant)
    rendered = published.apply_chat_template(messages, tokenize=False)
    assert published(rendered, add_special_tokens=False)["input_ids"] == ids


def test_the_published_tokenizer_ends_and_pads_as_trained(published: Any) -> None:
    assert published.eos_token_id == tokenizer.END_ID
    assert published.pad_token_id == tokenizer.PADDING_ID
    assert published.bos_token_id is None
    assert published.convert_tokens_to_ids("<|assistant|>") == tokenizer.ASSISTANT_ID


def test_the_encoder_forgets_rather_than_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContentEncoder, "MAX_REMEMBERED", 2)
    encoder = ContentEncoder.load(MODEL_DIR)
    first = encoder.encode("one")
    assert [encoder.encode(text) for text in ("two", "three", "one")][-1] == first
