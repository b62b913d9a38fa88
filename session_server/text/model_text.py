"""Everything about text that comes with a model, loaded once from its directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from session_server.core.sampling import SamplingParams
from session_server.text.chat_encoder import ChatEncoder
from session_server.text.chat_template import ChatTemplate
from session_server.text.model_files import read_model_files
from session_server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """Tokenizer, chat template and what the checkpoint says of endings and sampling.

    `chat` is None for a checkpoint without a chat template: it takes text and token inputs only.
    `eos_token_ids`: union of the generation config's and the tokenizer's. `bos_token_id` is
    stripped from the start of appended raw inputs.
    """

    tokenizer: Tokenizer
    chat: ChatEncoder | None
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    default_sampling: SamplingParams


def load_model_text(model_dir: Path) -> ModelText:
    """Read tokenizer.json, tokenizer_config.json, generation_config.json and the chat template.

    Raises:
        ModelFilesError: a file is missing or malformed.
    """
    files = read_model_files(model_dir)
    tokenizer = Tokenizer(files.tokenizer_path, special_texts=files.special_tokens)
    chat = None
    if files.chat_template is not None:
        template = ChatTemplate(files.chat_template, named_tokens=files.named_tokens)
        chat = ChatEncoder(tokenizer, template)
    named = files.named_tokens
    eos_id = tokenizer.id_of(named["eos_token"]) if "eos_token" in named else None
    return ModelText(
        tokenizer=tokenizer,
        chat=chat,
        eos_token_ids=files.eos_token_ids | ({eos_id} if eos_id is not None else set()),
        bos_token_id=tokenizer.id_of(named["bos_token"]) if "bos_token" in named else None,
        default_sampling=files.default_sampling,
    )
