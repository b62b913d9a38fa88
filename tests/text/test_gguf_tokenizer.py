"""Tokenizers from the metadata of GGUF files do what those that they were made from do."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.tokenization_utils_base import generate_merges

from session_server.demo import MODEL_DIR
from session_server.models.errors import ModelError
from session_server.text.model_files import read_model_files
from session_server.text.tokenizer import Tokenizer
from tests.oracle.gguf_tokens import describe_byte_level, texts_and_types
from tests.text.local_text import load_local_text
from tests.text.tiny_models import CHATML, SPECIALS, write_model

TEXTS = (
    "",
    " ",
    "Hello, world!  It's   me — I'LL be there; they'Ve gone.\n\n\tTabs\r\nand lines \n \n",
    "def f(x):\n    return {'a': [1, 23, 456, 7890], \"b\": x ** 2}  # comment\n\n\nclass A: pass",
    "Ünïcode: Žluťoučký kůň, ελληνικά, русский текст, עברית, العربية, हिन्दी में, ไทย",
    "你好世界\uff0c这是一个测试。日本語のテキスト、한국어 텍스트 1234\uff15\uff16",
    "e\u0301 decomposed, \ufb01 ligature, \u00a0 no-break, \U0001f9d1\u200d\U0001f680 emoji",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><think>hm</think> <s>x</s> <|im_start",
    "CamelCaseWords ALLCAPS mixedCASE 3.14159 1,000,000 x=1;y=2 a/b\\c ...!!! ~~~ $5 100%",
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES: dict[str, Any] = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
"""As the `tokenizer.json` of these models have them."""


def by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "qwen2": lambda: by_pattern(QWEN2),
    "llama-bpe": lambda: by_pattern(LLAMA3),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
}


def write_tokens(path: Path, describe: Callable[[GGUFWriter], None]) -> Path:
    """A GGUF file without tensors."""
    writer = GGUFWriter(path, "llama")
    describe(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def trained(directory: Path, pre: str) -> Path:
    """The text side of a checkpoint with this pre-tokenizer."""
    directory.mkdir()
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    for text in ("<think>", "</think>"):
        tokenizer.add_tokens([AddedToken(text, normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<|vision|>", normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return directory


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_tokenizers_split_every_text_alike(pre: str, tmp_path: Path) -> None:
    directory = trained(tmp_path / "hf", pre)
    path = write_tokens(tmp_path / "m.gguf", lambda to: describe_byte_level(to, directory, pre))
    ours = Tokenizer(read_model_files(path).tokenizer)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode_control(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(
            ids, clean_up_tokenization_spaces=False
        )
    assert {text: token.token_id for text, token in ours.special_tokens.items()} == {
        token.content: token_id
        for token_id, token in theirs.added_tokens_decoder.items()
        if token.special
    }


@pytest.mark.parametrize("begins_with_space", [True, False])
def test_sentence_pieces_merge_by_their_scores(begins_with_space: bool, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    steps = [normalizers.Prepend("\u2581")] if begins_with_space else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(
        [word for text in TEXTS[2:6] for word in text.split(" ")], trainer
    )
    vocab = tokenizer.get_vocab()
    scores = {text: float(-index) for text, index in vocab.items()}
    merges = generate_merges(vocab, scores, skip_tokens=names)
    tokenizer.model = models.BPE(vocab, merges, **PIECES)
    ends = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names[:3]])
    tokenizer.no_padding()

    def describe(writer: GGUFWriter) -> None:
        texts = sorted(vocab, key=lambda text: vocab[text])
        types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(texts)
        writer.add_token_scores([scores[text] for text in texts])
        writer.add_token_types(types + [TokenType.NORMAL] * (len(texts) - len(types)))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(begins_with_space)

    ours = Tokenizer(read_model_files(write_tokens(tmp_path / "m.gguf", describe)).tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ours.encode_control(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == tokenizer.decode(
            ids, skip_special_tokens=False
        )
    assert ours.encode_control("a", add_bos=True)[0] == 1, "this kind adds a BOS if nothing is said"


def test_a_file_has_the_template_and_the_ends_of_answers(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "hf", "chatml")

    def describe(writer: GGUFWriter) -> None:
        describe_byte_level(writer, directory, "gpt-2")
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    text = load_local_text(write_tokens(tmp_path / "m.gguf", describe))
    same = load_local_text(directory)
    assert text.chat is not None
    assert text.chat_error is None
    ends = {
        text.tokenizer.token_to_id(end) for end in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")
    }
    assert text.eos_token_ids == ends
    assert text.tokenizer.vocabulary == same.tokenizer.vocabulary
    assert (text.default_sampling.temperature, text.default_sampling.top_k) == (0.5, 20)
    assert read_model_files(tmp_path / "m.gguf").chat_template == CHATML


def test_a_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "hf", "llama3")

    def write(name: str, pre: str, adds: bool | None) -> Tokenizer:
        def describe(writer: GGUFWriter) -> None:
            describe_byte_level(writer, directory, pre)
            if adds is not None:
                writer.add_add_bos_token(adds)

        return Tokenizer(read_model_files(write_tokens(tmp_path / name, describe)).tokenizer)

    bos = write("a.gguf", "gpt-2", True).token_to_id("<s>")
    for pre, adds, expected in (
        ("gpt-2", True, True),
        ("gpt-2", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ):
        ids = write("b.gguf", pre, adds).encode_control("Hi", add_bos=True)
        assert (ids[0] == bos) == expected


def test_the_embedded_models_tokenizer_survives_the_way_into_a_file(tmp_path: Path) -> None:
    path = write_tokens(
        tmp_path / "m.gguf", lambda writer: describe_byte_level(writer, MODEL_DIR, "smollm")
    )
    ours, theirs = (Tokenizer(read_model_files(p).tokenizer) for p in (path, MODEL_DIR))
    for text in TEXTS:
        assert ours.encode_control(text) == theirs.encode_control(text)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", "bert", "known: gpt2, llama"),
        ("pre", "no-such", "'no-such' is not implemented; known: .*qwen2"),
        ("merges", None, "lacks the list tokenizer.ggml.merges"),
        ("tokens", None, "lacks the list tokenizer.ggml.tokens"),
        ("token_type", [1], "1 types of"),
        ("merges", ["no such"], "not a tokenizer"),
    ],
)
def test_tokenizers_that_cannot_be_read_are_named(
    key: str, value: object, words: str, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "hf", "chatml")
    content = json.loads((directory / "tokenizer.json").read_text())
    texts, types = texts_and_types(content)
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    fields: dict[str, object] = {"model": "gpt2", "pre": "gpt-2", "tokens": texts}
    fields |= {"token_type": types, "merges": merges, key: value}

    def describe(writer: GGUFWriter) -> None:
        for name, given in fields.items():
            if isinstance(given, str):
                writer.add_string(f"tokenizer.ggml.{name}", given)
            elif isinstance(given, list):
                writer.add_array(f"tokenizer.ggml.{name}", given)

    with pytest.raises(ModelError, match=words):
        load_local_text(write_tokens(tmp_path / "m.gguf", describe))


def test_a_damaged_tokenizer_is_one_or_an_error_of_ours(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "hf", "chatml")
    path = write_tokens(
        tmp_path / "m.gguf", lambda writer: describe_byte_level(writer, directory, "gpt-2")
    )
    content = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(3):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load_local_text(path).tokenizer.encode_control("Hello, world!")
        except ModelError:
            refused += 1
    assert 20 < refused < 200
