"""Constrain rows to grammars: what tokens may come next is found out while the forward computes.

A matcher advances by the tokens that its row sampled, then marks the tokens that may follow: the
mask. Both happen on a thread of their own, in native code without the interpreter lock. A launch
asks for the masks before its forward and needs them behind it, so the device computes meanwhile. On
CUDA the thread waits for the tokens of the forward before, which the launch therefore never does.

Masks of drafts follow from the drafts before them. Behind a draft that is not allowed every token
is, because nothing sampled there can be accepted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from session_server.core.batch import BatchRow, SamplingStart
from session_server.core.grammar import CompiledMatcher, failure
from session_server.runner.outputs import pinned
from session_server.runner.verification import SampleSpan

Words = NDArray[np.int32]
"""Bits of tokens, 32 to a word, the lowest first."""


@dataclass(slots=True)
class Masks:
    """Hold the masks of one forward.

    `rows`: indices of the constrained logits among all that are sampled. `forbidden`: bool [rows,
    vocab], on the host. `failures`: by span, from which of its positions on there is no mask, and
    why.
    """

    rows: list[int]
    forbidden: Tensor
    failures: dict[int, tuple[int, str]]

    def part(self, first: int, end: int) -> Masks | None:
        """Return the masks of logits [first, end), as if there were no others; None without any."""
        own = slice(bisect_left(self.rows, first), bisect_left(self.rows, end))
        rows = [row - first for row in self.rows[own]]
        return Masks(rows, self.forbidden[own], self.failures) if rows else None


class Constraints:
    """Keep the matchers of the rows of a page table; called by the thread that launches."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._rows: dict[int, _Row] = {}
        self._masking = ThreadPoolExecutor(1, "grammar-masks")
        self._starting = ThreadPoolExecutor(1, "grammar-start")

    def start(self, row: int, start: SamplingStart) -> None:
        """Start a turn on a row, and drop the matcher of the row's previous turn."""
        if start.grammar is None:
            self.end(row)
            return
        assert isinstance(start.grammar, CompiledMatcher), "compiled for this runner"
        state = _Row.of(start, start.grammar, self._vocab_size, self._eos_token_ids)
        # A long answer that was interrupted is read again while its context is computed again.
        state.matcher = self._starting.submit(state.restore)
        self._rows[row] = state

    def end(self, row: int) -> None:
        """Drop the matcher of a row's turn, if it has one."""
        self._rows.pop(row, None)

    def constrain(self, spans: Sequence[SampleSpan]) -> bool:
        """Return whether a row of these is constrained."""
        return bool(self._rows) and any(span.row in self._rows for span in spans)

    def ask(
        self, rows: Sequence[BatchRow], spans: Sequence[SampleSpan], made: Tensor | None
    ) -> Future[Masks]:
        """Begin to compute the masks of a forward, of which a row is constrained.

        `rows`: those of the batch that sample, one for each of `spans`. `made`: the drafts of those
        that do not bring theirs, as `DraftModel.propose` returns them.
        """
        asked: list[_Asked] = []
        first = num_made = 0
        for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
            is_made = row.num_drafts > 0 and row.drafts is None
            if (state := self._rows.get(span.row)) is not None:
                drafts: list[int] = [] if row.drafts is None else row.drafts.tolist()
                if is_made:
                    assert made is not None, "drafts are given or made"
                    drafts = made[num_made, : row.num_drafts].tolist()
                asked.append(_Asked(state, index, first, span, drafts))
            num_made += is_made
            first += span.num_tokens
        return self._masking.submit(self._fill, asked)

    def advance(
        self, spans: Sequence[SampleSpan], tokens: Tensor, num_accepted: Tensor | None
    ) -> None:
        """Advance the matchers of rows by what they sampled, as `Sampler.count_outputs` takes it.

        Does not wait for the device.
        """
        read_tokens, read_accepted = _reader(tokens, num_accepted)
        states = [self._rows.get(span.row) for span in spans]
        lengths = [span.num_tokens for span in spans]

        def work() -> None:
            sampled, accepted = read_tokens(), read_accepted()
            first = 0
            for index, (state, num_tokens) in enumerate(zip(states, lengths, strict=True)):
                if state is not None:
                    num_kept = 1 + (accepted[index] if accepted else 0)
                    state.consume(sampled[first : first + num_kept])
                first += num_tokens

        self._masking.submit(work)

    def _fill(self, asked: list[_Asked]) -> Masks:
        lengths = [each.span.num_tokens for each in asked]
        words = np.full((sum(lengths), asked[0].state.num_words), -1, dtype=np.int32)
        failures: dict[int, tuple[int, str]] = {}
        rows: list[int] = []
        first = 0
        for each, num_tokens in zip(asked, lengths, strict=True):
            own = words[first : first + num_tokens]
            if (failed := each.state.fill(own, each.span.position, each.drafts)) is not None:
                failures[each.index] = failed
            rows += range(each.first, each.first + num_tokens)
            first += num_tokens
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        forbidden = torch.from_numpy(bits[:, : self._vocab_size] == 0)
        return Masks(rows, forbidden, failures)


