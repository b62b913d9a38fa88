"""Load everything about text that comes with a model, once, from its directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from session_server.core.sampling import SamplingParams
from session_server.text.chat_encoder import ChatEncoder
from session_server.text.chat_template import TemplateSource
from session_server.text.model_files import ModelFiles, read_model_files
from session_server.text.rendering import (
    LocalRenderer,
    TemplateRenderer,
    run_to_end,
    run_to_end_async,
)
from session_server.text.template_worker import RenderLimits, TemplateWorker
from session_server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """Hold the tokenizer and the end tokens of the checkpoint; the engine needs no more.

    `eos_token_ids`: union of the generation config's and the tokenizer's. `bos_token_id` is
    stripped from the start of appended raw inputs.
    """

    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    bos_token_id: int | None


@dataclass(frozen=True, slots=True)
class ModelText(ModelTokens):
    """Hold the tokenizer, chat template and default sampling of a checkpoint.

    `chat` is None for a checkpoint without a chat template: it accepts text and token inputs only.
    `chat_error` is why not even a plain conversation can be rendered, None if it can.
    """

    chat: ChatEncoder | None
    chat_error: str | None
    default_sampling: SamplingParams

    async def close(self) -> None:
        """Close the renderer of the chat template."""
        if self.chat is not None:
            await self.chat.renderer.close()


def load_model_tokens(model_dir: Path) -> ModelTokens:
    """Read the tokenizer and the configuration files beside it; do not run the chat template.

    Raises:
        ModelFilesError: a file is missing or malformed.
    """
    return _tokens_of(read_model_files(model_dir))


def load_local_text(model_dir: Path) -> ModelText:
    """Load everything, and run the chat template in this process; see `LocalRenderer`.

    Raises:
        ModelFilesError: a file is missing or malformed, or the template does not compile.
    """
    files = read_model_files(model_dir)
    tokens, source = _tokens_of(files), _template_of(files)
    if source is None:
        return _text_of(files, tokens, None, None)
    chat = ChatEncoder(tokens.tokenizer, LocalRenderer(source))
    return _text_of(files, tokens, chat, run_to_end(chat.check_append(), chat.renderer))


async def load_model_text(model_dir: Path, *, limits: RenderLimits | None = None) -> ModelText:
    """Load everything, and run the chat template in a process of its own; close the result.

    Raises:
        ModelFilesError: a file is missing or malformed, or the template does not compile.
    """
    files = read_model_files(model_dir)
    tokens, source = _tokens_of(files), _template_of(files)
    if source is None:
        return _text_of(files, tokens, None, None)
    renderer: TemplateRenderer = await TemplateWorker.start(source, limits)
    chat = ChatEncoder(tokens.tokenizer, renderer)
    return _text_of(files, tokens, chat, await run_to_end_async(chat.check_append(), renderer))


def _tokens_of(files: ModelFiles) -> ModelTokens:
    tokenizer = Tokenizer(files.tokenizer_path, special_texts=files.special_tokens)
    named = files.named_tokens
    eos_id = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return ModelTokens(
        tokenizer=tokenizer,
        eos_token_ids=files.eos_token_ids | ({eos_id} if eos_id is not None else set()),
        bos_token_id=tokenizer.token_to_id(named["bos_token"]) if "bos_token" in named else None,
    )


def _template_of(files: ModelFiles) -> TemplateSource | None:
    if files.chat_template is None:
        return None
    return TemplateSource(files.chat_template, dict(files.named_tokens))


def _text_of(
    files: ModelFiles,
    tokens: ModelTokens,
    chat: ChatEncoder | None,
    chat_error: str | None,
) -> ModelText:
    return ModelText(
        tokenizer=tokens.tokenizer,
        eos_token_ids=tokens.eos_token_ids,
        bos_token_id=tokens.bos_token_id,
        chat=chat,
        chat_error=chat_error,
        default_sampling=files.default_sampling,
    )
