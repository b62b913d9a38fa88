"""Count what a reader was told of an answer, for what it missed."""

from __future__ import annotations

from session_server.core.session_events import ToolCallDelta, TurnDelta, TurnEnd


class Told:
    """Count the parts of an answer that a reader has."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._num_thought = 0
        self._num_scores = 0
        self._num_arguments: list[int] = []

    def note(self, delta: TurnDelta) -> None:
        """Count a piece of the answer."""
        self._num_chars += len(delta.text)
        self._num_thought += len(delta.reasoning)
        self._num_scores += len(delta.logprobs)
        for piece in delta.tool_calls:
            if piece.index == len(self._num_arguments):
                self._num_arguments.append(0)
            self._num_arguments[piece.index] += len(piece.arguments)

    def unsent(self, end: TurnEnd) -> TurnDelta:
        """Return what the reader of a whole turn has not."""
        outcome, known = end.outcome, len(self._num_arguments)
        pieces = []
        for index, call in enumerate(outcome.tool_calls):
            if index >= known:
                pieces.append(ToolCallDelta(index, call.arguments, call.id, call.name))
            elif missing := call.arguments[self._num_arguments[index] :]:
                pieces.append(ToolCallDelta(index, missing))
        return TurnDelta(
            turn_id=end.turn_id,
            item_id=outcome.item_id,
            text=outcome.text[self._num_chars :],
            token_ids=(),
            logprobs=outcome.logprobs[self._num_scores :],
            reasoning=outcome.reasoning[self._num_thought :],
            tool_calls=tuple(pieces),
        )
