"""Settle: record what a forward computed, report its tokens, and end turns.

A turn ends here and nowhere else, and only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from session_server.core.batch import Batch, BatchRow, RowResult, StepResult
from session_server.core.errors import (
    DeviceFailed,
    GrammarFailed,
    NumericalError,
    SessionServerError,
    wire_error,
)
from session_server.core.events import (
    FinishReason,
    PrefillProgressed,
    PromptLogprobsComputed,
    StepTokens,
    TokensProduced,
    TurnFailed,
    TurnFinished,
)
from session_server.core.sampling import TokenLogprob
from session_server.engine.context import EngineContext
from session_server.engine.decoding import DecodeGroup, Decoding
from session_server.engine.input_drafts import InputDrafts
from session_server.engine.scheduler import Scheduler
from session_server.engine.turn import Turn, TurnState

LOGPROBS_PER_EVENT: Final = 128
"""Prompt logprobs that one event reports: 41 KiB with 20 alternatives each."""


class Settler:
    """Write the results of forwards into the cache and the turns, and end turns.

    `retry_alone`: turns of a forward that failed on the device. Each is retried once in a forward
    of its own, so that a turn that makes forwards fail does not end its neighbors too. A second
    failure ends it. `decoding`: launches and settles most forwards, see there.
    """

    def __init__(
        self, context: EngineContext, scheduler: Scheduler, input_drafts: InputDrafts
    ) -> None:
        self._config, self._cache, self._watch = context.config, context.cache, context.watch
        self._outbox, self._counters = context.outbox, context.counters
        self._tallies, self._tiers = context.tallies, context.tiers
        self._scheduler = scheduler
        self._input_drafts = input_drafts
        self.decoding = Decoding(context, scheduler)
        self.retry_alone: list[Turn] = []

    def settle(self, batch: Batch, result: StepResult, now_s: float) -> None:
        """Record the result of the oldest forward in flight, which computed `batch`."""
        assert batch.step == result.step, "results come in launch order"
        self._counters.steps += 1
        self._counters.forward_s += result.forward_s
        if result.graph_use is not None:
            self._tallies.graph_uses[result.graph_use] += 1
        if result.error is not None:
            self._settle_failure(batch, result.error)
            return
        num_prefill = self._tallies.add_forward(batch)
        self._tiers.store.costs.note_prefill(num_prefill, result.forward_s)
        group = self.decoding.group
        is_theirs = group is not None and not self.retry_alone and group.covers(batch)
        if is_theirs and (tokens := result.decoded()) is not None:
            assert group is not None, "it covers the batch"
            self._settle_together(group, tokens, result.forward_s, now_s)
            return
        for row, outcome in zip(batch.rows, result.row_results(), strict=True):
            if self._input_drafts.settle(row, outcome):
                continue
            turn = self._scheduler.find_attempt(row)
            if turn is None:
                # With overlap, the turn may have ended or been retracted since the launch. Its row
                # and pages may belong to another turn by now, so nothing is recorded.
                self._counters.overshoots += 1
                continue
            turn.clock.add_forward(result.forward_s)
            # Only this turn fails: NaN in one row does not spread to the other rows of a forward.
            if not outcome.finite:
                self.fail(turn, NumericalError("the model gave NaN or Inf"))
            elif outcome.failure is not None:
                self.fail(turn, GrammarFailed(f"the grammar failed: {outcome.failure}"))
            else:
                self._settle_row(turn, row, outcome, now_s)

    def finish(
        self,
        turn: Turn,
        reason: FinishReason,
        now_s: float,
        *,
        num_outputs: int | None,
        matched_token: int | None = None,
    ) -> None:
        """End a turn without an error, and report what the engine keeps of it.

        Args:
            turn: waiting or running.
            reason: why it ends.
            now_s: time of this step.
            num_outputs: how many outputs stay in the history, behind the input; later ones were
                sampled before a cancel or a stop string was seen. None discards the input too, and
                the session is as it was before the turn.
            matched_token: the stop token that ended it.
        """
        request = turn.request
        history_len, num_kept = request.base_len, 0
        # A waiting turn holds no KV, and the cache has dropped what a retracted one had computed.
        # The engine keeps the history before the turn; the server sends what it keeps of the rest.
        if turn.state is TurnState.RUNNING:
            if num_outputs is not None:
                num_kept = min(num_outputs, len(turn.outputs))
                history_len = turn.prompt_len + num_kept
            self._outbox.write(self._cache.end_turn(request.turn_id, history_len))
        self._remove(turn)
        self._outbox.emit(
            TurnFinished(
                turn_id=request.turn_id,
                session_id=request.session_id,
                reason=reason,
                matched_token=matched_token,
                history_len=history_len,
                prompt_tokens=turn.prompt_len,
                cached_tokens=turn.cached_len,
                num_outputs=num_kept,
                num_retractions=turn.clock.num_retractions,
                timings=turn.clock.timings(now_s),
            )
        )

    def fail(self, turn: Turn, error: SessionServerError) -> None:
        """End a turn with an error. Discard what it computed; the history is as before the turn."""
        request = turn.request
        if turn.state is TurnState.RUNNING:
            self._outbox.write(self._cache.discard(request.turn_id))
        self.fail_dropped(turn, error)

    def fail_dropped(self, turn: Turn, error: SessionServerError) -> None:
        """End a turn with an error once the cache no longer knows the turn."""
        request = turn.request
        self._remove(turn)
        self._outbox.emit(
            TurnFailed(
                turn_id=request.turn_id,
                session_id=request.session_id,
                code=wire_error(error).code,
                message=error.message,
                history_len=request.base_len,
            )
        )

    def _remove(self, turn: Turn) -> None:
        self._scheduler.remove(turn)
        self.decoding.drop()  # it may be the last turn, and nothing else would let go of it
        if turn in self.retry_alone:
            self.retry_alone.remove(turn)
        self._watch.touch(turn.request.session_id)
        self._tiers.note_rest(turn.request.session_id)

    def _settle_together(
        self, group: DecodeGroup, tokens: tuple[int, ...], forward_s: float, now_s: float
    ) -> None:
        group.settle(tokens, forward_s)
        self._counters.generated_tokens += len(tokens)
        self._outbox.emit(StepTokens(turn_ids=group.turn_ids, token_ids=tokens))
        if group.is_complete or not group.stop_ids.isdisjoint(tokens):
            for turn in group.turns:
                self._finish_if_done(turn, now_s)

    def _settle_row(self, turn: Turn, row: BatchRow, outcome: RowResult, now_s: float) -> None:
        admission = turn.current_admission
        assert row.start == admission.computed_len, "rows settle in the order of positions"
        # Before a stop token cuts off the rest: those drafts were accepted too.
        if row.num_drafts:
            self._settle_drafts(turn, row, len(outcome.token_ids) - 1)
        token_ids = self._until_stop(turn, outcome.token_ids)
        num_certain = row.num_tokens - row.num_drafts
        # Each accepted draft has computed its own position. The last token of `token_ids` was only
        # sampled: the next forward computes its position.
        computed_len = row.start + num_certain + max(0, len(token_ids) - 1)
        admission.num_sampling -= row.sample
        turn.outputs.extend(token_ids)
        self._counters.generated_tokens += len(token_ids)
        if turn in self.retry_alone:
            self.retry_alone.remove(turn)  # its forward succeeded, so it joins the others again
        self._outbox.write(self._cache.record(turn.turn_id, computed_len, token_ids))
        self._report_prompt_logprobs(turn, outcome.prompt_logprobs)
        self._report_prompt(turn, now_s)
        if token_ids:
            if turn.clock.first_token_s is None:
                turn.clock.first_token_s = now_s
            logprobs = outcome.logprobs[: len(token_ids)]
            self._outbox.emit(
                TokensProduced(turn_id=turn.turn_id, token_ids=token_ids, logprobs=logprobs)
            )
        self._finish_if_done(turn, now_s)

    def _report_prompt(self, turn: Turn, now_s: float) -> None:
        computed_len = turn.current_admission.computed_len
        # Reported once. A retracted turn computes its prompt again, which the client does not see.
        if turn.clock.prompt_done_s is not None:
            return
        if computed_len < turn.prompt_len:
            self._outbox.emit(
                PrefillProgressed(
                    turn_id=turn.turn_id, computed=computed_len, total=turn.prompt_len
                )
            )
        else:
            turn.clock.prompt_done_s = now_s

    def _report_prompt_logprobs(self, turn: Turn, logprobs: Sequence[TokenLogprob]) -> None:
        """Report those of one chunk. A retracted turn computes none of them again."""
        request = turn.request
        if request.sampling.prompt_logprobs_from == 0 and turn.num_prompt_logprobs == 0:
            first = int(self._cache.tokens(request.session_id, 0, 1)[0])
            logprobs = (TokenLogprob(first, None), *logprobs)
        turn.num_prompt_logprobs += len(logprobs)
        for start in range(0, len(logprobs), LOGPROBS_PER_EVENT):
            part = tuple(logprobs[start : start + LOGPROBS_PER_EVENT])
            self._outbox.emit(PromptLogprobsComputed(turn_id=request.turn_id, logprobs=part))

    def _settle_drafts(self, turn: Turn, row: BatchRow, num_right: int) -> None:
        """Take back the positions of rejected drafts, and adapt how many the turn drafts next."""
        turn.current_admission.launched_len -= row.num_drafts - num_right
        turn.draft_len = 2 * num_right if num_right == row.num_drafts else num_right + 1
        self._counters.draft_tokens += row.num_drafts
        self._counters.accepted_tokens += num_right

    def _until_stop(self, turn: Turn, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens up to the first stop token, as they would be without drafts.

        The last token is not looked at: `_finish_if_done` checks it.
        """
        for index, token in enumerate(token_ids[:-1]):
            if self._is_stop(turn, token, len(turn.outputs) + index + 1):
                return token_ids[: index + 1]
        return token_ids

    def _finish_if_done(self, turn: Turn, now_s: float) -> None:
        num_outputs = len(turn.outputs)
        # A turn with `max_new` 0 ends with the last chunk of its prompt, not with the first.
        if turn.current_admission.computed_len < turn.prompt_len:
            return
        if num_outputs and self._is_stop(turn, turn.outputs[-1], num_outputs):
            token = turn.outputs[-1]
            self.finish(
                turn, FinishReason.STOP, now_s, num_outputs=num_outputs, matched_token=token
            )
        elif num_outputs >= turn.max_new:
            self.finish(turn, FinishReason.LENGTH, now_s, num_outputs=num_outputs)

    def _is_stop(self, turn: Turn, token: int, num_outputs: int) -> bool:
        """Return whether `token`, output number `num_outputs` counted from 1, ends the turn.

        A stop token counts as output and stays in the history.
        """
        sampling = turn.request.sampling
        is_eos = token in self._config.eos_token_ids
        # The runner gives it only where the grammar is matched, and holds it back as asked unless
        # nothing else can follow.
        if sampling.grammar is not None and is_eos:
            return True
        # The sampler masks stop tokens until then, but when a turn ends is decided here alone.
        if num_outputs < sampling.min_tokens:
            return False
        if token in sampling.stop_token_ids:
            return True
        return not sampling.ignore_eos and is_eos

    def _settle_failure(self, batch: Batch, message: str) -> None:
        for row in batch.rows:
            if self._input_drafts.settle(row, None):
                continue
            turn = self._scheduler.find_attempt(row)
            if turn is None:
                self._counters.overshoots += 1
            elif turn in self.retry_alone:
                self.fail(turn, DeviceFailed(f"the device refused the forward: {message}"))
            else:
                turn.discard_in_flight()
                self._cache.forget_launches(turn.turn_id)
                self.retry_alone.append(turn)
