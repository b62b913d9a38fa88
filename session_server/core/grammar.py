"""`GrammarCompiler`: grammars become matchers, which say what tokens may come next.

The matchers are llguidance's (an Earley parser over derivatives of regular expressions). The server
compiles a grammar in a process that it can kill, to refuse it; the engine compiles those that were
not refused. Both have the same limits.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.sampling import MAX_GRAMMAR_BYTES, Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_LEXER_STATES: Final = 10_000
"""States of one matcher's lexer: 1 to 2 KB each."""

MAX_GRAMMAR_SYMBOLS: Final = 100_000
"""Symbols in the productions of a grammar."""

STEP_LEXER_FUEL: Final = 100_000
"""Work of the lexer for one token: some 7 ms."""

STEP_MAX_ITEMS: Final = 10_000
"""Items that the parser may add for one token: about a millisecond."""

COMPILED_BYTES: Final = 1 << 19
COMPILED_BYTES_PER_BYTE: Final = 250
"""Memory of a compiled grammar: so much, and so much for each byte of its text. Estimates that no
grammar of the tests exceeds."""

_NO_MATCH: Final = "nothing that the model can write matches it"
_DEAD_ENDS: Final = ("", "NoExtensionBias")
_MAX_REASON_CHARS: Final = 300

JSON_FORM: Final[JsonCompileOptions] = {
    "item_separator": ",",
    "key_separator": ":",
    # A space, or a new line and what indents it. Any white space at all has no end.
    "whitespace_flexible": True,
    "whitespace_pattern": r"(\x20|\x0A[\x20\x09]{0,24})?",
    "coerce_one_of": False,
    "lenient": False,
}


@dataclass(frozen=True, slots=True)
class CompiledMatcher:
    """Hold a matcher at its start, to be copied and never advanced; implements `CompiledGrammar`.

    `num_tokens`: that a mask covers, at least the model's vocabulary.
    """

    matcher: LLMatcher
    num_tokens: int


class GrammarCompiler:
    """Compile grammars for one tokenizer. Any thread may call it.

    Compiling releases the interpreter lock; building this object holds it, up to seconds with a
    large vocabulary.
    """

    def __init__(
        self, tokenizer_json: str, *, eos_token_ids: Collection[int], vocab_size: int = 0
    ) -> None:
        """Read a `tokenizer.json`. `vocab_size`: the model's, where it has ids without a text."""
        self._tokenizer: LLTokenizer | None = None
        self._limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            step_lexer_fuel=STEP_LEXER_FUEL,
            step_max_items=STEP_MAX_ITEMS,
            verbose_errors=False,
        )
        if not eos_token_ids:
            self._refusal = "the model has no token that ends an answer"
            return
        try:
            own = LLTokenizer(tokenizer_json, eos_token=sorted(eos_token_ids))
            if own.vocab_size < vocab_size:
                own = LLTokenizer(tokenizer_json, vocab_size, eos_token=sorted(eos_token_ids))
            self._tokenizer = own
        except ValueError as error:
            self._refusal = f"the tokenizer of this model does not support grammars: {error}"

    def compile(self, grammar: Grammar) -> CompiledMatcher:
        """Compile a grammar, and compute its first mask.

        Raises:
            UnsupportedOperation: the model's tokenizer does not support grammars.
            InvalidRequest: the grammar is malformed, too large, or matches nothing.
        """
        if self._tokenizer is None:
            raise UnsupportedOperation(self._refusal, param="grammar")
        if len(grammar.text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"a grammar has up to {MAX_GRAMMAR_BYTES} bytes", param="grammar")
        try:
            source = _source(grammar)
        except ValueError as error:
            raise refusal(grammar, str(error)) from error
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # copies begin with what this has built
        if reason := failure(matcher):
            raise refusal(grammar, reason)
        return CompiledMatcher(matcher, self._tokenizer.vocab_size)


def failure(matcher: LLMatcher) -> str | None:
    """Return why a matcher whose mask was computed cannot go on; None if it can, or may end."""
    if matcher.is_error():
        text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        return _NO_MATCH if text in _DEAD_ENDS else text[:_MAX_REASON_CHARS]
    if matcher.is_stopped() and not matcher.is_accepting():
        return _NO_MATCH
    return None


def refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    """Return the error for a grammar that cannot be compiled."""
    names = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
    return InvalidRequest(f"the {names[grammar.kind]} is refused: {reason}", param="grammar")


def compiled_bytes(grammar: Grammar) -> int:
    """Return the memory that a compiled grammar takes, as an estimate from above."""
    text = (grammar.text + grammar.calls).encode("utf-8", "surrogatepass")
    return COMPILED_BYTES + COMPILED_BYTES_PER_BYTE * len(text)


def _source(grammar: Grammar) -> str:
    if not grammar.before:
        assert not grammar.calls, "what may come is said before"
        return _answer_source(grammar)
    parts = [{"lark_grammar": grammar.before}]
    if "@answer" in grammar.before:
        source = {"lark_grammar": grammar.text}
        if grammar.kind != "lark":
            (source,) = json.loads(_answer_source(grammar))["grammars"]
        parts.append({**source, "name": "answer"})
    if grammar.calls:
        parts.append({"lark_grammar": grammar.calls, "name": "calls"})
    return json.dumps({"grammars": parts})


def _answer_source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_FORM)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
