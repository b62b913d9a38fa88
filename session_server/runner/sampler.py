"""Sample tokens from logits, on the device: one per row, and one more per draft.

Order of rules: logit bias, stop tokens held back until `min_tokens`, penalties, the mask of a
grammar, temperature, top-k, top-p, min-p. The token itself is chosen by the Gumbel-max trick
(Maddison et al. 2014): the largest `logit / temperature - log(Exp(1) noise)` is a sample of the
softmax. The noise is a function of (seed, position, token id), so a row's token depends neither on
other rows nor on its drafts.

The state of a turn (penalty counts, seed) is kept per row from its `SamplingStart` until the turn
ends and is updated on the device, so a launch ahead needs nothing from the host. The number of
outputs before a position follows from the position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from cache.pool.upload import upload, upload_values
from session_server.core.batch import SamplingStart
from session_server.core.sampling import SamplingParams
from session_server.runner.constraints import Masks
from session_server.runner.greedy import all_finite, most_likely
from session_server.runner.randomness import TokenNoise, noise_key
from session_server.runner.truncation import Truncation, thresholds
from session_server.runner.verification import SampleSpan

MIN_TEMPERATURE: Final = 1e-6
"""Lower temperatures equal greedy sampling in fp32, and could divide by zero."""

SAMPLED_BYTES: Final = 1 << 29
"""What choosing tokens may take beside the logits, however many rows of a large vocabulary there
are; a row of more than that is taken alone."""

BYTES_PER_LOGIT: Final = 40
"""The most that choosing takes of each, in whole numbers: 37 where logits are adjusted, scaled and
truncated, of which the noise takes 24."""


class Sampler:
    """Sample tokens for the rows of a page table."""

    def __init__(
        self,
        vocab_size: int,
        *,
        device: torch.device,
        eos_token_ids: Sequence[int] = (),
        has_kernels: bool = False,
    ) -> None:
        """Create the sampler.

        `eos_token_ids`: held back until `min_tokens`, if not ignored. `has_kernels`: choose by
        kernels in Triton what is not truncated; the tokens are the same.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = tuple(eos_token_ids)
        self._noise = TokenNoise(vocab_size, device=device)
        self._rows: dict[int, _RowState] = {}
        self._most_likely, self._draw = most_likely, None
        if has_kernels:
            from session_server.runner.triton import sampling

            self._most_likely, self._draw = sampling.most_likely, sampling.draw

    def compile_kernels(self, logits: Tensor) -> None:
        """Compile what may be launched to choose from logits [n, vocab], by launching it."""
        if self._draw is not None:
            self._most_likely(logits)
            keys = torch.zeros(len(logits), dtype=torch.int64, device=self._device)
            self._draw(logits, keys.float(), keys)

    def start(self, row: int, start: SamplingStart) -> None:
        """Start a turn on a row, and drop the state of the row's previous turn."""
        params = start.params
        self._rows[row] = _RowState(
            params=params,
            seed=start.seed,
            min_len=start.prompt_len + params.min_tokens,
            truncation=Truncation.of(params, self._vocab_size),
            bias=self._bias(params),
            # With a grammar its mask says so, because then they may be all that can follow.
            held_back=self._held_back(params if start.grammar is None else SamplingParams()),
            penalty=self._penalty(start) if params.has_penalties else None,
        )

    def end(self, row: int) -> None:
        """Drop the state of a row's turn, if it has any: penalties take 5 bytes for each token of
        the vocabulary, and a session keeps its row while it is at rest."""
        self._rows.pop(row, None)

    def params(self, row: int) -> SamplingParams:
        """Return the sampling parameters of the row's turn, which must have been started."""
        return self._rows[row].params

    def choose(
        self,
        logits: Tensor,
        spans: Sequence[SampleSpan],
        inputs: Tensor | None = None,
        *,
        masks: Masks | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sample as `sample` does; return the tokens, and which rows of `logits` are finite.

        Tokens of rows that are not finite are arbitrary. Both are [n], int64 and bool.
        """
        states = [self._rows[span.row] for span in spans]
        if masks is None and not any(
            state.adjusts(span) or not state.params.is_greedy
            for state, span in zip(states, spans, strict=True)
        ):
            return self._most_likely(logits)
        return self.sample(logits, spans, inputs, masks=masks), all_finite(logits)

    def sample(
        self,
        logits: Tensor,
        spans: Sequence[SampleSpan],
        inputs: Tensor | None = None,
        *,
        masks: Masks | None = None,
    ) -> Tensor:
        """Sample the tokens of every span, without counting them as output.

        `logits`: float32 [n, vocab], raw, span after span; not modified. `inputs`: int64 [n], as
        `verification.verify` takes them: the drafts of a span count as output for the positions
        behind them. None if every span has one token. `masks`: None if no grammar constrains a row.

        Spans are taken in blocks of `SAMPLED_BYTES`: no row's token depends on the others.

        Returns:
            int64 [n] on the device. Greedy rows take the lowest id among equals.
        """
        tokens, first = [], 0
        for block in self._blocks(spans):
            end = first + sum(span.num_tokens for span in block)
            own = None if inputs is None else inputs[first:end]
            of_block = None if masks is None else masks.part(first, end)
            tokens.append(self._sample(logits[first:end], block, own, masks=of_block))
            first = end
        return tokens[0] if len(tokens) == 1 else torch.cat(tokens)

    def _blocks(self, spans: Sequence[SampleSpan]) -> Iterator[Sequence[SampleSpan]]:
        """Cut spans into blocks of few enough logits; a span is in one of them."""
        most = max(1, SAMPLED_BYTES // (BYTES_PER_LOGIT * self._vocab_size))
        first = num_tokens = 0
        for i, span in enumerate(spans):
            if i > first and num_tokens + span.num_tokens > most:
                yield spans[first:i]
                first, num_tokens = i, 0
            num_tokens += span.num_tokens
        yield spans[first:]

    def _sample(
        self,
        logits: Tensor,
        spans: Sequence[SampleSpan],
        inputs: Tensor | None,
        *,
        masks: Masks | None,
    ) -> Tensor:
        """Sample as `sample` does, all spans at once."""
        states = [self._rows[span.row] for span in spans for _ in range(span.num_tokens)]
        adjusted = self.adjusted(logits, spans, inputs)
        if masks is not None:
            adjusted = self._masked(adjusted, masks)
        sampled = [i for i, state in enumerate(states) if not state.params.is_greedy]
        if not sampled:
            return adjusted.argmax(dim=-1)
        positions = [span.position + i for span in spans for i in range(span.num_tokens)]
        keys = [noise_key(states[i].seed, positions[i]) for i in sampled]
        if self._draw is not None and all(states[i].truncation is None for i in sampled):
            return self._drawn(adjusted, states, dict(zip(sampled, keys, strict=True)))
        if len(sampled) == len(states):
            return self._gumbel_max(adjusted, states, keys)
        index = upload_values(sampled, torch.int64, self._device)
        drawn = self._gumbel_max(
            adjusted.index_select(0, index), [states[i] for i in sampled], keys
        )
        return adjusted.argmax(dim=-1).index_copy_(0, index, drawn)

    def count_outputs(
        self, spans: Sequence[SampleSpan], tokens: Tensor, num_accepted: Tensor | None = None
    ) -> None:
        """Count sampled tokens, int64 [n], as output.

        `num_accepted`: int64 [spans], accepted drafts; tokens sampled after the first rejected
        draft are not counted. None if every span has one token.
        """
        first = 0
        for index, span in enumerate(spans):
            end = first + span.num_tokens
            penalty = self._rows[span.row].penalty
            if penalty is not None:
                accepted = None if num_accepted is None else num_accepted[index]
                penalty.add_(tokens[first:end], accepted)
            first = end

    def uncount_outputs(self, spans: Sequence[SampleSpan], tokens: Tensor) -> None:
        """Revert `count_outputs` for spans of one token each."""
        for index, span in enumerate(spans):
            penalty = self._rows[span.row].penalty
            if penalty is not None:
                penalty.subtract_(tokens[index : index + 1])

    def adjusted(
        self, logits: Tensor, spans: Sequence[SampleSpan], inputs: Tensor | None = None
    ) -> Tensor:
        """Apply bias, held-back tokens and penalties to raw logits [n, vocab].

        Arguments as those of `sample`. Returns `logits` itself, not a copy, if nothing applies.
        """
        states = [self._rows[span.row] for span in spans]
        if not any(s.adjusts(span) for s, span in zip(states, spans, strict=True)):
            return logits
        adjusted = logits.clone()
        penalized: list[_PenaltySpan] = []
        first = 0
        for state, span in zip(states, spans, strict=True):
            own = adjusted[first : first + span.num_tokens]
            if state.bias is not None:
                token_ids, values = state.bias
                own.index_add_(1, token_ids, values.expand(span.num_tokens, -1))
            if span.position < state.min_len:
                own[: state.min_len - span.position].index_fill_(1, state.held_back, -math.inf)
            if state.penalty is not None:
                penalized.append(_PenaltySpan(state.params, state.penalty, first, span.num_tokens))
            first += span.num_tokens
        if penalized:
            rows = [i for one in penalized for i in range(one.first, one.first + one.num_tokens)]
            index = upload_values(rows, torch.int64, self._device)
            of_rows = _apply_penalties(adjusted.index_select(0, index), penalized, inputs)
            adjusted.index_copy_(0, index, of_rows)
        return adjusted

    def _masked(self, adjusted: Tensor, masks: Masks) -> Tensor:
        forbidden = upload(masks.forbidden, self._device)
        if len(masks.rows) == len(adjusted):
            return adjusted.masked_fill(forbidden, -math.inf)
        index = upload_values(masks.rows, torch.int64, self._device)
        masked = adjusted.index_select(0, index).masked_fill_(forbidden, -math.inf)
        return adjusted.index_copy(0, index, masked)

    def _drawn(self, adjusted: Tensor, states: list[_RowState], keys: dict[int, int]) -> Tensor:
        """Sample by kernels from `adjusted` [n, vocab], with `keys` of the rows that are not
        greedy."""
        assert self._draw is not None, "`sample` asks for the kernels"
        of_rows = [keys.get(i, 0) for i in range(len(states))]
        temperatures = [
            max(state.params.temperature, MIN_TEMPERATURE) if i in keys else 0.0
            for i, state in enumerate(states)
        ]
        return self._draw(
            adjusted,
            upload_values(temperatures, torch.float32, self._device),
            upload_values(of_rows, torch.int64, self._device),
        )

    def _gumbel_max(self, adjusted: Tensor, states: list[_RowState], keys: list[int]) -> Tensor:
        """Sample by Gumbel-max from `adjusted` [n, vocab], with the state and key of each row."""
        temperatures = [max(state.params.temperature, MIN_TEMPERATURE) for state in states]
        divisors = upload_values(temperatures, torch.float32, self._device)
        scaled = (adjusted - adjusted.amax(dim=-1, keepdim=True)) / divisors.unsqueeze(1)
        rules = [state.truncation for state in states]
        device_keys = upload_values(keys, torch.int64, self._device)
        if all(rule is None for rule in rules):
            return (scaled - self._noise.exponentials(device_keys).log_()).argmax(dim=-1)
        is_kept = scaled >= thresholds(scaled, rules)
        if self._device.type != "cpu":
            scores = scaled - self._noise.exponentials(device_keys).log_()
            return scores.masked_fill_(~is_kept, -math.inf).argmax(dim=-1)
        # On a CPU, noise for a large vocabulary takes 2 ms a row, and next to nothing for the few
        # tokens kept. A device would have to synchronize to know their number.
        of_row, token_ids = is_kept.nonzero().unbind(1)
        noise = self._noise.exponentials(device_keys[of_row], token_ids).log_()
        scores = torch.full_like(scaled, -math.inf)
        scores[of_row, token_ids] = scaled[of_row, token_ids] - noise
        return scores.argmax(dim=-1)

    def _bias(self, params: SamplingParams) -> tuple[Tensor, Tensor] | None:
        # An id beyond the vocabulary names no token; it must not fail the whole batch.
        known = [(i, value) for i, value in params.logit_bias if 0 <= i < self._vocab_size]
        if not known:
            return None
        ids, values = zip(*known, strict=True)
        return (
            upload_values(ids, torch.int64, self._device),
            upload_values(values, torch.float32, self._device),
        )

    def _held_back(self, params: SamplingParams) -> Tensor:
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self._eos_token_ids)
        ids = sorted(i for i in stops if 0 <= i < self._vocab_size) if params.min_tokens else []
        return upload_values(ids, torch.int64, self._device)

    def _penalty(self, start: SamplingStart) -> _Penalty:
        def counted(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Tensor:
            counts = np.bincount(tokens, minlength=self._vocab_size)[: self._vocab_size]
            return upload(torch.from_numpy(counts.astype(np.float32)), self._device)

        return _Penalty(counted(start.context) > 0, counted(start.outputs))


@dataclass(frozen=True, slots=True)
class _Penalty:
    """Hold the counts for penalties.

    `in_prompt`: bool [vocab]; `output_counts`: float32 [vocab].
    """

    in_prompt: Tensor
    output_counts: Tensor

    def add_(self, tokens: Tensor, num_accepted: Tensor | None) -> None:
        """Count output tokens, int64 [n], that the host does not know yet.

        Counts all of them, or the first `num_accepted` + 1.
        """
        counts = self.output_counts
        if num_accepted is None:
            weights = counts.new_ones(len(tokens))
        else:
            weights = (torch.arange(len(tokens), device=counts.device) <= num_accepted).to(counts)
        counts.index_add_(0, tokens, weights)

    def subtract_(self, tokens: Tensor) -> None:
        """Revert the count of tokens."""
        self.output_counts.index_add_(0, tokens, -self.output_counts.new_ones(len(tokens)))


@dataclass(frozen=True, slots=True)
class _PenaltySpan:
    """Assign positions [first, first + num_tokens) of a call to a turn's penalties."""

    params: SamplingParams
    penalty: _Penalty
    first: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _RowState:
    """Hold the sampling state of one turn; stops are `held_back` before position `min_len`."""

    params: SamplingParams
    seed: int
    min_len: int
    truncation: Truncation | None
    bias: tuple[Tensor, Tensor] | None
    held_back: Tensor
    penalty: _Penalty | None

    def adjusts(self, span: SampleSpan) -> bool:
        """Return whether some of the span's logits are adjusted before sampling."""
        is_early = span.position < self.min_len and len(self.held_back) > 0
        return self.bias is not None or self.penalty is not None or is_early


def _apply_penalties(
    logits: Tensor, penalized: list[_PenaltySpan], inputs: Tensor | None
) -> Tensor:
    """Apply repetition penalties (Keskar et al. 2019), and presence and frequency penalties.

    Repetition counts prompt and output, the others output only. `logits`: float32 [n, vocab], the
    positions of `penalized` one after the other.
    """
    each = [one for one in penalized for _ in range(one.num_tokens)]
    in_prompt = torch.stack([one.penalty.in_prompt for one in each])
    counts = torch.stack([one.penalty.output_counts for one in each])
    if inputs is not None:
        _count_drafts_(counts, penalized, inputs)
    factors = [
        (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        for p in (one.params for one in each)
    ]
    on_device = upload(torch.tensor(factors, dtype=torch.float32), logits.device)
    repetition, presence, frequency = on_device.unsqueeze(-1).unbind(1)
    is_output = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | is_output, repeated, logits)
    return logits - presence * is_output - frequency * counts


def _count_drafts_(counts: Tensor, penalized: list[_PenaltySpan], inputs: Tensor) -> None:
    """Add to the counts of each position the drafts that precede it in its span."""
    pairs: list[tuple[int, int]] = []
    offset = 0
    for one in penalized:
        pairs += [
            (offset + i, one.first + j) for i in range(one.num_tokens) for j in range(1, i + 1)
        ]
        offset += one.num_tokens
    if not pairs:
        return
    choices, sources = upload(torch.tensor(pairs, dtype=torch.int64), counts.device).unbind(1)
    ones = counts.new_ones(len(pairs))
    counts.index_put_((choices, inputs[sources]), ones, accumulate=True)
