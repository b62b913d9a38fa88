"""Encode the embedded model's chat format, and train its tokenizer.

A message is `<|role|>` + content + `<|end|>` with nothing between or before. Contents are
encoded one by one with special tokens switched off, exactly as the server does: the tokens
of a message do not depend on its neighbors, and user text cannot become control tokens.
"""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.train_embedded_model.exercises import TRAINING
from examples.train_embedded_model.network import Shape
from session_server.demo import corpus

NUM_EXCHANGES: Final = 60_000
"""Turns that the tokenizer is learned from."""

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PADDING_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, END_ID = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}\n"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}\n"
)


def write_tokenizer(model_dir: Path, *, num_exchanges: int = NUM_EXCHANGES) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    The result is a function of the corpus and `num_exchanges` alone.
    """
    made = islice(corpus.exchanges(Random(corpus.FIRST_TRAINING_SEED), TRAINING), num_exchanges)
    texts = [text for exchange in made for text in (exchange.user, exchange.assistant)]
    tokenizer = _train_tokenizer(texts, Shape().vocab_size)
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    (model_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[END_ID],
        "pad_token": SPECIAL_TOKENS[PADDING_ID],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (model_dir / "tokenizer_config.json").write_text(text, encoding="utf-8")


class ContentEncoder:
    """Encode single message contents, and remember those seen before."""

    MAX_REMEMBERED: Final = 50_000

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._remembered: dict[str, list[int]] = {}

    @classmethod
    def load(cls, model_dir: Path) -> "ContentEncoder":
        """Read the tokenizer of a checkpoint."""
        return cls(Tokenizer.from_file(str(model_dir / "tokenizer.json")))

    def encode(self, content: str) -> list[int]:
        """Return the token ids of one content; the caller must not change the list."""
        ids = self._remembered.get(content)
        if ids is None:
            if len(self._remembered) >= self.MAX_REMEMBERED:
                self._remembered.clear()
            ids = self._tokenizer.encode(content, add_special_tokens=False).ids
            self._remembered[content] = ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def count(self, content: str) -> int:
        """Return the number of tokens of one content."""
        return len(self.encode(content))

    def message(self, role_id: int, content: str) -> list[int]:
        """Return the token ids of one whole message."""
        return [role_id, *self.encode(content), END_ID]


def _train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE in which every byte and every single digit is a token.

    Digits stay single so that counting and codes are about digits, not about chunks of
    them that the corpus happens to contain.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
