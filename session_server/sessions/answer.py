"""Collect the output of one turn: convert tokens to text, part it, and find stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from session_server.core.ids import new_call_id
from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import Message, TextOptions, ToolCallDelta
from session_server.sessions.answer_grammar import thinking_after
from session_server.sessions.prompt import Continued, Prompt
from session_server.text.answer_format import Thinking
from session_server.text.answer_parser import AnswerParser
from session_server.text.answer_pieces import AnswerPieces
from session_server.text.detokenizer import Detokenizer
from session_server.text.model_text import ModelText
from session_server.text.stops import StopMatcher


class Answer:
    """Collect the tokens and the parts of an answer: those that `feed` and `finish` return, joined.

    An answer to messages has text, reasoning and calls; one to raw input is text alone. `end_ids`
    are tokens that end the turn once `min_tokens` are generated; their text is emitted only with
    `options.keep_stop`. Stop strings are found in the text.
    """

    def __init__(
        self,
        model: ModelText,
        options: TextOptions,
        prompt: Prompt,
        *,
        end_ids: Collection[int],
        min_tokens: int,
    ) -> None:
        self._parser = None if prompt.is_raw else _parser_of(model, options, prompt)
        self._detokenizer = Detokenizer(
            model.tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            kept_ids=model.markup_ids if self._parser is not None else (),
        )
        self._stops = StopMatcher(options.stop, keep_stop=options.keep_stop)
        self._options = options
        self._end_ids = end_ids
        self._min_tokens = min_tokens
        self._pieces: list[str] = []
        self._thoughts: list[str] = []
        if prompt.continued is not None:
            self._go_on(prompt.continued)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.num_thought = 0
        """Tokens of the reasoning."""
        self._num_silent = 0

    @property
    def message(self) -> Message:
        """Return the answer so far as a message."""
        calls = self._parser.tool_calls if self._parser is not None else ()
        calls = calls[:1] if self._options.is_one_call else calls
        text, reasoning = "".join(self._pieces), "".join(self._thoughts)
        return Message("assistant", text, tool_calls=calls, reasoning=reasoning)

    @property
    def matched(self) -> str | None:
        """Return the stop string found; the last token fed completed it."""
        return self._stops.matched

    @property
    def is_over(self) -> bool:
        """Return whether the last token fed was the last one wanted."""
        if self._stops.matched is not None:
            return True
        if self._parser is None or not self._options.is_one_call:
            return False
        return self._parser.num_calls > 1

    def feed(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> tuple[AnswerPieces, int]:
        """Add output tokens up to the one that completes a stop string, or begins a call too many.

        Returns:
            What to emit now, and how many of `token_ids` were taken.
        """
        assert not self.is_over, "tokens after the last one"
        pieces: list[AnswerPieces] = []
        num_taken = 0
        for token_id in token_ids:
            num_taken += 1
            self.token_ids.append(token_id)
            pieces.append(self._part(self._text_of(token_id)))
            self._count(pieces[-1])
            if self.is_over:
                break
        self.logprobs.extend(logprobs[:num_taken])
        return self._emit(pieces), num_taken

    def finish(self) -> AnswerPieces:
        """Return what was held back, when the answer has ended."""
        if self.is_over:
            return AnswerPieces()
        pieces = [self._part(self._detokenizer.flush())]
        if self._parser is not None and self.matched is None:
            pieces.append(self._stop(self._parser.finish()))
        pieces.append(AnswerPieces(self._stops.flush()))
        return self._emit(pieces)

    def _go_on(self, continued: Continued) -> None:
        """Begin with what an answer has said so far."""
        said = continued.said
        if not said.content and not said.reasoning:
            return  # a first word has its own beginning
        held = self._detokenizer.go_on_from(continued.tail)
        self._pieces.append(said.content.removesuffix(held))
        self._thoughts.append(said.reasoning if said.content else said.reasoning.removesuffix(held))

    def _text_of(self, token_id: int) -> str:
        is_end = token_id in self._end_ids and len(self.token_ids) >= self._min_tokens
        return "" if is_end and not self._options.keep_stop else self._detokenizer.feed(token_id)

    def _part(self, text: str) -> AnswerPieces:
        if self._parser is None:
            return self._stop(AnswerPieces(text))
        return self._stop(self._parser.feed(text)) if text else AnswerPieces()

    def _stop(self, pieces: AnswerPieces) -> AnswerPieces:
        """Return pieces without the text that belongs, or may yet belong, to a stop string."""
        text = self._stops.feed(pieces.text)
        return pieces if text == pieces.text else pieces._replace(text=text)

    def _count(self, piece: AnswerPieces) -> None:
        """Count a token that was fed. One that says nothing yet belongs to what is said next."""
        self._num_silent += 1
        if piece.reasoning:
            self.num_thought += self._num_silent
        if any(piece):
            self._num_silent = 0

    def _emit(self, pieces: Sequence[AnswerPieces]) -> AnswerPieces:
        if len(pieces) == 1 and not pieces[0].tool_calls:
            whole = pieces[0]
        else:
            whole = AnswerPieces(
                "".join(piece.text for piece in pieces),
                "".join(piece.reasoning for piece in pieces),
                tuple(filter(self._is_wanted, chain.from_iterable(p.tool_calls for p in pieces))),
            )
        self._pieces += [whole.text] if whole.text else []
        self._thoughts += [whole.reasoning] if whole.reasoning else []
        return whole

    def _is_wanted(self, delta: ToolCallDelta) -> bool:
        return delta.index == 0 or not self._options.is_one_call


def _parser_of(model: ModelText, options: TextOptions, prompt: Prompt) -> AnswerParser:
    return model.answer_format.parser(
        has_tools=bool(prompt.tools) and options.may_call,
        starts_in_reasoning=thinking_after(model, prompt) is Thinking.OPEN,
        new_call_id=new_call_id,
        tools=prompt.tools,
    )
