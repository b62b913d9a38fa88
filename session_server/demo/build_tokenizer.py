"""Write the demo model's tokenizer: `python -m session_server.demo.build_tokenizer`.

Run it once before training. The tokenizer is a function of the corpus alone.
"""

import argparse
import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

from session_server.demo import MODEL_DIR, chat, corpus
from session_server.demo.network import Shape

NUM_EXCHANGES: Final = 60_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="checkpoint directory")
    write_tokenizer(parser.parse_args().out)


def write_tokenizer(model_dir: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    made = islice(
        corpus.exchanges(Random(corpus.FIRST_TRAINING_SEED), corpus.TRAINING), NUM_EXCHANGES
    )
    texts = [text for exchange in made for text in (exchange.user, exchange.assistant)]
    tokenizer = chat.train_tokenizer(texts, Shape().vocab_size)
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    (model_dir / "chat_template.jinja").write_text(chat.CHAT_TEMPLATE, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": chat.SPECIAL_TOKENS[chat.END_ID],
        "pad_token": chat.SPECIAL_TOKENS[chat.PADDING_ID],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (model_dir / "tokenizer_config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
