from __future__ import annotations

import json
from pathlib import Path

import pytest

from session_server.core.errors import InvalidRequest, TokenizeFailed
from session_server.models.errors import ModelError
from session_server.models.files import MAX_CONFIG_BYTES
from session_server.text import model_files
from session_server.text.model_files import (
    ModelFilesError,
    read_model_files,
)
from session_server.text.tokenizer import LONG_TEXT_CHARS, check_token_ids
from tests.text.local_text import load_local_text
from tests.text.tiny_models import CHATML, write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path, "chatml")


def edit(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(value | changes))


def test_end_tokens_are_those_of_generation_config_and_tokenizer(folder: Path) -> None:
    tokenizer = load_local_text(folder).tokenizer
    edit(folder / "generation_config.json", eos_token_id=tokenizer.token_to_id("<|eot_id|>"))
    wanted = {tokenizer.token_to_id("<|eot_id|>"), tokenizer.token_to_id("<|im_end|>")}
    assert load_local_text(folder).eos_token_ids == wanted


def test_the_model_config_names_end_tokens_where_the_generation_config_is_silent(
    folder: Path,
) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=[7, 8])
    assert {7, 8} < load_local_text(folder).eos_token_ids


def test_the_template_file_comes_before_the_config(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="from config")
    assert read_model_files(folder).chat_template == CHATML
    (folder / "chat_template.jinja").unlink()
    assert read_model_files(folder).chat_template == "from config"
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert read_model_files(folder).chat_template == "d"
    edit(folder / "tokenizer_config.json", chat_template=named[:1])
    assert read_model_files(folder).chat_template == "t"
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert load_local_text(folder).chat is None


def test_a_template_is_bounded_in_size(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text("x" * MAX_CONFIG_BYTES)
    assert len(read_model_files(folder).chat_template or "") == MAX_CONFIG_BYTES
    path.write_text("x" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ModelError, match="larger than 1,048,576 bytes"):
        read_model_files(folder)
    path.unlink()
    edit(folder / "tokenizer_config.json", chat_template="x" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ModelFilesError, match="chat template is larger than"):
        read_model_files(folder)


def test_a_tokenizer_is_bounded_in_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = (folder / "tokenizer.json").stat().st_size
    monkeypatch.setattr(model_files, "MAX_TOKENIZER_BYTES", num_bytes)
    assert read_model_files(folder).tokenizer == folder / "tokenizer.json"
    monkeypatch.setattr(model_files, "MAX_TOKENIZER_BYTES", num_bytes - 1)
    with pytest.raises(ModelFilesError, match=f"larger than {num_bytes - 1:,} bytes"):
        read_model_files(folder)


def test_sampling_defaults_come_from_the_generation_config(folder: Path) -> None:
    edit(folder / "generation_config.json", temperature=0.6, top_k=20, top_p=0.9, do_sample=True)
    sampling = load_local_text(folder).default_sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.9)
    edit(folder / "generation_config.json", do_sample=False)
    assert load_local_text(folder).default_sampling.temperature == 0.0
    edit(folder / "generation_config.json", top_p=7)
    with pytest.raises(ModelFilesError):
        load_local_text(folder)


def test_tokens_declared_special_elsewhere_are_special(folder: Path) -> None:
    edit(
        folder / "tokenizer_config.json",
        added_tokens_decoder={
            "9": {"content": "<think>", "special": True},
            "10": {"special": True},
            "11": "no token",
        },
        additional_special_tokens=["<not in the vocabulary>"],
        extra_special_tokens={"end_of_thinking": "</think>"},
    )
    tokenizer = load_local_text(folder).tokenizer
    for text in ("<think>", "</think>"):
        assert tokenizer.token_to_id(text) in tokenizer.special_ids
        assert not set(tokenizer.encode_content(text)) & tokenizer.special_ids
        assert tokenizer.encode_control(text) == [tokenizer.token_to_id(text)]
    assert tokenizer.token_to_id("<not in the vocabulary>") is None


def test_a_word_of_the_vocabulary_can_be_declared_special(folder: Path) -> None:
    word = next(text for text in load_local_text(folder).tokenizer.vocabulary if text.isalpha())
    edit(folder / "tokenizer_config.json", additional_special_tokens=[word])
    tokenizer = load_local_text(folder).tokenizer
    assert tokenizer.token_to_id(word) in tokenizer.special_ids
    assert tokenizer.encode_control(word) == [tokenizer.token_to_id(word)]


def test_what_a_normalizer_makes_a_declared_word_is_not_that_word(folder: Path) -> None:
    vocabulary = load_local_text(folder).tokenizer.vocabulary
    words = sorted(text for text in vocabulary if text.isascii() and text.islower())
    word, longer = next(
        (one, other) for one in words for other in words if other[:-1] == one and len(one) > 1
    )
    edit(folder / "tokenizer_config.json", additional_special_tokens=[word])
    edit(folder / "tokenizer.json", normalizer={"type": "NFKC"})
    tokenizer = load_local_text(folder).tokenizer
    assert tokenizer.encode_control(longer)[0] == tokenizer.token_to_id(word)
    full_width = "".join(chr(ord(letter) - ord("a") + 0xFF41) for letter in longer)
    assert tokenizer.encode_control(full_width) == [tokenizer.token_to_id(longer)]


def test_truncation_and_padding_of_the_file_are_ignored(folder: Path) -> None:
    path = folder / "tokenizer.json"
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    truncation = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    edit(path, truncation=truncation, padding=padding)
    tokenizer = load_local_text(folder).tokenizer
    assert len(tokenizer.encode_content("abcdefgh")) >= 5
    assert len(tokenizer.encode_content("a")) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "{"),
        ("generation_config.json", "[" * 100_000),
        ("chat_template.jinja", "{% endfor %}"),
    ],
)
def test_malformed_files_say_so(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=name if name != "chat_template.jinja" else "template"):
        load_local_text(folder)


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"no tokenizer\.json"):
        load_local_text(tmp_path)


def test_long_text_is_encoded_like_short_text(folder: Path) -> None:
    tokenizer = load_local_text(folder).tokenizer
    line = "What is 12 + 30? <|im_end|>\n"
    for encode in (tokenizer.encode_content, tokenizer.encode_control):
        assert encode(line * 400) == encode(line) * 400
    with pytest.raises(TokenizeFailed):
        tokenizer.encode_content("a\ud800" * LONG_TEXT_CHARS)


def test_lone_surrogates_are_refused(folder: Path) -> None:
    tokenizer = load_local_text(folder).tokenizer
    for encode in (tokenizer.encode_content, tokenizer.encode_control):
        with pytest.raises(TokenizeFailed):
            encode("a\ud800")


@pytest.mark.parametrize("wrong", [-1, 400, 1 << 31, -(1 << 31)])
def test_ids_outside_the_vocabulary_are_named(wrong: int) -> None:
    check_token_ids([0, 399], 400)
    check_token_ids([], 400)
    with pytest.raises(InvalidRequest, match=f"{wrong} is outside"):
        check_token_ids([0, wrong], 400)


def test_the_embedded_model_s_text_side_loads() -> None:
    from session_server import demo

    folder = Path(demo.__file__).parent / "model"
    model = load_local_text(folder)
    assert model.chat is not None
    assert model.chat.traits.can_append
    assert model.tokenizer.special_ids >= model.eos_token_ids
