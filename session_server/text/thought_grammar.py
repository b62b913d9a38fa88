"""Write the rules of what a model thinks before an answer that is held to a grammar.

The thought itself is free. It ends where the parser of answers sees it end: with its closing mark,
as the token of that name or spelled by others. An answer may not end before.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from itertools import groupby

from session_server.text.answer_format import Thinking
from session_server.text.answer_parser import HARMONY_MARKERS
from session_server.text.model_text import ModelText


def thought_rules(
    model: ModelText, thinking: Thinking, *, has_form: bool = True, has_calls: bool = False
) -> str:
    """Return the grammar of `Grammar.before`; "" where no thought comes first, and no calls may.

    `has_form`, `has_calls`: what may come behind the thought; at least one of them.
    """
    assert has_form or has_calls, "an answer says something"
    if thinking is Thinking.OVER and not has_calls:
        return ""
    if model.answer_format.is_harmony:
        return _harmony_rules(model, thinking, has_form=has_form, has_calls=has_calls)
    says = " | ".join(["@answer"] * has_form + ["@calls"] * has_calls)
    if thinking is Thinking.OVER:
        return f"start: {says}"
    assert model.answer_format.reasoning is not None, "without marks there is no thought"
    start, end = model.answer_format.reasoning
    before = "thought" if thinking is Thinking.OPEN else f"({marker_of(model, start)} thought)?"
    ends = f"spelled | {marker_of(model, end)}" if _is_token(model, end) else "spelled"
    rules = [
        f"start: before ({says})",
        f"before: {before}",
        f"thought: free ({ends}) /\\n{{0,2}}/",
        f"spelled[suffix={json.dumps(end)}]: /(?s:.*)/",
    ]
    return "\n".join([*rules, _free(model, (end,))])


def marker_of(model: ModelText, text: str) -> str:
    """Return a marker as a grammar has it: as its token, where it is one."""
    token_id = model.tokenizer.token_to_id(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _harmony_rules(model: ModelText, thinking: Thinking, *, has_form: bool, has_calls: bool) -> str:
    names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
    channel, message, end, start, constrain = (marker_of(model, name) for name in names)
    says = ["first note* final @answer"] * has_form + ["first note* @calls"] * has_calls
    if thinking is Thinking.OVER and has_form:  # that message has begun
        says = ["@answer"]
    rules = [
        f"start: {' | '.join(says)}",
        'first: ""' if thinking is Thinking.POSSIBLE else "first: content next",
        f'final: {channel} "final" (/ ?/ {constrain} /[a-z]+/)? {message}',
        f"note: {channel} /analysis|commentary/ {message} content next",
        f'next: {end} {start} "assistant"',
        "content: free",
    ]
    return "\n".join([*rules, _free(model, sorted(HARMONY_MARKERS))])


def _free(model: ModelText, marks: Collection[str]) -> str:
    """Return the rule of anything that is none of the marks, and does not end the answer."""
    tokens = model.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    ids = {number for number, token in tokens.items() if token.content not in marks}
    ranges = ",".join(_ranges(sorted(ids - model.eos_token_ids)))
    return "free: (/(?s:.+)/" + (f" | <[{ranges}]>)*" if ranges else ")?")


def _ranges(ids: list[int]) -> Iterator[str]:
    for _, group in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        run = [token_id for _, token_id in group]
        yield f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])


def _is_token(model: ModelText, text: str) -> bool:
    return model.tokenizer.token_to_id(text) is not None
