"""Decide what an answer is held to: a grammar or calls, behind what is thought first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from session_server.core.sampling import Grammar, SamplingParams
from session_server.core.session_events import TurnRequest
from session_server.sessions.prompt import Prompt
from session_server.text.answer_format import Thinking
from session_server.text.call_grammar import call_grammar
from session_server.text.model_text import ModelText
from session_server.text.thought_grammar import thought_rules

_TAIL_TOKENS: Final = 16
"""The end of a prompt that says whether the answer begins in the middle of reasoning."""


def held_request(model: ModelText, request: TurnRequest, tools: Sequence[str]) -> TurnRequest:
    """Return a request whose answer may call these tools, with the grammar that it is held to. One
    that must call has no text, and what was asked of that does not matter; one that may calls them
    or has a text that matches.

    Raises:
        InvalidRequest, UnsupportedOperation: it must call, and there is nothing that it could call,
            or that it could be held to.
    """
    text, form = request.text, request.sampling.grammar
    must_call = text.must_call is not None
    if not must_call and (form is None or not tools or not text.may_call):
        return request
    calls = call_grammar(model, tools, name=text.must_call or None, is_one=text.is_one_call)
    form = Grammar("lark", "", param="tools") if must_call or form is None else form
    grammar = msgspec.structs.replace(form, calls=calls)
    return replace(request, sampling=msgspec.structs.replace(request.sampling, grammar=grammar))


def longest_form(model: ModelText, grammar: Grammar) -> Grammar:
    """Return a grammar with all that may come before it, to find out whether it can be compiled."""
    return _behind(model, model.answer_format.thinking_after(""), grammar)


def held_behind_thought(
    model: ModelText, prompt: Prompt, sampling: SamplingParams
) -> SamplingParams:
    """Return the sampling of an answer to `prompt`, whose grammar begins where a thought ends. An
    answer to raw input has neither thoughts nor, beside a form, calls."""
    grammar = sampling.grammar
    if grammar is None:
        return sampling
    if prompt.is_raw:
        grammar = msgspec.structs.replace(grammar, calls="" if grammar.text else grammar.calls)
    thinking = Thinking.OVER if prompt.is_raw else thinking_after(model, prompt)
    grammar = _behind(model, thinking, grammar)
    return msgspec.structs.replace(sampling, grammar=grammar)


def _behind(model: ModelText, thinking: Thinking, grammar: Grammar) -> Grammar:
    has_form = bool(grammar.text) or not grammar.calls
    before = thought_rules(model, thinking, has_form=has_form, has_calls=bool(grammar.calls))
    return msgspec.structs.replace(grammar, before=before, param="")


def thinking_after(model: ModelText, prompt: Prompt) -> Thinking:
    """Return where an answer to messages begins: in the middle of a thought, before or behind."""
    ids = prompt.tokens if prompt.continued is None else prompt.continued.tail
    try:
        tail = model.tokenizer.decode(ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    except BaseException:  # noqa: BLE001 - `tokenizers` raises the bare class, or panics
        tail = ""  # this answer cannot be decoded either
    if prompt.continued is not None:
        said = prompt.continued.said
        if said.content or (said.reasoning and model.answer_format.closes_reasoning(tail)):
            return Thinking.OVER
        if said.reasoning:
            return Thinking.OPEN
    return model.answer_format.thinking_after(tail)
