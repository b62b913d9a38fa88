"""Logits -> one token per row, on the device.

Order of rules: logit bias, stop tokens held back until `min_tokens`, penalties, temperature,
top-k, top-p, min-p. The choice itself is a Gumbel race (Maddison et al. 2014): the token with the
largest `logit / temperature - log(Exp(1) noise)` is a sample of the softmax. The noise is a
function of (seed, position, token id), so a row's token never depends on its company.

What a turn must remember (penalty counts, seed) is kept per row from one `SamplingStart` to the
next and changes where tokens are sampled, so that launching ahead needs no word from the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from session_server.core.batch import SamplingStart
from session_server.core.sampling import SamplingParams
from session_server.runner.randomness import TokenNoise, noise_key
from session_server.runner.truncation import Truncation, thresholds

MIN_TEMPERATURE: Final = 1e-6
"""Lower ones are indistinguishable from greedy in fp32 and would divide by zero."""


class Sampler:
    """Samples for the rows of a page table."""

    __slots__ = ("_device", "_eos_token_ids", "_noise", "_rows", "_vocab_size")

    def __init__(
        self, vocab_size: int, *, device: torch.device, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """Args:
        vocab_size: width of the logits.
        device: where logits come from.
        eos_token_ids: held back until `min_tokens`, unless the turn ignores them.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = tuple(eos_token_ids)
        self._noise = TokenNoise(vocab_size, device=device)
        self._rows: dict[int, _RowState] = {}

    def start(self, row: int, start: SamplingStart) -> None:
        """Forget what the row remembers and begin a turn on it."""
        params = start.params
        self._rows[row] = _RowState(
            params=params,
            seed=start.seed,
            num_outputs=len(start.outputs),
            truncation=Truncation.of(params, self._vocab_size),
            bias=self._bias(params),
            held_back=self._held_back(params),
            penalty=self._penalty(start) if params.has_penalties else None,
        )

    def params(self, row: int) -> SamplingParams:
        """What the row's turn asked for; it must have been started."""
        return self._rows[row].params

    def adjusted(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Raw logits [n, vocab] with bias, held-back tokens and penalties; not a copy without."""
        states = [self._rows[row] for row in rows]
        if not any(state.is_adjusting for state in states):
            return logits
        adjusted = logits.clone()
        for i, state in enumerate(states):
            if state.bias is not None:
                adjusted[i].index_add_(0, *state.bias)
            if state.num_outputs < state.params.min_tokens:
                adjusted[i].index_fill_(0, state.held_back, -math.inf)
        penalised = [i for i, state in enumerate(states) if state.penalty is not None]
        if penalised:
            adjusted[penalised] = _penalise(adjusted[penalised], [states[i] for i in penalised])
        return adjusted

    def sample(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Choose the next token of every row, and remember it.

        Args:
            logits: float32 [n, vocab], raw; not changed.
            rows: the n rows, all started.
            positions: of the tokens to be chosen.

        Returns:
            int64 [n] on the device. Greedy rows take the lowest id among equals.
        """
        states = [self._rows[row] for row in rows]
        adjusted = self.adjusted(logits, rows)
        drawn = [i for i, state in enumerate(states) if not state.params.is_greedy]
        if len(drawn) < len(states):
            tokens = adjusted.argmax(dim=-1)
            if drawn:
                tokens[drawn] = self._draw(adjusted[drawn], states, positions, drawn)
        else:
            tokens = self._draw(adjusted, states, positions, drawn)
        for i, state in enumerate(states):
            state.num_outputs += 1
            if state.penalty is not None:
                state.penalty.add_(tokens[i : i + 1])
        return tokens

    def _draw(
        self,
        adjusted: Tensor,
        states: list[_RowState],
        positions: Sequence[int],
        drawn: list[int],
    ) -> Tensor:
        """The Gumbel race of `adjusted` [len(drawn), vocab]."""
        temperatures = [max(states[i].params.temperature, MIN_TEMPERATURE) for i in drawn]
        keys = [noise_key(states[i].seed, positions[i]) for i in drawn]
        divisors = torch.tensor(temperatures, dtype=torch.float32).to(self._device).unsqueeze(1)
        scaled = (adjusted - adjusted.amax(dim=-1, keepdim=True)) / divisors
        rules = [states[i].truncation for i in drawn]
        device_keys = torch.tensor(keys, dtype=torch.int64).to(self._device)
        if all(rule is None for rule in rules):
            return (scaled - self._noise.exponentials(device_keys).log_()).argmax(dim=-1)
        is_kept = scaled >= thresholds(scaled, rules)
        if self._device.type != "cpu":
            scores = scaled - self._noise.exponentials(device_keys).log_()
            return scores.masked_fill_(~is_kept, -math.inf).argmax(dim=-1)
        # Noise for a large vocabulary takes 2 ms a row, for the few tokens kept nothing; a device
        # would have to wait to learn how many they are.
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
            torch.tensor(ids, dtype=torch.int64, device=self._device),
            torch.tensor(values, dtype=torch.float32, device=self._device),
        )

    def _held_back(self, params: SamplingParams) -> Tensor:
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self._eos_token_ids)
        ids = sorted(i for i in stops if 0 <= i < self._vocab_size) if params.min_tokens else []
        return torch.tensor(ids, dtype=torch.int64, device=self._device)

    def _penalty(self, start: SamplingStart) -> _Penalty:
        def counted(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Tensor:
            counts = np.bincount(tokens, minlength=self._vocab_size)[: self._vocab_size]
            return torch.from_numpy(counts.astype(np.float32)).to(self._device)

        return _Penalty(counted(start.context) > 0, counted(start.outputs))


@dataclass(frozen=True, slots=True)
class _Penalty:
    """`in_prompt`: bool [vocab]; `output_counts`: float32 [vocab]."""

    in_prompt: Tensor
    output_counts: Tensor

    def add_(self, token: Tensor) -> None:
        """Count one output token, int64 [1], still unknown to the host."""
        self.output_counts.index_add_(0, token, self.output_counts.new_ones(1))


@dataclass(slots=True)
class _RowState:
    """What one turn asked for and has said so far."""

    params: SamplingParams
    seed: int
    num_outputs: int
    truncation: Truncation | None
    bias: tuple[Tensor, Tensor] | None
    held_back: Tensor
    penalty: _Penalty | None

    @property
    def is_adjusting(self) -> bool:
        """Whether the row's logits change before the choice."""
        return (
            self.bias is not None
            or self.penalty is not None
            or self.num_outputs < self.params.min_tokens
        )


def _penalise(logits: Tensor, states: list[_RowState]) -> Tensor:
    """Repetition (Keskar et al. 2019) over prompt and output; presence, frequency over output."""
    penalties = [state.penalty for state in states if state.penalty is not None]
    in_prompt = torch.stack([penalty.in_prompt for penalty in penalties])
    counts = torch.stack([penalty.output_counts for penalty in penalties])
    factors = torch.tensor(
        [
            (s.params.repetition_penalty, s.params.presence_penalty, s.params.frequency_penalty)
            for s in states
        ],
        dtype=torch.float32,
    ).to(logits.device)
    repetition, presence, frequency = factors.unsqueeze(-1).unbind(1)
    said = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | said, repeated, logits)
    return logits - presence * said - frequency * counts