@dataclass(slots=True)
class _Row:
    """Match the output of one turn. Used by one thread at a time.

    `outputs`: those that the matcher has consumed. `early`, `late`: bits of the tokens that are
    held back before position `min_len`, and from there on, unless nothing else may follow.
    """

    compiled: CompiledMatcher
    outputs: list[int]
    eos_token_ids: frozenset[int]
    min_len: int
    early: Words
    late: Words
    known: Words
    matcher: Future[LLMatcher] = field(default_factory=Future)

    @classmethod
    def of(
        cls,
        start: SamplingStart,
        compiled: CompiledMatcher,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> _Row:
        """Return the state of a turn that starts."""
        params, num_tokens = start.params, compiled.num_tokens
        late = eos_token_ids if params.ignore_eos else frozenset()
        early = {*params.stop_token_ids, *eos_token_ids} if params.min_tokens else late
        return cls(
            compiled=compiled,
            outputs=start.outputs.tolist(),
            eos_token_ids=eos_token_ids,
            min_len=start.prompt_len + params.min_tokens,
            early=_words([each for each in early if each < num_tokens], num_tokens),
            late=_words([each for each in late if each < num_tokens], num_tokens),
            known=_words(slice(min(vocab_size, num_tokens)), num_tokens),
        )

    @property
    def num_words(self) -> int:
        """Return the words of one mask."""
        return len(self.known)

    def restore(self) -> LLMatcher:
        """Return a matcher that has consumed `outputs`."""
        matcher = self.compiled.matcher.deep_copy()
        matcher.consume_tokens(self.outputs)
        return matcher

    def consume(self, tokens: list[int]) -> None:
        """Advance by tokens; what follows the end of the answer is dropped with its turn."""
        for token in tokens:
            if token in self.eos_token_ids:
                return
            self.outputs.append(token)
            self.matcher.result().consume_token(token)

    def fill(self, masks: Words, position: int, drafts: list[int]) -> tuple[int, str] | None:
        """Write the masks of `position` and of those behind each of `drafts`, all bits set so far.

        Returns:
            From which of them on there is no mask, and why; None if all are as they should be.
        """
        matcher = self.matcher.result()
        for depth in range(len(masks)):
            mask = masks[depth]
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            np.bitwise_and(mask, self.known, out=mask)
            reason = failure(matcher) or (None if mask.any() else "no token can follow")
            if reason is not None:
                masks[depth:] = -1
                if depth > 0:
                    # The answer may never come this far: go on as if it had not been tried.
                    self.matcher = Future()
                    self.matcher.set_result(self.restore())
                return depth, reason
            held = self.early if position + depth < self.min_len else self.late
            if (kept := mask & ~held).any():
                mask[:] = kept
            if depth == len(drafts) or not _allows(mask, drafts[depth], self.eos_token_ids):
                break
            matcher.consume_token(drafts[depth])
        if depth:
            matcher.rollback(depth)
        return None


@dataclass(frozen=True, slots=True)
class _Asked:
    """Ask for the masks of span number `index`, whose logits begin at `first`."""

    state: _Row
    index: int
    first: int
    span: SampleSpan
    drafts: list[int]


def _allows(mask: Words, token: int, eos_token_ids: frozenset[int]) -> bool:
    """Return whether a token may come next, and another behind it."""
    return token not in eos_token_ids and bool(mask[token // 32] >> (token % 32) & 1)


def _words(token_ids: slice | list[int], num_tokens: int) -> Words:
    """Return the words of a mask of `num_tokens` in which these tokens are set.

    Every start of a turn waits for it, so that nothing here goes token by token.
    """
    bits = np.zeros(-(-num_tokens // 32) * 32, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _reader(
    tokens: Tensor, num_accepted: Tensor | None
) -> tuple[Callable[[], list[int]], Callable[[], list[int]]]:
    """Return functions that wait for tensors, int64 [n], and return their values.

    On CUDA the copies are queued now: a later read would wait for forwards launched in between.
    """
    if tokens.device.type != "cuda":
        return tokens.tolist, (list if num_accepted is None else num_accepted.tolist)
    copies = [pinned(each) for each in (tokens, num_accepted) if each is not None]
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read(index: int) -> list[int]:
        copied.synchronize()
        return [] if index >= len(copies) else copies[index].tolist()

    return lambda: read(0), lambda: read(1)
