"""Tell from a chat template in which notation a model's answers think and call tools.

A template writes earlier answers in the notation that its model was trained on, so the markers that
stand in it are those that answers have.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from session_server.text.answer_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_END,
    DEEPSEEK_SEP,
    FUNCTION,
    MISTRAL_ARGS,
    MISTRAL_ID,
)
from session_server.text.answer_parser import HARMONY_MARKERS, AnswerParser, Markup

_REASONING: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))

_CALLS: Final = {
    "<tool_call>": "</tool_call>",
    "<|tool_call|>": "<|/tool_call|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<function_calls>": "</function_calls>",
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",
    "[TOOL_CALLS]": "",
    "<|python_tag|>": "",
    FUNCTION: "",
}
"""Markers that introduce calls, each with the one that ends them, if any. A function's tag is the
call itself."""

_BARE: Final = ("<|python_tag|>", '"parameters": dictionary')
"""What stands in templates of models that write calls as bare objects: Llama 3.1's and 3.2's."""

_INNER: Final = (DEEPSEEK_BEGIN, DEEPSEEK_SEP, DEEPSEEK_END, MISTRAL_ARGS, MISTRAL_ID)


class Thinking(enum.Enum):
    """Say where an answer begins: in the middle of a thought, where one may begin, or behind it."""

    OPEN = enum.auto()
    POSSIBLE = enum.auto()
    OVER = enum.auto()


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Hold how a model's answers are written.

    `control_texts`: special tokens that are markup. Who parses answers needs their text, although
    special tokens are left out of what clients read.
    """

    control_texts: frozenset[str] = frozenset()
    _markup: Markup = field(default_factory=Markup)

    @classmethod
    def of(cls, template: str, special_tokens: Collection[str]) -> AnswerFormat:
        """Find a format's markers in a template; without any, answers are text and nothing else."""
        if "<|channel|>" in template:
            return cls(HARMONY_MARKERS.intersection(special_tokens), Markup(is_harmony=True))
        reasoning = [pair for pair in _REASONING if any(marker in template for marker in pair)]
        calls = {start: end for start, end in _CALLS.items() if start in template}
        markup = Markup(
            reasoning=reasoning[0] if reasoning else None,
            calls=calls,
            has_bare_calls=any(sign in template for sign in _BARE),
        )
        texts = {text for pair in [*reasoning, *calls.items()] for text in pair}
        texts.update(_INNER if calls else ())
        return cls(frozenset(texts.intersection(special_tokens)), markup)

    @property
    def call_markers(self) -> frozenset[str]:
        """Return what introduces calls."""
        return frozenset(self._markup.calls)

    @property
    def has_bare_calls(self) -> bool:
        """Return whether an answer that is a JSON object may be a call."""
        return self._markup.has_bare_calls

    @property
    def reasoning(self) -> tuple[str, str] | None:
        """Return what stands before and behind reasoning."""
        return self._markup.reasoning

    @property
    def is_harmony(self) -> bool:
        """Return whether an answer is several messages, each on a channel."""
        return self._markup.is_harmony

    def thinking_after(self, prompt: str) -> Thinking:
        """Return where an answer to `prompt` begins."""
        if self._markup.opens_reasoning(prompt):
            return Thinking.OPEN
        can_think = self._markup.is_harmony or self._markup.reasoning is not None
        if not can_think or self._markup.closes_reasoning(prompt):
            return Thinking.OVER
        return Thinking.POSSIBLE

    def closes_reasoning(self, said: str) -> bool:
        """Return whether an answer that has said this has just ended its reasoning."""
        return self._markup.closes_reasoning(said)

    def parser(
        self,
        *,
        has_tools: bool,
        starts_in_reasoning: bool,
        new_call_id: Callable[[], str],
        tools: tuple[str, ...] = (),
    ) -> AnswerParser:
        """Return a parser for one answer.

        Args:
            has_tools: whether the answer may call tools; if not, such markup is text.
            tools: JSON texts of them, for notations that do not tell strings from numbers.
        """
        return AnswerParser(
            self._markup if has_tools else self._markup.without_calls(),
            new_call_id,
            starts_in_reasoning=starts_in_reasoning,
            tools=tools,
        )
