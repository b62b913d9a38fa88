"""The sampler against plain formulas and against the distribution it claims."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from session_server.core.batch import SamplingStart
from session_server.core.sampling import SamplingParams
from session_server.runner import sampler as sampling
from session_server.runner.constraints import Masks
from session_server.runner.sampler import Sampler
from session_server.runner.verification import SampleSpan
from tests.runner.distribution import assert_distributed

VOCAB = 12
NUM_DRAWS = 6000
CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 0.2, 0.3, -2.0, 1.2, -0.1])


def start(
    params: SamplingParams,
    *,
    seed: int = 0,
    prompt_len: int = 0,
    context: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
) -> SamplingStart:
    return SamplingStart(
        params,
        seed,
        prompt_len,
        np.array(context, dtype=np.int32),
        np.array(outputs, dtype=np.int32),
    )


def say(made: Sampler, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> list[int]:
    """One token per row, chosen and remembered."""
    draws = [SampleSpan(row, position) for row, position in zip(rows, positions, strict=True)]
    tokens = made.sample(logits, draws)
    made.count_outputs(draws, tokens)
    return tokens.tolist()


def sampler(eos_token_ids: tuple[int, ...] = ()) -> Sampler:
    return Sampler(VOCAB, device=CPU, eos_token_ids=eos_token_ids)


def draws(params: SamplingParams, *, num: int = NUM_DRAWS, seed: int = 5) -> list[int]:
    """Tokens of `num` positions with the same logits: fifty rows at a time."""
    made, tokens = sampler(), []
    for row in range(1, 51):
        made.start(row, start(params, seed=seed + row))
    for position in range(num // 50):
        logits = LOGITS.expand(50, -1)
        tokens += say(made, logits, range(1, 51), [position] * 50)
    return tokens


def softmax(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(x / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_tokens_follow_the_softmax_at_a_temperature(temperature: float) -> None:
    tokens = draws(SamplingParams(temperature=temperature))
    assert_distributed(Counter(tokens), softmax(LOGITS.tolist(), temperature))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.3),
        SamplingParams(top_k=6, top_p=0.8, min_p=0.2, temperature=1.5),
    ],
)
def test_truncated_tokens_follow_the_renormalised_softmax(params: SamplingParams) -> None:
    full = softmax(LOGITS.tolist(), params.temperature)
    order = sorted(range(VOCAB), key=lambda i: -full[i])[: params.top_k or VOCAB]
    total, mass, nucleus = sum(full[i] for i in order), 0.0, []
    for i in order:
        if mass < params.top_p:
            nucleus.append(i)
        mass += full[i] / total
    allowed = {i for i in nucleus if full[i] >= params.min_p * full[order[0]]}
    weight = sum(full[i] for i in allowed)
    assert 1 < len(allowed) < VOCAB
    expected = [p / weight if i in allowed else 0 for i, p in enumerate(full)]
    assert_distributed(Counter(draws(params)), expected)


def test_logit_bias_shifts_the_distribution() -> None:
    biased = LOGITS.clone()
    biased[9] += 4.0
    biased[0] -= 50.0
    tokens = draws(SamplingParams(logit_bias=((9, 4.0), (0, -50.0))))
    expected = [p if p > 1e-9 else 0 for p in softmax(biased.tolist(), 1.0)]
    assert_distributed(Counter(tokens), expected)


def test_greedy_is_the_first_of_the_largest() -> None:
    made = sampler()
    logits = torch.zeros(3, VOCAB)
    logits[0, [3, 7]] = 1.0
    logits[1, 11] = 1.0
    for row, params in enumerate(
        [SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(temperature=0.0)]
    ):
        made.start(row, start(params))
    assert say(made, logits, [0, 1, 2], [5, 5, 5]) == [3, 11, 0]


def test_a_tiny_temperature_is_greedy_and_not_nan() -> None:
    made = sampler()
    made.start(1, start(SamplingParams(temperature=1e-300)))
    assert say(made, 1e4 * LOGITS[None], [1], [0]) == [0]


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=5, temperature=3.0),
    SamplingParams(top_p=0.9, temperature=2.0),
    SamplingParams(repetition_penalty=1.3, temperature=2.0),
    SamplingParams(logit_bias=((4, 2.0),), temperature=2.0, min_p=0.01),
]


def test_a_seed_decides_the_tokens_whatever_else_is_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(30, len(MIXED), VOCAB, generator=generator)

    def together(order: list[int]) -> dict[int, list[int]]:
        made = sampler()
        for row in order:
            made.start(row, start(MIXED[row], seed=100 + row))
        said: dict[int, list[int]] = {row: [] for row in order}
        for step in range(30):
            tokens = say(made, logits[step, order], order, [step + row for row in order])
            for row, token in zip(order, tokens, strict=True):
                said[row].append(token)
        return said

    everyone = together(list(range(len(MIXED))))
    assert together(list(reversed(range(len(MIXED))))) == everyone
    for row in range(len(MIXED)):
        assert together([row])[row] == everyone[row]


def test_other_seeds_and_positions_give_other_tokens() -> None:
    params = SamplingParams(temperature=5.0)
    assert draws(params, num=500, seed=0) != draws(params, num=500, seed=1000)
    assert len(set(draws(params, num=500))) > VOCAB // 2


def penalised(
    params: SamplingParams, context: tuple[int, ...], outputs: tuple[int, ...]
) -> list[float]:
    """The three penalties in plain Python, on `LOGITS`."""
    expected = []
    for token, logit in enumerate(LOGITS.tolist()):
        if token in context or token in outputs:
            factor = params.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor  # noqa: PLW2901
        count = outputs.count(token)
        expected.append(
            logit - params.presence_penalty * (count > 0) - params.frequency_penalty * count
        )
    return expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(presence_penalty=1.1),
        SamplingParams(frequency_penalty=0.6),
        SamplingParams(frequency_penalty=-0.6, presence_penalty=-0.2),
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
    ],
)
def test_penalties_change_logits_as_their_formulas_say(params: SamplingParams) -> None:
    context, outputs = (1, 1, 9, 3), (3, 10, 3, 6)
    made = sampler()
    made.start(1, start(params, context=context, outputs=outputs))
    adjusted = made.adjusted(LOGITS[None], [SampleSpan(1, 0)])
    torch.testing.assert_close(adjusted[0], torch.tensor(penalised(params, context, outputs)))


def test_sampled_tokens_count_as_output_at_once() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.45)
    made, outputs = sampler(), []
    made.start(1, start(params, outputs=(0,)))
    for position in range(12):
        expected = penalised(params, (), (0, *outputs))
        (token,) = say(made, LOGITS[None], [1], [position])
        assert token == max(range(VOCAB), key=lambda i: (expected[i], -i))
        outputs.append(token)
    assert len(set(outputs)) > 3


def test_a_new_start_forgets_the_turn_before() -> None:
    made = sampler()
    made.start(1, start(SamplingParams(temperature=0.0, presence_penalty=2.0), outputs=(0,)))
    say(made, LOGITS[None], [1], [0])
    made.start(1, start(SamplingParams(temperature=0.0, presence_penalty=2.0)))
    assert say(made, LOGITS[None], [1], [0]) == [0]


def test_nothing_is_kept_of_a_turn_that_has_ended() -> None:
    made = sampler()
    for row in (1, 2):
        made.start(row, start(SamplingParams(temperature=0.0, presence_penalty=2.0), outputs=(0,)))
    made.end(1)
    made.end(3)
    assert list(made._rows) == [2]
    assert say(made, LOGITS[None], [2], [0]) == [1], "its own counts go on"


def test_stop_tokens_are_held_back_until_min_tokens() -> None:
    made = sampler(eos_token_ids=(0,))
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(1,))
    made.start(1, start(params, prompt_len=20))
    said = [say(made, LOGITS[None], [1], [20 + i])[0] for i in range(5)]
    assert said == [10, 10, 10, 0, 0]


def test_outputs_before_a_retraction_count_towards_min_tokens_without_being_sent() -> None:
    made = sampler(eos_token_ids=(0,))
    made.start(1, start(SamplingParams(temperature=0.0, min_tokens=3), prompt_len=20))
    assert [say(made, LOGITS[None], [1], [i])[0] for i in (22, 23)] == [1, 0]


def test_a_turn_that_ignores_eos_may_say_it_before_min_tokens() -> None:
    made = sampler(eos_token_ids=(0,))
    params = SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True)
    made.start(1, start(params))
    assert say(made, LOGITS[None], [1], [0]) == [0]


def test_ids_beyond_the_vocabulary_disturb_nobody() -> None:
    params = SamplingParams(
        temperature=0.0, logit_bias=((VOCAB, 9.0),), min_tokens=1, stop_token_ids=(VOCAB + 5,)
    )
    made = sampler()
    made.start(1, start(params, context=(VOCAB + 1,)))
    assert say(made, LOGITS[None], [1], [0]) == [0]


def test_sampling_leaves_the_logits_alone() -> None:
    made, logits = sampler(), LOGITS[None].clone()
    made.start(1, start(SamplingParams(top_k=3, presence_penalty=1.0, logit_bias=((1, 1.0),))))
    say(made, logits, [1], [0])
    assert torch.equal(logits, LOGITS[None])


@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_blocks_of_rows_say_what_all_rows_say_at_once(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=3, repetition_penalty=1.5, presence_penalty=0.5),
        SamplingParams(logit_bias=((3, 2.0),)),
    )
    spans = [SampleSpan(row, 4, 1 + row % 3) for row in range(1, 9)]
    num_logits = sum(span.num_tokens for span in spans)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((num_logits, VOCAB), generator=generator)
    inputs = torch.randint(VOCAB, (num_logits,), generator=generator)
    constrained = [1, 4, 5, num_logits - 1]
    forbidden = torch.rand((len(constrained), VOCAB), generator=generator) < 0.5
    made = sampler()
    for span in spans:
        params = kinds[span.row % len(kinds)]
        made.start(span.row, start(params, seed=span.row, prompt_len=2, context=(1, 2)))

    def sampled() -> list[list[int]]:
        masks = Masks(constrained, forbidden, {})
        return [made.sample(logits, spans, inputs, masks=m).tolist() for m in (None, masks)]

    together = sampled()
    num_bytes = most * sampling.BYTES_PER_LOGIT * VOCAB
    monkeypatch.setattr(sampling, "SAMPLED_BYTES", num_bytes)
    blocks = [sum(span.num_tokens for span in block) for block in made._blocks(spans)]
    assert sum(blocks) == num_logits
    assert max(blocks) <= max(most, 3)
    assert sampled() == together


class _Peak(TorchDispatchMode):
    """Count the bytes that tensors of a device take at most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and made.device.type == "meta":
                storage = made.untyped_storage()
                if storage._cdata not in self._held:
                    self._held[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._held.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._held.values()))
        return out


def test_a_block_takes_the_memory_that_it_is_made_for() -> None:
    vocab_size, num_rows, meta = 10_000, 10, torch.device("meta")
    made = Sampler(vocab_size, device=meta)
    params = SamplingParams(top_p=0.9, repetition_penalty=1.1)
    for row in range(num_rows):
        made.start(row, start(params))
    logits = torch.empty((num_rows, vocab_size), device=meta)
    masks = Masks(list(range(num_rows)), torch.zeros(logits.shape, dtype=torch.bool), {})
    spans = [SampleSpan(row, 1) for row in range(num_rows)]
    for each in (None, masks):
        with _Peak() as memory, torch.inference_mode():
            made.sample(logits, spans, masks=each)
        assert 0.8 < memory.peak / (sampling.BYTES_PER_LOGIT * logits.numel()) <= 1
