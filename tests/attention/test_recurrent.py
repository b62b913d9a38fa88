"""States over a forward: convolutions and recurrences, however a row is cut into launches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cache.pool.recurrent import StatePool
from cache.spec import LayerGroup, LayerKind
from cache.types import PoolName, StateMoves
from session_server.attention.base import AttentionMeta, Recurrence, Span
from session_server.attention.recurrent import RecurrentBackend
from session_server.models.layers.gated_delta import DeltaRule
from session_server.models.layers.mamba2 import StateSpace

CHANNELS, WIDTH, HEADS, GROUPS, DIM, SIZE = 6, 4, 4, 2, 3, 5
NUM_TOKENS = 150
PAGES_PER_ROW = 3
CUTS = ((150,), (1,) * 150, (7,) * 21 + (3,), (64, 64, 22), (65, 1, 1, 80, 3))


@pytest.fixture(name="pool")
def _pool() -> StatePool:
    return new_pool((WIDTH - 1, CHANNELS), (HEADS, DIM, SIZE))


def new_pool(*shapes: tuple[int, ...]) -> StatePool:
    group = LayerGroup(PoolName("state"), LayerKind.RECURRENT, (0, 1), 0, 0, 4, state_shapes=shapes)
    return StatePool(group, num_pages=20, device=torch.device("cpu"))


class Launches:
    """Rows of one sequence each, launched together, each cut in a way of its own."""

    def __init__(self, *cuts: tuple[int, ...], page_size: int) -> None:
        self._left = [list(cut) for cut in cuts]
        self._start = [0] * len(cuts)
        self._state = [0] * len(cuts)
        self._page_size = page_size

    def __iter__(self) -> Iterator[tuple[AttentionMeta, list[tuple[int, slice, slice]]]]:
        """What is launched, and for every span its row, its tokens in the batch and in the row."""
        while any(self._left):
            live = sorted((left[0], row) for row, left in enumerate(self._left) if left)
            spans, places, offset = [], [], 0
            for num_tokens, row in live:
                start = self._start[row]
                spans.append(Span(row + 1, start, num_tokens, offset, self._moves(row)))
                end = start + num_tokens
                places.append((row, slice(offset, offset + num_tokens), slice(start, end)))
                offset += num_tokens
                self._start[row] = end
                del self._left[row][0]
            yield AttentionMeta(tuple(spans), {}), places

    def _moves(self, row: int) -> StateMoves:
        start, end = self._start[row], self._start[row] + self._left[row][0]
        first = 1 + row * PAGES_PER_ROW
        unused = [p for p in range(first, first + PAGES_PER_ROW) if p != self._state[row]]
        last_whole = end - end % self._page_size
        lengths = (last_whole, end) if start < last_whole < end else (end,)
        moves = StateMoves(self._state[row], tuple(zip(lengths, unused, strict=False)))
        self._state[row] = moves.targets[-1][1]
        return moves


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("first", CUTS, ids=lambda cut: f"{cut[0]}x{len(cut)}")
def test_a_convolution_is_that_of_the_whole_row(
    first: tuple[int, ...], page_size: int, pool: StatePool
) -> None:
    rows = [noise(NUM_TOKENS, CHANNELS, seed=seed) for seed in range(3)]
    taps, bias = noise(WIDTH, CHANNELS, seed=7), noise(CHANNELS, seed=8)
    said = [torch.zeros(NUM_TOKENS, CHANNELS) for _ in rows]
    for meta, places in Launches(first, CUTS[2], CUTS[4], page_size=page_size):
        plan = RecurrentBackend(pool).plan(meta)
        x = torch.cat([rows[row][of_row] for row, _, of_row in places])
        y = plan.convolve(1, x, taps, bias)
        for row, of_batch, of_row in places:
            said[row][of_row] = y[of_batch]
    for row, spoken in zip(rows, said, strict=True):
        padded = functional.pad(row.t(), (WIDTH - 1, 0))
        weight = taps.t().unsqueeze(1)
        whole = functional.conv1d(padded.unsqueeze(0), weight, bias, groups=CHANNELS)
        torch.testing.assert_close(spoken, whole[0].t(), rtol=0, atol=1e-5)
    assert not any(part.any() for part in pool.parts[0]), "another layer was written"


def selective(seed: int) -> tuple[Tensor, ...]:
    return (
        noise(NUM_TOKENS, HEADS, DIM, seed=seed),
        -noise(NUM_TOKENS, HEADS, seed=seed + 1).abs(),
        noise(NUM_TOKENS, GROUPS, SIZE, seed=seed + 2),
        noise(NUM_TOKENS, GROUPS, SIZE, seed=seed + 3),
    )


def delta(seed: int) -> tuple[Tensor, ...]:
    q, k = (noise(NUM_TOKENS, GROUPS, DIM, seed=seed + side) for side in (4, 5))
    return (
        functional.normalize(q, dim=-1),
        functional.normalize(k, dim=-1),
        noise(NUM_TOKENS, HEADS, SIZE, seed=seed + 6),
        -0.3 * noise(NUM_TOKENS, HEADS, seed=seed + 7).abs(),
        noise(NUM_TOKENS, HEADS, seed=seed + 8).sigmoid(),
    )


def selective_by_hand(x: Tensor, decay: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """The recurrence of Mamba2, token by token and head by head."""
    out = torch.zeros(NUM_TOKENS, HEADS, DIM)
    for head in range(HEADS):
        group, state = head * GROUPS // HEADS, torch.zeros(DIM, SIZE)
        for t in range(NUM_TOKENS):
            state = decay[t, head].exp() * state + torch.outer(x[t, head], write[t, group])
            out[t, head] = state @ read[t, group]
    return out


def delta_by_hand(*inputs: Tensor) -> Tensor:
    """The gated delta rule, token by token and head by head."""
    q, k, v, decay, write = inputs
    out = torch.zeros(NUM_TOKENS, HEADS, SIZE)
    for head in range(HEADS):
        group, state = head * GROUPS // HEADS, torch.zeros(DIM, SIZE)
        for t in range(NUM_TOKENS):
            state = decay[t, head].exp() * state
            wrong = v[t, head] - k[t, group] @ state
            state = state + torch.outer(k[t, group], write[t, head] * wrong)
            out[t, head] = q[t, group] @ state
    return out


RULES = {
    "state space": (StateSpace(), selective, selective_by_hand),
    "delta rule": (DeltaRule(), delta, delta_by_hand),
}


@pytest.mark.parametrize("first", CUTS, ids=lambda cut: f"{cut[0]}x{len(cut)}")
@pytest.mark.parametrize("name", RULES)
def test_a_recurrence_is_that_of_one_token_after_the_other(
    name: str, first: tuple[int, ...], pool: StatePool
) -> None:
    recurrence: Recurrence
    recurrence, draw, by_hand = RULES[name]
    rows = [draw(seed) for seed in (0, 20)]
    said: list[list[Tensor]] = [[], []]
    for meta, places in Launches(first, CUTS[4], page_size=4):
        plan = RecurrentBackend(pool).plan(meta)
        inputs = [
            torch.cat([rows[row][side][of_row] for row, _, of_row in places])
            for side in range(len(rows[0]))
        ]
        out = plan.recur(0, recurrence, *inputs)
        for row, of_batch, _ in places:
            said[row].append(out[of_batch])
    for row, spoken in zip(rows, said, strict=True):
        torch.testing.assert_close(torch.cat(spoken), by_hand(*row), rtol=1e-5, atol=2e-5)


def beginnings(sides: list[Tensor], spans: list[Span]) -> Tensor:
    return torch.cat([side[: span.num_tokens] for side, span in zip(sides, spans, strict=True)])


@pytest.mark.parametrize("num_right", range(4))
@pytest.mark.parametrize("name", RULES)
def test_a_row_goes_on_from_its_last_accepted_draft(
    name: str, num_right: int, pool: StatePool
) -> None:
    """Rows that verify three guesses and one, beside one of one token and a chunk."""
    recurrence: Recurrence
    recurrence, draw, by_hand = RULES[name]
    rows = [draw(seed) for seed in range(4)]
    left = (((1, 1),), ((1, 2), (2, 3), (3, 4), (4, 5)), ((1, 6), (2, 7)), ((8, 8), (9, 9)))
    spans: list[Span] = []
    for row, targets in enumerate(left, 1):
        offset = sum(span.num_tokens for span in spans)
        spans.append(Span(row, 0, targets[-1][0], offset, StateMoves(0, targets)))
    right = 1 + num_right
    moves = StateMoves(left[1][num_right][1], ((NUM_TOKENS, 10),))
    further = AttentionMeta((Span(2, right, NUM_TOKENS - right, 0, moves),), {})
    plans = [
        RecurrentBackend(pool).plan(meta) for meta in (AttentionMeta(tuple(spans), {}), further)
    ]

    sides = [beginnings(list(of_rows), spans) for of_rows in zip(*rows, strict=True)]
    out = plans[0].recur(0, recurrence, *sides)
    whole = beginnings([by_hand(*row) for row in rows], spans)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=2e-5)
    behind = plans[1].recur(0, recurrence, *(side[right:] for side in rows[1]))
    torch.testing.assert_close(behind, by_hand(*rows[1])[right:], rtol=1e-5, atol=2e-5)

    x, taps = [noise(NUM_TOKENS, CHANNELS, seed=seed) for seed in range(4)], noise(WIDTH, CHANNELS)
    plans[0].convolve(0, beginnings(x, spans), taps, None)
    padded = functional.pad(x[1].t(), (WIDTH - 1, 0)).unsqueeze(0)
    whole = functional.conv1d(padded, taps.t().unsqueeze(1), groups=CHANNELS)[0].t()
    behind = plans[1].convolve(0, x[1][right:], taps, None)
    torch.testing.assert_close(behind, whole[right:], rtol=0, atol=1e-5)


def test_padding_and_what_was_read_leave_every_state_as_it_is(pool: StatePool) -> None:
    for part in pool.parts[0]:
        part.copy_(noise(*part.shape))
    before = [part.clone() for part in pool.parts[0]]
    moves = StateMoves(5, ((9, 6), (11, 7)))
    spans = (Span(0, 0, 1, 0), Span(0, 0, 1, 1), Span(2, 8, 3, 2, moves))
    plan = RecurrentBackend(pool).plan(AttentionMeta(spans, {}))
    plan.convolve(0, noise(5, CHANNELS), noise(WIDTH, CHANNELS), None)
    plan.recur(0, StateSpace(), *(side[:5] for side in selective(0)))
    for part, was in zip(pool.parts[0], before, strict=True):
        changed = {page for page in range(len(part)) if not part[page].equal(was[page])}
        assert changed == {0, 6, 7}


def test_a_session_begins_at_zero_whatever_the_padding_page_holds(pool: StatePool) -> None:
    for part in pool.parts[0]:
        part.fill_(torch.nan)
    for num_tokens in (1, 3):
        span = Span(1, 0, num_tokens, 0, StateMoves(0, ((num_tokens, 4),)))
        plan = RecurrentBackend(pool).plan(AttentionMeta((span,), {}))
        y = plan.convolve(0, noise(num_tokens, CHANNELS), noise(WIDTH, CHANNELS), None)
        out = plan.recur(0, StateSpace(), *(side[:num_tokens] for side in selective(0)))
        assert y.isfinite().all()
        assert out.isfinite().all()
        assert all(part[4].isfinite().all() for part in pool.parts[0])


def test_a_pool_of_states_takes_the_bytes_of_its_parts(pool: StatePool) -> None:
    per_state = 2 * ((WIDTH - 1) * CHANNELS + HEADS * DIM * SIZE) * 4
    assert pool.num_bytes == pool.num_pages * per_state
    assert [part.shape for part in pool.page(3)] == [
        (2, WIDTH - 1, CHANNELS),
        (2, HEADS, DIM, SIZE),
    ]
