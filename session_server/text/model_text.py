"""Load everything about text that comes with a model, once, from its directory."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from session_server.core.errors import ServerBusy
from session_server.core.sampling import SamplingParams
from session_server.text.answer_format import AnswerFormat
from session_server.text.chat_encoder import ChatEncoder
from session_server.text.chat_template import TemplateSource
from session_server.text.grammar_worker import GrammarWorker
from session_server.text.model_files import ModelFiles, ModelFilesError, read_model_files
from session_server.text.rendering import TemplateRenderer, run_to_end
from session_server.text.template_worker import TemplateWorker
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
    `answer_format`: how its answers think and call tools, and `markup_ids` the special tokens in
    which they do. `grammars` finds out what answers can be held to. `fingerprint` is equal for
    models whose token ids, end tokens and template are: what a conversation goes on with.
    """

    chat: ChatEncoder | None
    chat_error: str | None
    answer_format: AnswerFormat
    markup_ids: frozenset[int]
    default_sampling: SamplingParams
    grammars: GrammarWorker
    fingerprint: bytes

    @property
    def takes_tools(self) -> bool:
        """Return whether the chat template writes tools."""
        return self.chat is not None and self.chat.traits.takes_tools

    async def close(self) -> None:
        """Close the renderer of the chat template, and what checks grammars."""
        await self.grammars.close()
        if self.chat is not None:
            await self.chat.renderer.close()


def load_model_tokens(model_dir: Path) -> ModelTokens:
    """Read the tokenizer and the configuration files beside it; do not run the chat template.

    Raises:
        ModelFilesError: a file is missing or malformed.
    """
    return _tokens_of(read_model_files(model_dir))


async def load_model_text(
    model_dir: Path,
    *,
    start_renderer: Callable[[TemplateSource], Awaitable[TemplateRenderer]] = TemplateWorker.start,
) -> ModelText:
    """Load everything, and run the chat template in a process of its own; close the result.

    Raises:
        ModelFilesError: a file is missing or malformed, or the template does not compile,
            or its process was stopped or has ended.
    """
    files = read_model_files(model_dir)
    tokens = _tokens_of(files)
    chat, chat_error, answer_format = None, None, AnswerFormat()
    specials = tokens.tokenizer.special_tokens
    if files.chat_template is not None:
        source = TemplateSource(files.chat_template, dict(files.named_tokens))
        chat = ChatEncoder(tokens.tokenizer, await start_renderer(source))
        try:
            chat_error = await run_to_end(chat.check_append(), chat.renderer)
        except ServerBusy as error:
            raise ModelFilesError(str(error)) from error
        answer_format = AnswerFormat.of(files.chat_template, specials)
    return ModelText(
        tokenizer=tokens.tokenizer,
        eos_token_ids=tokens.eos_token_ids,
        bos_token_id=tokens.bos_token_id,
        chat=chat,
        chat_error=chat_error,
        answer_format=answer_format,
        markup_ids=frozenset(specials[text].token_id for text in answer_format.control_texts),
        default_sampling=files.default_sampling,
        grammars=GrammarWorker(tokens.tokenizer, tokens.eos_token_ids),
        fingerprint=_fingerprint_of(files, tokens),
    )


def _fingerprint_of(files: ModelFiles, tokens: ModelTokens) -> bytes:
    digest = hashlib.blake2b(tokens.tokenizer.fingerprint, digest_size=16)
    configured = sorted(files.named_tokens.items()), sorted(tokens.eos_token_ids)
    digest.update(repr((files.chat_template, *configured)).encode())
    return digest.digest()


def _tokens_of(files: ModelFiles) -> ModelTokens:
    tokenizer = Tokenizer(files.tokenizer, special_texts=files.special_tokens)
    named = files.named_tokens
    eos_id = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return ModelTokens(
        tokenizer=tokenizer,
        eos_token_ids=files.eos_token_ids | ({eos_id} if eos_id is not None else set()),
        bos_token_id=tokenizer.token_to_id(named["bos_token"]) if "bos_token" in named else None,
    )
